"""Flags that come in several forms, checked and made into one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch

from ..common.durations import parse_duration
from ..common.messages import nearest
from ..common.validation import check_bool, check_int, check_path, check_positive, choose
from ..engine import TorchDynamoPlugin
from ..strategies import LaunchEnvironment, Precision, Strategy, TorchSyncBatchNorm
from .settings import Limit


def check_limit(name: str, value: Limit) -> int | float:
    """A share of an epoch (float from 0 to 1) or a number of batches (int).

    Raises:
        ValueError, TypeError: Names the flag, the value and the rule.
    """
    rule = "it must be a whole number of batches of at least 0, or a share of the epoch from 0.0 to 1.0"
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: {rule}.")
    if not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ValueError(f"{name}={value!r}: {rule}.")
    return value


def limited(name: str, limit: int | float, total: int | None) -> int | None:
    """How many of ``total`` batches a checked limit lets through; None for all of them.

    Raises:
        ValueError: For a share of a loader that has no length.
    """
    if isinstance(limit, int):
        return limit if total is None or limit < total else None
    if limit == 1.0:
        return None
    if total is None and limit > 0:
        raise ValueError(f"{name}={limit} is a share, but the loader has no length: give a whole number of batches.")
    count = int((total or 0) * limit)
    if limit > 0 and total and not count:
        raise ValueError(f"{name}={limit} of {total} batches is less than one: give at least {1 / total:.3g}.")
    return count


def seconds(name: str, value: str | timedelta | Mapping[str, int] | None) -> float | None:
    """Return a duration in seconds, and None for None.

    Raises:
        TypeError, ValueError: See `parse_duration`.
    """
    return None if value is None else parse_duration(name, value).total_seconds()


def check_bounds(unit: str, low: int, high: int) -> None:
    """``min_<what>`` may not be more than ``max_<what>``, where -1 is no limit.

    Raises:
        ValueError: Names both.
    """
    if 0 <= high < low:
        raise ValueError(f"min_{unit}={low} is more than max_{unit}={high}: raise one or lower the other.")


def check_directory(name: str, value: Any) -> str:
    """Return a path as a string, and the working directory for None.

    Raises:
        TypeError: For anything that is not a path.
    """
    return os.getcwd() if value is None else check_path(name, value)


def check_clipping(name: str, value: float | None) -> float | None:
    """Accept a number above zero; None and 0 leave it off.

    Raises:
        ValueError: For any other value.
    """
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    return check_positive(name, value, "or None to leave it off")


def check_batches(name: str, value: int | bool) -> int:
    """A whole number of batches; True is one, False none."""
    return int(value) if isinstance(value, bool) else check_int(name, value, 0)


def check_interval(name: str, value: int | float | None) -> int | float:
    """As `check_limit`, but more than zero.

    Raises:
        ValueError: Names the flag, the value and the rule.
    """
    if value is not None and not value:
        raise ValueError(f"{name}={value!r} must be more than 0; limit_val_batches=0 turns validation off.")
    return check_limit(name, value)


def check_epochs(name: str, value: int | None, interval: int | float | None) -> int | None:
    """A whole number of epochs, or None to count across them, which takes an interval in batches, or None: in time.

    Raises:
        ValueError: Names the flag, the value and the rule.
    """
    if value is not None:
        return check_int(name, value, 1)
    if interval is None or isinstance(interval, int):
        return None
    raise ValueError(
        f"{name}=None counts batches across epochs, but val_check_interval={interval} is a share of one: give "
        "val_check_interval a whole number of batches."
    )


def set_determinism(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's switches; they are the whole process's, and None leaves them alone.

    Raises:
        ValueError: For a value that is neither a bool nor ``"warn"``.
    """
    if deterministic not in (None, True, False, "warn"):
        raise ValueError(f"deterministic={deterministic!r} must be True, False or 'warn'.")
    if benchmark is not None:
        check_bool("benchmark", benchmark)
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is made
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)


def set_matmul_precision(precision: str | None) -> None:
    """Set how float32 matrices are multiplied; it is the whole process's, and None leaves it alone.

    Raises:
        ValueError: For a value that torch doesn't have.
    """
    if precision is not None:
        torch.set_float32_matmul_precision(choose("float32_matmul_precision", precision, MATMUL_PRECISIONS))


MATMUL_PRECISIONS = ("highest", "high", "medium")
"""Of the products of float32 matrices; `torch.set_float32_matmul_precision` says what each is."""

_ABSENT = {
    "model_registry": "it is one vendor's; give fit's ckpt_path a path",
    "suggest_integrations": "there is nothing to silence",
    "weights_save_path": "give ModelCheckpoint a dirpath",
    "resume_from_checkpoint": "give fit a ckpt_path",
    "checkpoint_callback": "use enable_checkpointing",
    "gpus": "use accelerator='gpu' and devices",
    "num_processes": "use devices",
    "tpu_cores": "TPUs are not supported",
    "ipus": "IPUs are not supported",
    "auto_select_gpus": "use devices",
    "progress_bar_refresh_rate": "use callbacks=[TQDMProgressBar(refresh_rate=...)]",
    "weights_summary": "use enable_model_summary, or callbacks=[ModelSummary(max_depth=...)]",
    "replace_sampler_ddp": "use use_distributed_sampler",
    "amp_backend": "use precision",
    "amp_level": "use precision",
    "auto_lr_find": "use callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": "use callbacks=[BatchSizeFinder()]",
    "track_grad_norm": "log it in on_before_optimizer_step",
    "terminate_on_nan": "use on_nonfinite='raise', which is the default",
    "stochastic_weight_avg": "use callbacks=[StochasticWeightAveraging(...)]",
    "move_metrics_to_cpu": "logged values cost no device memory",
    "multiple_trainloader_mode": "pass a CombinedLoader(loaders, mode)",
}
"""Lightning's flags, of today or once, that are deliberately absent, and what to do instead."""


def refuse_unknown(arguments: dict[str, Any], valid: Iterable[str]) -> None:
    """Raise a TypeError for an argument that a Trainer doesn't have."""
    for name in arguments:
        advice = f" {_ABSENT[name].capitalize()}." if name in _ABSENT else nearest(name, valid)
        raise TypeError(f"Trainer() has no argument {name!r}.{advice}")


def select_changed_flags(arguments: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """The flags that differ from their defaults, by name.

    Args:
        arguments: All arguments of the Trainer's constructor.
        defaults: Its defaults.

    Raises:
        TypeError: For an argument that a Trainer doesn't have.
    """
    defaults = defaults or {}
    refuse_unknown(arguments["unknown"], defaults)
    return {
        name: arguments[name]
        for name, default in defaults.items()
        if type(arguments[name]) is not type(default) or (arguments[name] is not default and arguments[name] != default)
    }


def refuse_with_barebones(**flags: Any) -> None:
    """Raise a ValueError for what is asked for and ``barebones`` leaves out."""
    for name, value in flags.items():
        if value:
            raise ValueError(f"Trainer(barebones=True, {name}={value!r}): barebones leaves that out; drop one of them.")


def unpack_plugins(plugins: Any, precision: Any, sync_batchnorm: bool) -> tuple[Any, bool]:
    """The precision and the ``sync_batchnorm`` that ``plugins`` and the flags of these names ask for together.

    Raises:
        TypeError: For something that is no plugin.
        ValueError: If a flag and a plugin say the same thing.
    """
    check_bool("sync_batchnorm", sync_batchnorm)
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str | Mapping)
    for plugin in plugins if several else [] if plugins is None else [plugins]:
        if isinstance(plugin, Precision):
            if precision is not None:
                raise ValueError(f"precision={precision!r} and a plugin {plugin.name!r} both say it; give one of them.")
            precision = plugin
        elif isinstance(plugin, TorchSyncBatchNorm):
            if sync_batchnorm:
                raise ValueError("sync_batchnorm=True and TorchSyncBatchNorm() say the same; give one of them.")
            sync_batchnorm = True
        elif not isinstance(plugin, LaunchEnvironment):  # which is read in any case
            raise TypeError(
                f"plugins takes a treadle.plugins.Precision or TorchSyncBatchNorm(), not {plugin!r:.100}. Leave it "
                "out: the cluster is found in the environment, there is one format of checkpoints, and "
                "ModelCheckpoint(async_save=True) writes them beside the training."
            )
    return precision, sync_batchnorm


def set_sync_batchnorm(strategy: Strategy, enabled: bool) -> None:
    """Switch it on in a strategy that knows it.

    Raises:
        ValueError: For one of several processes that doesn't.
    """
    if enabled and hasattr(strategy, "sync_batchnorm"):
        strategy.sync_batchnorm = True
    elif enabled and strategy.world.size > 1:
        raise ValueError(f"sync_batchnorm=True is for strategy='ddp', not {strategy.name!r}: convert layers yourself.")


def parse_compilation(setting: Any) -> TorchDynamoPlugin | None:
    """How to compile, of ``compile=True``, False, or a dict of ``torch.compile``'s arguments.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(setting, Mapping):
        valid_names = [field.name for field in fields(TorchDynamoPlugin)]
        for name in setting:
            if name not in valid_names:
                raise TypeError(
                    f"compile={{{name!r}: ...}} is no argument of torch.compile.{nearest(name, valid_names)}"
                )
        return TorchDynamoPlugin(**{"backend": "inductor", **setting})
    return TorchDynamoPlugin(backend="inductor") if check_bool("compile", setting) else None
