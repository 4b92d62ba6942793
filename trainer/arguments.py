"""Validation, conversion and application of Trainer flags."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from .. import engine, strategies
from ..common.durations import parse_duration
from ..common.messages import format_count, nearest, warn
from ..common.validation import Limit, check_bool, check_int, check_path, check_positive, choose
from ..engine import preemption
from . import checkpointing

if TYPE_CHECKING:
    from .trainer import Trainer

F = TypeVar("F", bound=Callable[..., None])


def check_limit(name: str, value: Limit) -> int | float:
    """Return the limit as a fraction of an epoch (float from 0 to 1) or a number of batches (int); None means 1.0."""
    rule = "must be a whole number of batches, or a fraction of the epoch from 0.0 to 1.0"
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} {rule}.")
    if not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ValueError(f"{name}={value!r} {rule}.")
    return value


def limited(name: str, limit: int | float, total: int | None) -> int | None:
    """Return the number of batches that a checked limit allows, or None if it allows all ``total`` batches.

    ``total`` is None if the dataloader has no length.
    """
    if isinstance(limit, int):
        return limit if total is None or limit < total else None
    if limit == 1.0:
        return None
    if total is None and limit > 0:
        raise ValueError(
            f"{name}={limit} is a fraction, but the dataloader has no length. Pass a whole number of batches."
        )
    count = int((total or 0) * limit)
    if limit > 0 and total and not count:
        raise ValueError(
            f"{name}={limit} of {format_count(total, 'batch')} is less than one batch. Pass a larger "
            "fraction, or the integer 1 for one batch."
        )
    return count


def seconds(name: str, value: str | timedelta | Mapping[str, int] | None) -> float | None:
    """Convert a duration in a form that `parse_duration` accepts to seconds; None is returned unchanged."""
    return None if value is None else parse_duration(name, value).total_seconds()


def check_count(name: str, value: Any, low: int) -> Any:
    """Return the value if it is an integer of at least ``low``, or None for the default."""
    return None if value is None else check_int(name, value, low)


def check_bounds(unit: str, low: int | None, high: int | None) -> None:
    """Raise a ValueError if ``min_<unit>`` exceeds ``max_<unit>``; -1 and None mean unlimited."""
    if low is not None and high is not None and 0 <= high < low:
        raise ValueError(f"min_{unit}={low} must be at most max_{unit}={high}. Lower min_{unit} or raise max_{unit}.")


def check_directory(name: str, value: Any) -> str:
    """Return a directory as a string, with ``~`` expanded; None stands for the current working directory."""
    return os.getcwd() if value is None else os.path.expanduser(check_path(name, value))


def check_clipping(name: str, value: Any) -> Any:
    """Return a positive clipping threshold, or one by name. None and 0 disable clipping and are returned as None."""
    if isinstance(value, Mapping):
        return {part: check_clipping(f"{name}[{part!r}]", limit) for part, limit in value.items()} or None
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    return check_positive(name, value, "or None to disable clipping")


def check_batches(name: str, value: int | bool) -> int:
    """Return a number of batches; True stands for 1 and False for 0."""
    return int(value) if isinstance(value, bool) else check_int(name, value, 0)


def warn_of_overridden_limits(overfit: int | float, train: Limit, val: Limit) -> None:
    """Warn about explicit ``limit_train_batches`` and ``limit_val_batches`` that ``overfit_batches`` replaces."""
    for name, value in (("limit_train_batches", train), ("limit_val_batches", val)):
        if value is not None and value != overfit:
            kind = "training" if name == "limit_train_batches" else "validation"
            hint = " To train without validation, use limit_train_batches instead." if value == 0 else ""
            warn(
                f"overfit_batches={overfit} overrides {name}={value}, so {kind} reads {overfit} "
                f"{'of the data' if isinstance(overfit, float) else 'batches'} per dataloader. Remove one of the two "
                f"arguments.{hint}"
            )


def check_val_interval(value: int | float | None, max_steps: int) -> int | float:
    """Return a limit in the form that `check_limit` returns. It must be positive, unless no step is to be trained."""
    if value is not None and not value and max_steps != 0:
        raise ValueError(f"val_check_interval={value!r} must exceed 0. To disable validation, set limit_val_batches=0.")
    return check_limit("val_check_interval", value)


def check_epochs(name: str, value: int | None, interval: int | float | None) -> int | None:
    """Return a valid ``check_val_every_n_epoch``. None counts batches across epochs, not from the start of each epoch.

    ``interval`` is ``val_check_interval``, or None if that is a duration.
    """
    if value is not None:
        return check_int(name, value, 1)
    if interval is None or isinstance(interval, int):
        return None
    raise ValueError(
        f"{name}=None counts batches across epochs, but val_check_interval={interval} is a fraction of an epoch. Set "
        "val_check_interval to a whole number of batches."
    )


def set_determinism(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Configure torch's deterministic algorithms and cuDNN's benchmark mode for the whole process.

    Args:
        deterministic: True requires deterministic algorithms, ``"warn"`` only warns about operations without one, and
            False allows other algorithms. None leaves torch's setting unchanged.
        benchmark: Whether cuDNN benchmarks its algorithms. None disables this if ``deterministic`` is True or
            ``"warn"``, and otherwise leaves torch's setting unchanged.

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """
    if deterministic not in (None, True, False, "warn"):
        raise ValueError(f"deterministic={deterministic!r} must be True, False or 'warn'.")
    if benchmark is not None:
        check_bool("benchmark", benchmark)
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is created
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)


def set_matmul_precision(precision: str | None) -> None:
    """Set torch's float32 matmul precision for the whole process; None leaves it unchanged."""
    if precision is not None:
        torch.set_float32_matmul_precision(choose("float32_matmul_precision", precision, MATMUL_PRECISIONS))


MATMUL_PRECISIONS = ("highest", "high", "medium")
"""Precisions of float32 matrix products; see `torch.set_float32_matmul_precision`."""

_ABSENT = {
    "model_registry": "pass a checkpoint's path to fit as ckpt_path",
    "suggest_integrations": "remove it, because Treadle suggests no integrations",
    "weights_save_path": "pass dirpath to ModelCheckpoint",
    "resume_from_checkpoint": "pass ckpt_path to fit",
    "checkpoint_callback": "set enable_checkpointing",
    "gpus": "use accelerator='gpu' and devices",
    "num_processes": "use devices",
    "tpu_cores": "TPUs are not supported",
    "ipus": "IPUs are not supported",
    "auto_select_gpus": "use devices",
    "progress_bar_refresh_rate": "use callbacks=[TQDMProgressBar(refresh_rate=...)]",
    "weights_summary": "set enable_model_summary, or callbacks=[ModelSummary(max_depth=...)]",
    "replace_sampler_ddp": "set use_distributed_sampler",
    "amp_backend": "use precision",
    "amp_level": "use precision",
    "auto_lr_find": "use callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": "use callbacks=[BatchSizeFinder()]",
    "track_grad_norm": "log the norm in on_before_optimizer_step",
    "terminate_on_nan": "use on_nonfinite='raise', which is the default",
    "stochastic_weight_avg": "use callbacks=[StochasticWeightAveraging(...)]",
    "move_metrics_to_cpu": "remove it, because logged values use no device memory",
    "multiple_trainloader_mode": "pass a CombinedLoader(loaders, mode)",
}
"""Current and former Lightning flags that the Trainer deliberately lacks, with their replacements."""


_NOT_BAREBONES = (
    *("fast_dev_run", "logger", "enable_checkpointing", "profiler", "enable_progress_bar", "enable_model_summary"),
    *("enable_report", "num_sanity_val_steps", "log_every_n_steps", "detect_anomaly"),
)


def refuse_unknown(arguments: dict[str, Any], valid: Iterable[str]) -> None:
    """Raise a TypeError if ``arguments`` is not empty; the message names all of them."""
    problems = []
    for name in arguments:
        advice = f" {_ABSENT[name][0].upper()}{_ABSENT[name][1:]}." if name in _ABSENT else nearest(name, valid)
        problems.append(f"Trainer() has no argument {name!r}.{advice}")
    if problems:
        raise TypeError(" ".join(problems))


def hide_unknown(init: F) -> F:
    """Remove ``**unknown`` from the signature of a constructor, from which parsers make their options."""
    full = inspect.signature(init)
    flags = [parameter for parameter in full.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    init.__signature__ = full.replace(parameters=flags)  # type: ignore[attr-defined]
    return init


def select_changed_flags(arguments: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the flags that differ from their defaults, by name.

    ``arguments["unknown"]`` is a dict of arguments that the Trainer does not have. They raise a TypeError.
    """
    defaults = defaults or {}
    refuse_unknown(arguments["unknown"], defaults)
    return {
        name: arguments[name]
        for name, default in defaults.items()
        if type(arguments[name]) is not type(default) or (arguments[name] is not default and arguments[name] != default)
    }


def refuse_with_barebones(flags: Mapping[str, Any]) -> None:
    """Raise a ValueError if one of the changed flags requests a feature that ``barebones`` disables."""
    for name in _NOT_BAREBONES:
        if flags.get(name):
            raise ValueError(
                f"barebones=True cannot be combined with {name}={flags[name]!r:.100}. Remove one of the two flags."
            )


_Environment = preemption.SLURMEnvironment | strategies.LaunchEnvironment | strategies.ClusterEnvironment


class Plugged(NamedTuple):
    """Settings that come from ``plugins`` or from the flags of the same names."""

    precision: Any
    sync_batchnorm: bool
    writer: checkpointing.CheckpointIO
    requeue_signal: int | None
    environment: _Environment | None


def unpack_plugins(plugins: Any, precision: Any, sync_batchnorm: bool, strategy: Any = None) -> Plugged:
    """Return what ``plugins``, the flags ``precision`` and ``sync_batchnorm``, and a plugin in the strategy set."""
    check_bool("sync_batchnorm", sync_batchnorm)
    writer: checkpointing.CheckpointIO = checkpointing.TorchCheckpointIO()
    environment: _Environment | None = None
    if preemption.SLURMEnvironment.detect():
        environment = preemption.SLURMEnvironment()
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str | Mapping)
    chosen = plugins if several else [] if plugins is None else [plugins]
    for plugin in [*chosen, *getattr(strategy, "plugins", ())]:
        if isinstance(plugin, strategies.Precision):
            if precision is not None:
                raise ValueError(
                    f"precision={precision!r} and the plugin {plugin.name!r} both set the precision. Pass only one."
                )
            precision = plugin
        elif isinstance(plugin, strategies.TorchSyncBatchNorm):
            if sync_batchnorm:
                raise ValueError("sync_batchnorm=True and TorchSyncBatchNorm() set the same option. Pass only one.")
            sync_batchnorm = True
        elif isinstance(plugin, checkpointing.CheckpointIO):
            writer = plugin
        elif isinstance(plugin, _Environment):
            environment = plugin  # the launcher is detected in any case
        else:
            raise TypeError(
                f"plugins={plugin!r:.100} must be a treadle.plugins.Precision, TorchSyncBatchNorm() or CheckpointIO. "
                "Remove it. Treadle detects the cluster; for another launcher, pass a ClusterEnvironment."
            )
    slurm = environment if isinstance(environment, preemption.SLURMEnvironment) else preemption.SLURMEnvironment()
    return Plugged(precision, sync_batchnorm, writer, slurm.requeue_signal if slurm.auto_requeue else None, environment)


def set_sync_batchnorm(strategy: strategies.Strategy, enabled: bool) -> None:
    """Turn on ``sync_batchnorm`` in a strategy if ``enabled`` is True.

    With more than one process, a strategy that does not support it raises a ValueError.
    """
    if enabled and hasattr(strategy, "sync_batchnorm"):
        strategy.sync_batchnorm = True
    elif enabled and strategy.world.size > 1:
        raise ValueError(
            f"sync_batchnorm=True needs strategy='ddp', not {strategy.name!r}. Remove it, and convert the task's "
            "layers with torch.nn.SyncBatchNorm.convert_sync_batchnorm."
        )


def parse_compilation(setting: Any) -> engine.TorchDynamoPlugin:
    """Return the compilation settings of the flag ``compile``."""
    if isinstance(setting, Mapping):
        valid_names = [field.name for field in fields(engine.TorchDynamoPlugin)]
        for name in setting:
            if name not in valid_names:
                raise TypeError(
                    f"compile={{{name!r}: ...}} has an unknown key.{nearest(name, valid_names)} The valid keys are "
                    f"{', '.join(valid_names)}."
                )
        return engine.TorchDynamoPlugin(**{"backend": "inductor", **setting})
    if not isinstance(setting, bool):
        raise TypeError(f"compile={setting!r} must be True, False or a dict of arguments of torch.compile.")
    return engine.TorchDynamoPlugin(backend="inductor" if setting else "no")


def describe_settings(trainer: Trainer, flags: Iterable[str]) -> dict[str, Any]:
    """Return the current settings as plain data, by name; see `Trainer.settings`.

    Args:
        trainer: Trainer to describe.
        flags: Names of the Trainer's flags.
    """
    settings: dict[str, Any] = {"strategy": trainer.strategy.name, "device": str(trainer.accelerator.device)}
    settings |= {"num_nodes": trainer.num_nodes, "devices": trainer.num_devices, "precision": trainer.precision}
    settings["loggers"] = ", ".join(type(logger).__name__ for logger in trainer.loggers) or None
    settings["callbacks"] = ", ".join(type(callback).__name__ for callback in trainer.callbacks) or None
    for name in flags:
        value = getattr(trainer, name, trainer.changed_flags.get(name, settings))
        if isinstance(value, int | float | str | None):
            settings[name] = value
    if trainer.val_check_seconds is not None:
        settings["val_check_interval"] = f"{trainer.val_check_seconds:g} s"
    settings["max_time"] = None if trainer.max_seconds is None else f"{trainer.max_seconds:g} s"
    settings["grace"] = None if trainer.grace_seconds is None else f"{trainer.grace_seconds:g} s"
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    settings["benchmark"] = torch.backends.cudnn.benchmark
    return settings
