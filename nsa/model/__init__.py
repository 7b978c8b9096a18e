"""A Llama-style language model with a choice of attention."""

from nsa.model.checkpoint import load_model, save_model
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.loss import chunked_cross_entropy
from nsa.model.transformer import LM, PRESETS, LMConfig

__all__ = [
    "LM",
    "PRESETS",
    "DenseAttention",
    "DenseCache",
    "LMConfig",
    "chunked_cross_entropy",
    "load_model",
    "save_model",
]
