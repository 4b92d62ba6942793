"""The searches that may come before a stage: for a batch size that fits, and for a learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...callbacks import BatchSizeFinder, Callback, LearningRateFinder, _LRFinder, open_callback_states
from ...common.messages import announce, nearest, warn
from ...engine.checkpoint import in_memory
from ...engine.optim import attempt
from ...strategies.distributed import Attempts
from ..loop import (
    KIND_OF_STAGE,
    Hooks,
    Schedules,
    check_step,
    configure,
    evaluate,
    kind_of_steps,
    prepare_training,
    validate,
)
from .sandbox import get_attribute, holders, rehearsal, set_attribute

if TYPE_CHECKING:
    from ...engine import Loader
    from ..trainer import Trainer


def tune(trainer: Trainer) -> None:
    """Let the finders among the callbacks search: sizes first, as a rate is good for one batch size.

    The stage is set up, but nothing of the model is built or placed yet.
    """
    sizes = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder)]
    rates = [c for c in trainer.callbacks if isinstance(c, LearningRateFinder) and trainer.stage == "fit"]
    for finder in (*sizes, *rates):
        name = type(finder).__name__
        if trainer.fast_dev_run:
            announce(f"{name}: nothing is searched for with fast_dev_run")
        elif trainer.stage == "fit" and trainer.opened_checkpoint is not None:
            _go_on(trainer, finder)
        elif isinstance(finder, BatchSizeFinder):
            find_batch_size(trainer, finder)
        elif isinstance(finder, LearningRateFinder):
            find_learning_rate(trainer, finder)


def _go_on(trainer: Trainer, finder: Any) -> None:
    """Give a run that goes on what its search has found."""
    opened = trainer.opened_checkpoint
    assert opened is not None
    state = in_memory(open_callback_states(opened)["callbacks"].get(finder.state_key), {}, {})
    if state is None:
        name = type(finder).__name__
        warn(f"{opened.path} was made without {name}: the run goes on with what it had, and nothing is searched for.")
        return
    finder.load_state_dict(state)
    if isinstance(finder, BatchSizeFinder):
        _apply_size(trainer, finder)
    else:
        _apply_rate(trainer, finder)


# -- an attribute that is searched for -------------------------------------------------------------------------------


def _check_attribute(trainer: Trainer, finder: Callback, name: str, argument: str) -> None:
    """Raise a ValueError if nobody has it."""
    if holders(trainer, name):
        return
    task, datamodule = trainer.task, trainer.datamodule
    owners = [owner for owner in (task, datamodule) if owner is not None]
    known = {key for owner in owners for key in (*vars(owner), *owner.hparams) if not key.startswith("_")}
    places = " or ".join(f"{type(owner).__name__} or its hparams" for owner in owners)
    raise ValueError(
        f"{type(finder).__name__}({argument}={name!r}): there is no such attribute in {places}. Set it in __init__ "
        f"and use it where it is meant for.{nearest(name, known)}"
    )


# -- the batch size --------------------------------------------------------------------------------------------------


def find_batch_size(trainer: Trainer, finder: BatchSizeFinder) -> None:
    """Find the largest batch that fits on all processes, and set it."""
    name, stage, accelerator = finder.batch_arg_name, str(trainer.stage), trainer.accelerator
    _check_attribute(trainer, finder, name, "batch_arg_name")
    assert trainer.sources is not None
    if trainer.sources.given.get(KIND_OF_STAGE[stage]) is not None:
        raise ValueError(
            f"BatchSizeFinder makes loaders of other sizes, and can't make a loader anew that {stage} was given. Give "
            f"the task or a data module a {KIND_OF_STAGE[stage]}_dataloader() that uses self.{name}."
        )
    limit, samples = finder.max_val, None
    if finder.keep_global_batch and stage == "fit":
        samples = _samples_per_step(trainer, name)
        limit = min(limit, samples)
    attempts, loaders = Attempts(), dict[int, int | None]()

    def fits(size: int) -> int | None:
        attempts.begin()
        done, most = attempt(attempts, partial(_try_size, trainer, finder, size, loaders))
        if not done:
            accelerator.reconnect(attempts.start_over)
            trainer.logbook.data_world = accelerator.data_world
        return most if done else None

    size = finder.search(fits, limit)
    if samples is not None:
        size = next(divisor for divisor in range(size, 0, -1) if samples % divisor == 0)
        finder.accumulate = samples // size
    finder.optimal_batch_size = size
    _apply_size(trainer, finder)


def _samples_per_step(trainer: Trainer, name: str) -> int:
    """Samples of an optimizer step, of this process, as the attribute and the flag say."""
    size, task = get_attribute(trainer, name), trainer.task
    assert task is not None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"keep_global_batch=True keeps what {name} says, and that is {size!r}: set a whole number.")
    if not task.automatic_optimization:
        raise ValueError(
            f"keep_global_batch=True raises accumulate_grad_batches, and {type(task).__name__} steps its optimizers "
            "itself (automatic_optimization=False): leave it out, and accumulate in training_step."
        )
    return size * trainer.accelerator.gradient_accumulation_steps


def _apply_size(trainer: Trainer, finder: BatchSizeFinder) -> None:
    if trainer.stage == "fit" and finder.accumulate is not None:
        trainer.accelerator.gradient_accumulation_steps = finder.accumulate
    assert finder.optimal_batch_size is not None
    set_attribute(trainer, finder.batch_arg_name, finder.optimal_batch_size)
    more = "" if finder.accumulate is None else f", accumulate_grad_batches={finder.accumulate}"
    announce(f"BatchSizeFinder: {finder.batch_arg_name}={finder.optimal_batch_size}{more}")


def _try_size(trainer: Trainer, finder: BatchSizeFinder, size: int, loaders: dict[int, int | None]) -> int:
    """A few steps with batches of ``size``; returns the most samples that the data has for one process.

    Args:
        trainer: whose stage is about to begin.
        finder: says how many steps.
        size: what the attribute is set to.
        loaders: the batch sizes of the loaders that were made before, by the attribute's value; this one's is added.
    """
    with rehearsal(trainer, **{finder.batch_arg_name: size}) as inner:
        accelerator, task, stage = inner.accelerator, inner.task, str(inner.stage)
        assert task is not None
        assert inner.hooks is not None
        assert inner.sources is not None
        inner.sources.limits = dict.fromkeys(inner.sources.limits, 1.0)
        # What is accumulated lies beside the second micro-batch; those after it need no more.
        accumulates = accelerator.gradient_accumulation_steps > 1 or (finder.keep_global_batch and stage == "fit")
        accelerator.gradient_accumulation_steps = 2 if accumulates else 1
        if stage == "fit":
            for _ in _training(inner, finder.steps_per_trial):
                pass
            if inner.has_validation:
                validate(inner, finder.steps_per_trial)
            loader = inner.sources.train
        else:
            every = inner.sources.evaluation(KIND_OF_STAGE[stage])
            if not every:
                raise ValueError(
                    f"{stage} needs a loader: give the task or a data module a {KIND_OF_STAGE[stage]}_dataloader."
                )
            check_step(task, stage)
            accelerator.prepare_model(task, evaluation_mode=True)
            for loader in every:
                loader.limit = finder.steps_per_trial if loader.limit is None else loader.limit
            evaluate(inner, task, inner.hooks, every, stage, within_fit=False)
            loader = every[0]
        _check_use(loader, finder.batch_arg_name, size, loaders)
        return _most(loader, trainer, size)


def _check_use(loader: Loader, name: str, size: int, loaders: dict[int, int | None]) -> None:
    """Raise a ValueError if the attribute makes no difference to the loaders."""
    loaders[size] = getattr(loader.source, "batch_size", None)
    first = next(iter(loaders))
    if len(loaders) == 2 and loaders[size] is not None and loaders[size] == loaders[first]:
        raise ValueError(
            f"with {name}={first} and with {name}={size} the loader has batch_size={loaders[size]}: its method does "
            f"not use the attribute. Write DataLoader(..., batch_size=self.{name}) there."
        )


def _most(loader: Loader, trainer: Trainer, size: int) -> int:
    """How many samples the data has for one batch of one process; where that is not known, more than were tried."""
    dataset = getattr(loader.source, "dataset", None)
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 2**62
    return max(1, count // trainer.accelerator.data_world.size)


# -- the learning rate -----------------------------------------------------------------------------------------------


def find_learning_rate(trainer: Trainer, finder: LearningRateFinder) -> None:
    """Find a learning rate, and set it."""
    name = _rate_name(trainer, finder)
    task = trainer.task
    assert task is not None
    if not task.automatic_optimization:
        raise ValueError(
            f"LearningRateFinder can't search with automatic_optimization=False: {type(task).__name__} steps its "
            "optimizers itself, and only it knows which losses and rates belong together. Leave the finder out."
        )
    found = _LRFinder(finder.mode, finder.min_lr, finder.max_lr, finder.num_training_steps)
    with rehearsal(trainer) as inner:
        _range_test(inner, finder, found)
        finder.optimal_lr = found
        suggested = found.suggestion()
        if name is not None and suggested is not None:
            _check_rate_is_used(inner, name, suggested)
    _apply_rate(trainer, finder)


def _rate_name(trainer: Trainer, finder: LearningRateFinder) -> str | None:
    """The attribute to set, if one is."""
    if finder.attr_name:
        _check_attribute(trainer, finder, finder.attr_name, "attr_name")
    if not finder.update_attr:
        return None
    name = finder.attr_name or next((name for name in ("lr", "learning_rate") if holders(trainer, name)), None)
    if name is None:
        raise ValueError(
            f"LearningRateFinder sets {type(trainer.task).__name__}.lr or .learning_rate, and there is neither: set "
            "one in __init__ and use it in configure_optimizers, say attr_name=..., or update_attr=False."
        )
    return name


def _apply_rate(trainer: Trainer, finder: LearningRateFinder) -> None:
    assert finder.optimal_lr is not None
    rate, name = finder.optimal_lr.suggestion(), _rate_name(trainer, finder)
    if rate is not None and name is not None:
        set_attribute(trainer, name, rate)
    finder.say(rate, name)


def _check_rate_is_used(inner: Trainer, name: str, rate: float) -> None:
    """Say so if ``configure_optimizers`` makes the same of every value of the attribute."""
    assert inner.task is not None
    rates = []
    for value in (rate, 2 * rate):
        set_attribute(inner, name, value)
        optimizers, _ = configure(inner.task)
        rates.append([_base_rate(group) for group in optimizers[0].param_groups])
    if rates[0] == rates[1]:
        warn(
            f"{type(inner.task).__name__}.configure_optimizers does not use {name}, which LearningRateFinder sets: the "
            "run does not train with what was found."
        )


def _range_test(inner: Trainer, finder: LearningRateFinder, found: _LRFinder) -> None:
    """Take the steps, each with its learning rate, until they are done or the loss diverges."""
    losses = _StepLoss()
    with torch.enable_grad():
        for step in _training(inner, found.num_training, [losses], found.rate):
            found.add(found.rate(step), losses.take(inner))
            if finder.early_stop_threshold is not None and found.diverges(finder.early_stop_threshold):
                return


class _StepLoss(Callback):
    """The loss of an optimizer step: the mean over its micro-batches and all processes, weighed as the gradient is."""

    def __init__(self) -> None:
        self._micros: list[Any] = []
        self._sum: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        """A micro-batch: how many samples it has is known now."""
        self._micros.append(trainer.accelerator.cursor.micro)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """It is done: what it weighs may have been reported."""
        micro = self._micros.pop(0)
        if micro.samples:  # else it only stands in for one
            weight = outputs.get("weight")
            weight = micro.samples if weight is None else weight
            self._sum = self._sum + outputs["loss"].float() * weight
            self._weight = self._weight + weight

    def take(self, trainer: Trainer) -> float:
        """The loss since the last call. All processes must ask."""
        both = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64)
        device = trainer.accelerator.device
        both = both.to(device, torch.float32 if device.type == "mps" else torch.float64)
        total, weight = trainer.accelerator.data_world.all_reduce(both).tolist()
        self._sum = self._weight = 0.0
        return total / weight if weight else float("nan")


# -- steps -----------------------------------------------------------------------------------------------------------


def _training(inner: Trainer, count: int, callbacks: Iterable[Callback] = (), rate: Any = None) -> Iterator[int]:
    """Take ``count`` optimizer steps, over as many epochs as that needs; yields the number of each when it is done.

    Args:
        inner: a rehearsal.
        count: how many.
        callbacks: who follows them.
        rate: the learning rate of each step.
    """
    task, progress = inner.task, inner.progress
    assert task is not None
    assert inner.sources is not None
    hooks = inner.hooks = Hooks(inner, task, list(callbacks))
    model = prepare_training(inner, task)
    set_rate = _rates(inner) if rate is not None else None
    for hook in hooks.on_fit_start:
        hook()
    loader = inner.sources.train
    kind = kind_of_steps(inner, task)
    steps = inner.steps = kind(inner, task, model, hooks, Schedules(inner, task, []), lambda: False)
    done = 0
    with inner.logging_to(inner.metrics):
        for hook in hooks.on_train_start:
            hook()
        while True:
            before = done
            for hook in hooks.on_train_epoch_start:
                hook()
            for group in loader.groups():
                if set_rate is not None:
                    set_rate(rate(done))
                steps.take(group)
                if steps.skip_rest:
                    break
                yield done
                done += 1
                if done == count:
                    return
            if done == before:
                raise ValueError("a search needs batches, and an epoch of the training loader had none to train on.")
            steps.skip_rest = False
            loader.end_epoch()
            for hook in hooks.on_train_epoch_end:
                hook()
            inner.metrics.reset()
            progress.next_epoch()


def _rates(inner: Trainer) -> Any:
    """What sets the optimizer's learning rate; its groups keep their proportions."""
    optimizers = inner.optimizers
    if not optimizers:
        raise ValueError(f"{type(inner.task).__name__}.configure_optimizers returned no optimizer to find a rate for.")
    groups = optimizers[0].param_groups
    base = [_base_rate(group) for group in groups]
    shares = [each / max(base) if max(base) > 0 else 1.0 for each in base]

    def set_rate(rate: float) -> None:
        for group, share in zip(groups, shares, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    return set_rate


def _base_rate(group: dict[str, Any]) -> float:
    """A group's rate before its scheduler, which may begin at 0, has changed it."""
    return float(group.get("initial_lr", group["lr"]))
