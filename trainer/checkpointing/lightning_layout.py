"""The dict in Lightning's layout that a checkpoint contains for other programs. Treadle itself never loads it.

`make_document` returns the dict with the states themselves. Hooks may change it. `finish_document` then converts it to
types that ``torch.load(weights_only=True)`` reads.

Lightning needs ``pytorch-lightning_version``, ``state_dict``, ``optimizer_states``, ``lr_schedulers``, ``callbacks``
under its own keys, and the counters in ``loops``. With these it loads, validates and tests the task, and continues a
fit after the saved step; it does not know the order of the remaining samples.

Source: `Trainer.dump_checkpoint` and the loops' ``state_dict`` in Lightning 2.6
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...callbacks import Callback, EarlyStopping, ModelCheckpoint
from ...engine.checkpoint import check_tensor
from ...engine.optim import storable_state
from ...strategies.distributed import local, strip_compile_prefix

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..loop import Progress
    from ..trainer import Trainer

LAYOUT_VERSION = "2.6.6"
"""Version of Lightning whose layout it is. Lightning refuses a file without one, and warns if its own is lower."""

_DROPPED = object()
_KEYS = (str, int, float, type(None))
_MOST_BITS = 8 * 250  # of an int that torch.load reads; its length in bytes is one byte

_PLAIN = frozenset({bool, str, float, complex, bytes, bytearray, torch.Size, torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def make_document(trainer: Trainer, task: TaskModule, progress: Progress, weights_only: bool) -> dict[str, Any]:
    """Return the dict, with the states themselves; `make_plain` converts it.

    Args:
        trainer: The Trainer.
        task: The task to save.
        progress: Counters of the run at the step that is saved.
        weights_only: Omit what is needed only to resume.
    """
    document: dict[str, Any] = {
        "epoch": progress.epoch,
        "global_step": progress.step,
        "pytorch-lightning_version": LAYOUT_VERSION,
        "state_dict": task.state_dict(),
        "loops": _make_loops(trainer, progress),
    }
    if not weights_only:
        document["callbacks"] = dict(
            _translate_callback(callback) for callback in trainer.callbacks if callback.state_dict()
        )
        document["optimizer_states"] = [prepared.optimizer.state_dict() for prepared in trainer.accelerator.optimizers]
        document["lr_schedulers"] = [storable_state(config.scheduler) for config in trainer.lr_scheduler_configs]
        if (scale := trainer.accelerator.accumulation.loss_scale) is not None:
            document["MixedPrecision"] = scale.state_dict()
    for owner, prefix in ((task, ""), (trainer.datamodule, "datamodule_")):
        if owner is not None and owner.hparams:
            document[f"{prefix}hparams_name"] = owner.hparams_name
            stored = owner.stored_hparams().values  # without what is not data, or secret
            document[f"{prefix}hyper_parameters"] = {k: v for k, v in owner.hparams.items() if k in stored}
    if trainer.datamodule is not None and (state := trainer.datamodule.state_dict()):
        document[type(trainer.datamodule).__qualname__] = state
    return document


def _count(total: int, current: int, started: bool = True, processed: bool = True) -> dict[str, dict[str, int]]:
    """Return one of Lightning's counters: over all epochs, and in the current one."""
    names = ("ready", "completed", *(("started",) * started), *(("processed",) * processed))
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}


def _make_loops(trainer: Trainer, progress: Progress) -> dict[str, Any]:
    """Return the counters of Lightning's loops: within an epoch, after its last batch, or between two epochs."""
    length = trainer.num_training_batches
    is_between = progress.batch == 0 and progress.epoch > 0
    is_last = is_between or progress.batch == length
    batch = progress.batch
    if is_between:  # of a loader without a length, the epochs' mean is known
        batch = int(length) if math.isfinite(length) else progress.batches // progress.epoch
    epochs = dict.fromkeys(("ready", "completed", "started", "processed"), progress.epoch)
    if not is_between:  # one has begun
        epochs |= {"ready": progress.epoch + 1, "started": progress.epoch + 1, "processed": progress.epoch + is_last}
    steps = {
        "step": _count(progress.step, batch, started=False, processed=False),
        "zero_grad": _count(progress.step, batch, processed=False),
    }
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": progress.step},
        "epoch_loop.batch_progress": {**_count(progress.batches, batch), "is_last_batch": is_last},
        "epoch_loop.scheduler_progress": _count(0, 0, started=False, processed=False),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": steps},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _count(progress.step, 0, started=False, processed=False),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**_count(0, 0), "is_last_batch": False},
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
    }
    return {"fit_loop": fit, "validate_loop": {}, "test_loop": {}, "predict_loop": {}}


def _translate_callback(callback: Callback) -> tuple[str, dict[str, Any]]:
    """Return Lightning's key and state for a callback that both libraries have, and else the callback's own."""
    state = callback.state_dict()
    if type(callback) is EarlyStopping:
        kept = {name: state[name] for name in ("wait_count", "stopped_epoch")}
        key = f"EarlyStopping{ {'monitor': callback.monitor, 'mode': callback.mode}!r}"
        return key, {
            **kept,
            "best_score": torch.as_tensor(state["best_score"], device="cpu"),
            "patience": callback.patience,
        }
    if type(callback) is ModelCheckpoint:
        triggers = {
            "every_n_train_steps": callback.every_n_train_steps,
            "every_n_epochs": callback.every_n_epochs,
            "train_time_interval": callback.train_time_interval,
        }
        key = f"ModelCheckpoint{ {'monitor': callback.monitor, 'mode': callback.mode, **triggers}!r}"
        names = ("best_model_score", "best_model_path", "current_score", "last_model_path", "best_k_models", "dirpath")
        kept = {name: getattr(callback, name) for name in names}
        kth_path = callback.kth_best_model_path
        worst = callback.best_k_models.get(
            kth_path, torch.tensor(torch.inf if callback.mode == "min" else -torch.inf, device="cpu")
        )
        return key, {"monitor": callback.monitor, **kept, "kth_best_model_path": kth_path, "kth_value": worst}
    is_ours = type(callback).__module__.split(".")[0] == __name__.split(".")[0]
    return f"treadle.{callback.state_key}" if is_ours else callback.state_key, state


def make_plain(value: Any) -> Any:
    """Return the nearest value that ``torch.load(weights_only=True)`` reads.

    Paths become text, an Enum its value, dates ISO text, dataclasses and namespaces dicts, and NumPy's values Python's
    or tensors. What has no such form, such as a function, is omitted.

    Args:
        value: A value, or nested containers of values.
    """
    plain = _convert(value)
    return None if plain is _DROPPED else plain


def _convert(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind in _CONTAINERS:  # before the tests of classes, which take as long as the rest of a small save
        return _convert_container(value)
    if kind is int:
        return value if value.bit_length() < _MOST_BITS else str(value)
    if isinstance(value, Tensor):
        try:
            check_tensor(value, "")
        except TypeError:  # it is sparse or on the meta device, for example
            return _DROPPED
        return local(value.detach())  # of the only process, if it is sharded
    if isinstance(value, Enum):
        return _convert(value.value)
    if isinstance(value, np.generic):
        return _convert(value.item())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biufc" else _convert(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if kind.__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return _convert(OmegaConf.to_container(value, resolve=True))
    if isinstance(value, Namespace):
        return _convert(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _convert({field.name: getattr(value, field.name) for field in fields(value)})
    return _convert_container(value)


def _convert_container(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            plain_key = key if type(key) is str else _convert_key(key)
            plain = item if item is None or type(item) in _PLAIN else _convert(item)
            if plain is not _DROPPED:
                kept[plain_key] = plain
        return kept
    if isinstance(value, list | tuple | deque | range):
        items = (item for item in map(_convert, value) if item is not _DROPPED)
        return tuple(items) if isinstance(value, tuple) else list(items)
    if isinstance(value, set | frozenset):
        return set(map(_convert_key, value))
    base = next((base for base in (bool, int, float, str) if isinstance(value, base)), None)
    return _DROPPED if base is None else base(value)


def _convert_key(key: Any) -> Any:
    """Return a key of a dict, or an item of a set, in a form that every reader accepts."""
    plain = tuple(map(_convert_key, key)) if isinstance(key, tuple) else _convert(key)
    is_short = isinstance(plain, _KEYS) and not (isinstance(plain, int) and plain.bit_length() > 64)
    if is_short or (type(plain) is tuple and len(plain) <= 16 and not any(isinstance(item, tuple) for item in plain)):
        return plain
    return str(key)


def finish_document(document: dict[str, Any], left_out: Container[str] = ()) -> dict[str, Any]:
    """Return the dict in the form in which it is written, without the weights that the checkpoint leaves out.

    Args:
        document: Result of `make_document`, which hooks may have changed.
        left_out: Names of the weights that the checkpoint does not contain.
    """
    weights = {strip_compile_prefix(name): value for name, value in document["state_dict"].items()}
    kept = {name: value for name, value in weights.items() if name not in left_out}
    plain: dict[str, Any] = make_plain({**document, "state_dict": kept})
    return plain
