"""Training data: sources, tokenizers and loaders."""

from typing import TYPE_CHECKING

from nsa.lazy import lazy_exports

if TYPE_CHECKING:
    from nsa.data.config import SOURCES, Batch, DataConfig
    from nsa.data.loader import Loader, open_loader, synthetic
    from nsa.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_bpe
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "nsa.data.config": ("SOURCES", "Batch", "DataConfig"),
            "nsa.data.loader": ("Loader", "open_loader", "synthetic"),
            "nsa.data.tokenizer": ("Tokenizer", "check_vocabulary", "load_tokenizer", "train_bpe"),
        },
    )
