"""Where tokens come from."""

from nsa.data.corpus import Corpus, decode, encode, standard_library, synthetic

__all__ = ["Corpus", "decode", "encode", "standard_library", "synthetic"]
