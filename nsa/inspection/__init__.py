"""Shows what an NSA model attends to: selected blocks, window, compressed attention and gates of every token.

    inspection = inspect_model(model, tokenizer, text)
    inspection.selected_words(token=100, layer=0, group=0)

`nsa inspect` makes a page of it, `figure` a picture for a notebook.
"""

from nsa.inspection.figure import figure
from nsa.inspection.page import write_page
from nsa.inspection.record import Inspection, LayerRecord, inspect_model

__all__ = ["Inspection", "LayerRecord", "figure", "inspect_model", "write_page"]
