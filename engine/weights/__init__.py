"""Import and export of weights in the file formats of other programs. Loading never runs code that a file contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import load, save
    from .load import Loaded, load_opened, load_weights
    from .pickle_types import check_extent
    from .save import (
        make_parent,
        nbytes,
        parse_shard_size,
        refuse_checkpoint,
        save_object,
        write_atomically,
        write_file,
        write_weights,
    )
    from .sources import Opened, Source, open_source, open_weights
    from .torch_files import TorchFile, View

__getattr__, __dir__, __all__ = lazy_exports(__name__)
