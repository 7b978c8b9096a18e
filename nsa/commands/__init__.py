"""The flags of every command, importable without torch: help and wrong flags take no time."""
