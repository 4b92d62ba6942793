"""Weights that other programs wrote, read without running anything of what is in their files.

`sources` finds out what a source is, `torch_files` reads files of ``torch.save`` by way of `pickles` (a pickle as a
list of instructions) and `inert` (what some names stand for as data), `fetch` downloads, `load` puts weights into a
model.
"""

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .load import Loaded, load_weights

__all__ = ["Loaded", "load_weights"]

__getattr__, __dir__ = lazy_exports(__name__, {"Loaded": "load", "load_weights": "load"}, __all__)
