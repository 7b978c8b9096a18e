"""Where tokens come from."""

from nsa.data.config import SOURCES, Batch, DataConfig
from nsa.data.loader import Loader, open_loader
from nsa.data.random_tokens import synthetic
from nsa.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_bpe

__all__ = [
    "SOURCES",
    "Batch",
    "DataConfig",
    "Loader",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "open_loader",
    "synthetic",
    "train_bpe",
]
