"""Functions of ``lightning_utilities`` that act on rank zero only."""

from lightning_utilities.core.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]

if getattr(rank_zero_only, "rank", None) is None:
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
