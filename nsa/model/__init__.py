"""A Llama-style language model with selectable attention."""

from typing import TYPE_CHECKING

from nsa.lazy import lazy_exports

if TYPE_CHECKING:
    from nsa.model.alternatives import BigBirdAttention, LongformerAttention, SlidingAttention, WindowCache
    from nsa.model.checkpoint import load_model, save_model
    from nsa.model.config import ATTENTION_KINDS, PRESETS, AttentionKind, LMConfig
    from nsa.model.dense import DenseAttention, DenseCache
    from nsa.model.loss import chunked_cross_entropy
    from nsa.model.transformer import LM
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "nsa.model.alternatives": ("BigBirdAttention", "LongformerAttention", "SlidingAttention", "WindowCache"),
            "nsa.model.checkpoint": ("load_model", "save_model"),
            "nsa.model.config": ("ATTENTION_KINDS", "PRESETS", "AttentionKind", "LMConfig"),
            "nsa.model.dense": ("DenseAttention", "DenseCache"),
            "nsa.model.loss": ("chunked_cross_entropy",),
            "nsa.model.transformer": ("LM",),
        },
    )
