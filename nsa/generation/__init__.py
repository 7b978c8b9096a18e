"""Text generation: sampling, CUDA-graph decode steps, prompt lookup, and text from tokens.

`nsa.generate` has the functions for users and the command.
"""
