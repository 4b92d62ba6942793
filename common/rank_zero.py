"""Functions of ``lightning_utilities`` that act on rank zero only, also in programs that import them from there.

Lightning sets their rank when it is imported. Here, the first use of a name of ``treadle`` does, and the import of
``treadle.compat``, as the package takes 0.01 seconds to import, and without torch 0.1, which commands save.
"""

import os

from lightning_utilities.core.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]

if getattr(rank_zero_only, "rank", None) is None:  # until a Trainer or an Accelerator knows it
    _values = map(os.environ.get, ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    rank_zero_only.rank = next((int(text) for text in _values if text and text.isdigit()), 0)  # type: ignore[attr-defined]
