"""What scripts import from ``lightning.pytorch.utilities.rank_zero``: names, nothing else."""

from . import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]
