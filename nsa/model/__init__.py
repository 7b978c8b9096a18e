"""A Llama-style language model with a choice of attention."""

from nsa.model.alternatives import BigBirdAttention, LongformerAttention, SlidingAttention, WindowCache
from nsa.model.checkpoint import load_model, save_model
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.loss import chunked_cross_entropy
from nsa.model.transformer import ATTENTION_KINDS, LM, PRESETS, AttentionKind, LMConfig

__all__ = [
    "ATTENTION_KINDS",
    "LM",
    "PRESETS",
    "AttentionKind",
    "BigBirdAttention",
    "DenseAttention",
    "DenseCache",
    "LMConfig",
    "LongformerAttention",
    "SlidingAttention",
    "WindowCache",
    "chunked_cross_entropy",
    "load_model",
    "save_model",
]
