"""The flags of every command, one module each, importable without torch: help and wrong flags take no time.

A module has `add_arguments(parser)`, which declares the flags and shows an example in `parser.epilog`.
"""
