"""Caches: what a layer keeps of a sequence while it generates.

`store.py` places a step's new tokens, and holds keys and values by row and slot, contiguous or in pages, in the layer's
dtype or in fp8; `rows.py` is what every cache can do with its rows; `layer.py` is the cache of an NSA layer, `paged.py`
its paged form; `file.py` saves and loads.
"""

from nsa.cache.file import SavedCaches, read_saved, save_caches
from nsa.cache.layer import NSACache, Step
from nsa.cache.paged import PagedNSACache
from nsa.cache.rows import RowCache
from nsa.cache.store import NewTokens, Ring, Store
from nsa.sequences import Pair
