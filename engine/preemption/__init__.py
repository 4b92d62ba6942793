"""Handling of signals that ask a run to end: agreement of the ranks, saving, and a time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .signals import Preempted, Preemption, preemptible, requeue_job
    from .slurm import LightningEnvironment, SLURMEnvironment

__getattr__, __dir__, __all__ = lazy_exports(__name__)
