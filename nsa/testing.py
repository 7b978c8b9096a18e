"""One definition of "close enough", shared by the self-test, `nsa bench tune` and the tests.

A result is compared with the reference in fp64. Plain torch makes an error too when it does the same computation in the
result's dtype. A backend may make twice that error, plus a few roundings of the largest value, because plain torch may
happen to be exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE_FACTOR = 2
TOLERANCE_ROUNDINGS = 4


def finite(x: Tensor) -> Tensor:
    """`x` with 0 in place of every infinity."""
    return x.masked_fill(x.isinf(), 0.0)


def max_error(x: Tensor, exact: Tensor) -> float:
    """`max |x - exact|`, with `exact` in fp64.

    Infinite if the shapes differ, if either holds a NaN, or if an infinity is not the same in both.
    """
    if x.shape != exact.shape:
        return math.inf
    error = (x.double() - exact).abs().masked_fill_(x.double() == exact, 0.0)
    return float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()) if error.numel() else 0.0


def tolerance(plain: Tensor, exact: Tensor, *, size: float | None = None, rounding: float | None = None) -> float:
    """The largest error that a result may have: `2 * max_error(plain, exact) + rounding * size`.

    Args:
        plain: The same computation by plain torch in the result's dtype. If it is infinitely wrong, it allows nothing.
        exact: The reference in fp64, same shape.
        size: Magnitude of the sums that were rounded; default: the largest finite value of `exact`.
        rounding: Relative rounding error of a value of that magnitude; default: 4 times the eps of `plain`'s dtype.
    """
    own = max_error(plain, exact)
    if size is None:
        size = float(finite(exact).abs().max()) if exact.numel() else 0.0
    rounding = TOLERANCE_ROUNDINGS * torch.finfo(plain.dtype).eps if rounding is None else rounding
    return (TOLERANCE_FACTOR * own if math.isfinite(own) else 0.0) + rounding * size


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The larger of the maximum norm and the 2-norm of the difference, each divided by that of `expected`.

    One element far off shows in the first, all of them a little off in the second. Infinite where either holds a NaN.
    """
    a, e = actual.float(), expected.float()
    difference = (a - e).masked_fill_(a == e, 0.0)
    tiny = torch.finfo(torch.float32).tiny
    shares = [norm(difference) / norm(finite(e)).clamp_min(tiny) for norm in (lambda x: x.abs().max(), torch.norm)]
    return float(torch.stack(shares).max().nan_to_num(nan=torch.inf, posinf=torch.inf))
