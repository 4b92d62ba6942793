"""Flags of the Trainer as a plain dataclass, for settings in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.validation import Limit

if TYPE_CHECKING:
    from ..callbacks import Callback
    from ..engine.profilers import Profiler
    from ..loggers import Logger
    from ..strategies import Strategy
else:
    # So that the annotations resolve at run time without importing torch.
    Callback = Profiler = Logger = Strategy = Any

Devices = int | str | Sequence[int]


@dataclass(kw_only=True)
class TrainerSettings:
    """Dataclass of the flags of `Trainer`. They are documented in `Trainer`, which also validates them.

    Examples:
        >>> import treadle as tl
        >>> settings = tl.TrainerSettings(max_epochs=3, accelerator="cpu", devices=1, barebones=True)
        >>> trainer = tl.Trainer(**settings.flags())
        >>> trainer.max_epochs
        3
    """

    accelerator: str = "auto"
    strategy: str | Strategy = "auto"
    devices: Devices = "auto"
    num_nodes: int = 1
    precision: Any = None
    logger: Logger | list[Logger] | bool | None = None
    callbacks: list[Callback] | Callback | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | timedelta | dict[str, int] | None = None
    limit_train_batches: Limit = None
    limit_val_batches: Limit = None
    limit_test_batches: Limit = None
    limit_predict_batches: Limit = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | str | timedelta | dict[str, int] | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    enable_report: bool | None = None
    accumulate_grad_batches: int = 1
    step_micro_batches: int | None = None
    gradient_clip_val: float | dict[str, float] | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    float32_matmul_precision: str | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    detect_anomaly: bool = False
    barebones: bool = False
    profiler: Profiler | str | None = None
    compile: bool | dict[str, Any] = False
    plugins: Any = None
    enable_autolog_hparams: bool = True
    default_root_dir: str | Path | None = None
    on_nonfinite: str = "raise"
    timeout: str | timedelta | dict[str, int] | None = None
    grace: str | timedelta | dict[str, int] | None = None

    def flags(self) -> dict[str, Any]:
        """Return the arguments of `Trainer`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
