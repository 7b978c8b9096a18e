"""Where tokens come from."""

from nsa.data.config import SOURCES, Batch, DataConfig
from nsa.data.corpus import Corpus, decode, encode, standard_library, synthetic
from nsa.data.loader import Loader, open_loader
from nsa.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_bpe

__all__ = [
    "SOURCES",
    "Batch",
    "Corpus",
    "DataConfig",
    "Loader",
    "Tokenizer",
    "check_vocabulary",
    "decode",
    "encode",
    "load_tokenizer",
    "open_loader",
    "standard_library",
    "synthetic",
    "train_bpe",
]
