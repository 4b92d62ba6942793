"""Prediction of the time, memory and communication of one optimizer step, without the hardware of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .gpus import GPU, detect_gpu, find_gpu
    from .plan import Plan
    from .report import Schedule, advise, screen
    from .simulation import simulate
    from .strategy_facts import facts_of, varied
    from .subject import Decoder, next_token_loss, sizes_of, tokens

__getattr__, __dir__, __all__ = lazy_exports(__name__)
