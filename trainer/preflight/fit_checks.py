"""Checks at the start of ``fit`` for likely oversights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...callbacks import explain_returned
from ...common.messages import abbreviate, nearest, warn
from ...strategies.distributed import strip_compile_prefix
from ..core import TaskModule

if TYPE_CHECKING:
    from ...callbacks import EarlyStopping, ModelCheckpoint
    from ..trainer import Trainer

_SHOWN = 3
_DEEPEST = 3  # depth of nested lists
_LONGEST = 1024  # a longer list among a module's attributes holds data
# Attributes of modules that this check skips: those of torch, and hyperparameters, see `list_unregistered_hparams`.
_SKIPPED = ("_parameters", "_buffers", "_modules", "_hparams", "_hparams_initial")
_OF_VALIDATION = {"val", "valid", "validation", "eval"}
# Words in names of metrics for which higher values are better, and words that reverse this, as in acc_loss.
_HIGHER_IS_BETTER = frozenset((
    *("acc", "accuracy", "ap", "auc", "aucpr", "auprc", "auroc", "bleu", "dice", "f1", "f1score", "f2", "fbeta"),
    *("fscore", "hitrate", "iou", "jaccard", "kappa", "map", "mcc", "meteor", "miou", "mrr", "ndcg", "precision"),
    *("psnr", "r2", "r2score", "recall", "roc", "rouge", "sensitivity", "specificity", "ssim", "top"),
))  # fmt: skip
_LOWER_IS_BETTER = frozenset((
    *("cost", "deviation", "dist", "distance", "divergence", "drop", "entropy", "err", "error", "gap", "loss"),
    *("mae", "mse", "nll", "perplexity", "rmse", "std", "time", "variance"),
))  # fmt: skip


def warn_of_untrained(trainer: Trainer, task: TaskModule) -> None:
    """Warn about trainable parameters that are in none of the optimizers, and about modules that are not registered."""
    optimized_ids = {
        id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]
    }
    names = [
        strip_compile_prefix(name)
        for name, p in task.named_parameters()
        if p.requires_grad and id(p) not in optimized_ids
    ]
    if task.automatic_optimization and not trainer.optimizers:
        warn(
            "configure_optimizers returned None, so nothing is trained. Return the optimizer, or ignore this warning "
            "if the run needs none."
        )
    elif names and optimized_ids:  # with manual optimization and no optimizer, this is intended
        warn(
            "parameters that require gradients are not in any optimizer, so they are not trained: "
            f"{abbreviate(names, _SHOWN)}. Add them in configure_optimizers, or freeze them with requires_grad_(False)."
        )
    for name in list_unregistered_hparams(task):
        warn(
            f"{type(task).__name__}.hparams[{name!r}] is a module that {type(task).__name__} holds only as a "
            "hyperparameter. It is not saved in checkpoints, not moved to the device, and missing from "
            f"self.parameters(). Set self.{name} = {name} in __init__, or freeze it to silence this warning."
        )
    if hidden := list(hidden_modules(task)):
        warn(
            f"modules or parameters in plain lists or dicts are not registered in {type(task).__name__}: "
            f"{abbreviate(hidden, _SHOWN)}. They are not saved in checkpoints, not moved to the device, and missing "
            "from self.parameters(). Use nn.ModuleList, nn.ModuleDict or nn.ParameterList. If this is intended, freeze "
            "them to silence this warning."
        )


def list_unregistered_hparams(task: TaskModule) -> list[str]:
    """Return the names of hyperparameters that are trainable modules, but no submodules of the task."""
    registered = {id(parameter) for parameter in task.parameters()}
    values = task.hparams.items()
    return [str(name) for name, value in values if list(_iterate_hidden("", value, registered, depth=0))]


def hidden_modules(task: nn.Module) -> Iterator[str]:
    """Yield the places of trainable modules and parameters in lists, tuples and dicts, which torch does not register.

    A place is an expression such as ``"layers[0]"``. Long or deeply nested containers are skipped.
    """
    registered = {id(parameter) for parameter in task.parameters()}
    for path, module in task.named_modules():
        for name, value in vars(module).items():
            if name not in _SKIPPED and isinstance(value, list | tuple | dict):
                yield from _iterate_hidden(f"{path}.{name}" if path else name, value, registered, _DEEPEST)


def _iterate_hidden(place: str, value: Any, registered: set[int], depth: int) -> Iterator[str]:
    if isinstance(value, nn.Module | nn.Parameter):
        parameters: Iterable[nn.Parameter] = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(p.requires_grad and id(p) not in registered for p in parameters):
            yield place
    for kind in cast(Any, (list, tuple, dict)) if depth else ():
        # Through the builtin type, because a subclass such as e3nn's Irrep may refuse to be measured or iterated over.
        if isinstance(value, kind) and kind.__len__(value) <= _LONGEST:
            for key, item in dict.items(value) if kind is dict else enumerate(kind.__iter__(value)):
                yield from _iterate_hidden(f"{place}[{key!r}]", item, registered, depth - 1)


def check_monitors(trainer: Trainer, logged: Iterable[str] | None) -> None:
    """Check that the values that callbacks and schedulers monitor will be logged, and warn about likely mistakes.

    ``logged`` holds the names that the sanity check logged; None if there was no sanity check.

    Raises:
        ValueError: If ``barebones=True`` disables logging and a strict monitor needs a logged value.
    """
    monitors = list(_iterate_monitors(trainer))
    wrong = dict.fromkeys(f"{owner} {name!r}" for owner, name, _, mode in monitors if mode == "min" and _is_score(name))
    if wrong:
        warn(
            f"{', '.join(wrong)}: mode='min' keeps the lowest value, but higher values of a metric with this name are "
            "usually better. Set mode='max', or ignore this warning if lower values are better."
        )
    if trainer.barebones:
        for owner, name, strict, _ in monitors:
            if strict:
                raise ValueError(
                    f"{owner} {name!r} is never logged, because barebones=True disables self.log. Remove barebones or "
                    "the monitor."
                )
    if logged is None:
        return
    names = sorted(logged)
    for owner, name, *_ in monitors:
        if name not in names and _OF_VALIDATION & set(re.split(r"[^a-z]+", name.lower())):
            hint = explain_returned(trainer, name) or nearest(name, names)
            warn(
                f"{owner} {name!r} was not logged in the sanity check, which logged "
                f"{', '.join(names) or 'nothing'}.{hint} If it is not logged elsewhere, the run will fail when the "
                "monitor is first read, unless strict=False."
            )


def _is_score(name: str) -> bool:
    """Return whether a metric's name has a word such as ``acc``, so that higher values are usually better."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    words = {part for word in re.split(r"[^a-z0-9]+", spaced) for part in (word, word.rstrip("0123456789"))}
    return bool(words & _HIGHER_IS_BETTER) and not words & _LOWER_IS_BETTER


def _iterate_monitors(trainer: Trainer) -> Iterator[tuple[str, str, bool, str]]:
    """Yield the owner, the name, whether a missing value is an error, and the mode of each monitor."""
    watching: list[EarlyStopping | ModelCheckpoint] = [*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks]
    for callback in watching:
        if callback.monitor is not None:
            strict = getattr(callback, "strict", True)
            yield f"{type(callback).__name__}'s monitor", callback.monitor, strict, callback.mode
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            mode = getattr(config.scheduler, "mode", "")
            yield f"{type(config.scheduler).__name__}'s monitor", config.monitor, config.strict, mode
