"""Checkpoint that is one file, in the zip format of ``torch.save``, which other programs can open too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .contents import Layout, check, lay_out, list_checked, name_table, write
    from .pickle_reader import Name, UnbuiltCall
    from .zip_format import (
        Records,
        is_checkpoint_file,
        is_replaceable_file,
        is_unfinished_file,
        read_record,
        read_tail,
        take_manifest,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
