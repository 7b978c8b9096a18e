"""The compressed and the sliding branch, which differ only in the range of keys that each query sees."""

from nsa.backends.triton.ranged_backward import ranged_backward
from nsa.backends.triton.ranged_forward import ranged_forward

compressed_forward = sliding_forward = ranged_forward
compressed_backward = sliding_backward = ranged_backward
