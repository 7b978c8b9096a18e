"""Native sparse attention (NSA): compressed, selected and sliding-window branches, combined by a learned gate."""

from typing import TYPE_CHECKING

from nsa.lazy import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nsa import ops, reference
    from nsa.attention import NSAAttention, NSAStats
    from nsa.backends.problem import Problem
    from nsa.backends.routing import explain
    from nsa.cache import NSACache, PagedNSACache
    from nsa.config import NSAConfig, RopeScaling
    from nsa.functional import nsa_attention
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "nsa": ("ops", "reference"),
            "nsa.attention": ("NSAAttention", "NSAStats"),
            "nsa.backends.problem": ("Problem",),
            "nsa.backends.routing": ("explain",),
            "nsa.cache": ("NSACache", "PagedNSACache"),
            "nsa.config": ("NSAConfig", "RopeScaling"),
            "nsa.functional": ("nsa_attention",),
        },
    )
