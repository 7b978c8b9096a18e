"""Deprecated name of `nsa.results`, for one version."""

import sys

from nsa import results
from nsa.lazy import warn_renamed

warn_renamed(__name__, results.__name__)
sys.modules[__name__] = results
