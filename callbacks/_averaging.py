"""Averages of a model's weights, and the base class of the callbacks that keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.messages import announce, format_count, warn
from ..engine import isolated_random_state
from ..engine.checkpoint import OpenCheckpoint, Stored, model_part, open_added
from ..strategies.distributed import cut_like, is_sharded, local, strip_compile_prefix
from ._pruning import collect_masks
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


KEYS: tuple[str, str] = ("weight_averaging", "stochastic_weight_averaging")
"""Names under which the averaging callbacks save their averages in a checkpoint."""

Average = Callable[[list[Tensor], list[Tensor], int], None]
"""Function that updates averages in place, from the current values and the number of earlier updates."""


# These are module-level functions, and not those that torch.optim.swa_utils returns, so that a callback can be pickled
# for spawned processes.


def average_equally(averages: list[Tensor], current: list[Tensor], count: int) -> None:
    """Update averages in place so that all averaged values have the same weight."""
    torch._foreach_lerp_(averages, current, 1 / (count + 1))


def average_exponentially(decay: float, averages: list[Tensor], current: list[Tensor], count: int) -> None:
    """Update averages in place to ``decay * average + (1 - decay) * current``."""
    torch._foreach_lerp_(averages, current, 1.0 - decay)


def average_each(
    avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor], averages: list[Tensor], current: list[Tensor], count: int
) -> None:
    """Update averages in place by torch's ``avg_fn(averaged, current, num_averaged)``, which returns one average."""
    for averaged, value in zip(averages, current, strict=True):
        averaged.copy_(avg_fn(averaged, value, torch.tensor(count, device="cpu")))


def average_all(
    multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], Any],
    averages: list[Tensor],
    current: list[Tensor],
    count: int,
) -> None:
    """Update averages in place by torch's ``multi_avg_fn(averaged, current, num_averaged)``."""
    multi_avg_fn(averages, current, torch.tensor(count, device="cpu"))


class Averages:
    """Averages of a model's parameters and persistent buffers.

    Half-precision values are averaged in float32. Integer and boolean tensors are not averaged; their latest values are
    kept. If the model is pruned, the averages that are applied or saved are pruned, too.

    Args:
        module: The model, as prepared by the strategy.
        buffers: Whether to average persistent buffers, too.
        device: Device of the averages; None uses the device of the model's tensors.

    Attributes:
        count: Number of updates.
        values: Averages by name, with the model's sharding. A tied parameter is listed under each of its names.
    """

    def __init__(self, module: nn.Module, buffers: bool, device: torch.device | None = None) -> None:
        self.count = 0
        self.values: dict[str, Tensor] = {}
        self._module = module
        self._parameters = list(module.parameters())
        self._buffers: list[tuple[dict[str, Any], str]] = []  # a module may replace a buffer by another tensor
        self._model_values: list[Tensor] | None = None
        self._names: list[list[str]] = []  # names of each tensor, including those of tensors tied to it
        self._local_averages: list[Tensor] = []
        masks = collect_masks(module)
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            name, stem = strip_compile_prefix(name), strip_compile_prefix(name).removesuffix("_orig")
            names.setdefault(id(parameter), []).append(stem if stem in masks else name)
        for parameter in self._parameters:
            self._hold(names[id(parameter)], parameter, device)
        if buffers:
            self._hold_buffers({f"{name}_mask" for name in masks}, device)
        continuous = [value.is_floating_point() or value.is_complex() for value in self._local_averages]
        self._floats = [n for n, is_float in enumerate(continuous) if is_float]
        self._copied = [n for n, is_float in enumerate(continuous) if not is_float]

    def _hold_buffers(self, without: set[str], device: torch.device | None) -> None:
        names: dict[tuple[int, str], list[str]] = {}
        for path, part in self._module.named_modules(remove_duplicate=False):
            for name, buffer in part._buffers.items():
                full = strip_compile_prefix(f"{path}.{name}" if path else name)
                if buffer is None or full in without or name in part._non_persistent_buffers_set:
                    continue
                if (id(part), name) not in names:
                    self._buffers.append((part._buffers, name))
                names.setdefault((id(part), name), []).append(full)
        for tied_names, buffer in zip(names.values(), self.buffers, strict=True):
            self._hold(tied_names, buffer, device)

    def _hold(self, names: list[str], tensor: Tensor, device: torch.device | None) -> None:
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        value = tensor.detach().clone().to(device=device, dtype=torch.float32 if narrow else None)
        self.values |= dict.fromkeys(names, value)
        self._names.append(names)
        self._local_averages.append(local(value))

    def _list_tensors(self) -> list[Tensor]:
        return [*self._parameters, *self.buffers]

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of the model that are averaged."""
        return [table[name] for table, name in self._buffers]

    @torch.no_grad()
    def update(self, average: Average) -> None:
        """Add the model's current values to the averages. The first update copies them.

        Args:
            average: Function that updates the averages in place.
        """
        current_values = [local(tensor.detach()) for tensor in self._list_tensors()]
        averages = self._local_averages
        if not self.count:
            torch._foreach_copy_(averages, current_values)
        else:
            if self._floats:
                float_averages = [averages[n] for n in self._floats]
                average(float_averages, [current_values[n].to(averages[n]) for n in self._floats], self.count)
            if self._copied:
                torch._foreach_copy_([averages[n] for n in self._copied], [current_values[n] for n in self._copied])
        self.count += 1

    # -- in the model --------------------------------------------------------------------------------------------

    @property
    def is_applied(self) -> bool:
        """Return whether the averages are in the model."""
        return self._model_values is not None

    def apply_to_model(self) -> None:
        """Put the averages into the model."""
        if self._model_values is None:
            with torch.inference_mode(False), torch.no_grad():
                tensors = self._list_tensors()
                model_values = [
                    tensor.data if _can_swap_data(tensor, average) else local(tensor.detach()).clone()
                    for tensor, average in zip(tensors, self._local_averages, strict=True)
                ]
                self._model_values = model_values  # from here on `restore_model` can undo the change
                self._write_values(tensors, self._prune_averages())

    def restore_model(self) -> None:
        """Put the model's own values back."""
        if self._model_values is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._write_values(self._list_tensors(), self._model_values)
            self._model_values = None

    def keep_in_model(self) -> None:
        """Keep the averages in the model, and discard the values that they replaced."""
        self._model_values = None

    def _prune_averages(self) -> list[Tensor]:
        masks = collect_masks(self._module)
        return [
            _apply_masks(average, [masks.get(name) for name in names])
            for average, names in zip(self._local_averages, self._names, strict=True)
        ]

    def _write_values(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        for tensor, average, value in zip(tensors, self._local_averages, values, strict=True):
            if _can_swap_data(tensor, average):
                tensor.data = value  # no copy
            else:  # also for a shard: the all-gather reads from this memory
                local(tensor.detach()).copy_(value)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the averages, if any."""
        masks = collect_masks(self._module)
        weights = {name: _apply_masks(value, [masks.get(name)]) for name, value in self.values.items()}
        return {"count": self.count, "weights": weights if self.count else {}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, saved with any sharding. Its tensors may be read lazily.

        Args:
            state_dict: The saved state.

        Raises:
            ValueError: If the names of the averages differ from those of this model.
        """
        saved = state_dict["weights"]
        if saved and saved.keys() != self.values.keys():
            raise ValueError(
                f"the checkpoint's averaged weights do not match the model: "
                f"{_describe_difference(saved.keys(), self.values.keys())}. Use the same model and the same value of "
                "use_buffers as the run that saved the checkpoint."
            )
        for name, value in saved.items():
            average = self.values[name]
            part = value if is_sharded(value) else cut_like(value, average)
            local(average).copy_(local(part))
        self.count = state_dict["count"]


def _apply_masks(value: Tensor, masks: list[Tensor | None]) -> Tensor:
    """Return ``value`` with zeros where all masks are zero. None stands for a mask of ones."""
    mask: Tensor | None = None
    for other in masks:
        if other is None:
            return value
        mask = other if mask is None else torch.maximum(mask, other)
    return value if mask is None else value * mask.to(value.device, value.dtype)


def _can_swap_data(tensor: Tensor, average: Tensor) -> bool:
    return not is_sharded(tensor) and (tensor.dtype, tensor.device) == (average.dtype, average.device)


def resolve_averages_device(trainer: Trainer, device: Any, name: str, strict: bool) -> torch.device | None:
    """Return the device of the averages; None means the device of the weights.

    If the averages of a sharded model cannot be on ``device``, raise an error with ``strict``; otherwise, return None.
    """
    strategy = trainer.accelerator.strategy
    place = None if device is None else torch.device(device)
    if place is None or not strategy.sharded or place.type == trainer.accelerator.device.type:
        return place
    if strict:
        raise ValueError(
            f"{name}(device={str(device)!r}) cannot run with strategy={strategy.name!r}, because the averages of a "
            f"sharded model are on the device of its shards. Remove device={str(device)!r}."
        )
    return None


def _describe_difference(saved: Set[str], current: Set[str]) -> str:
    parts = []
    for owner, names in (("the checkpoint", sorted(saved - current)), ("the model", sorted(current - saved))):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        parts += [f"only {owner} has {', '.join(names[:5])}{more}"] if names else []
    return "; ".join(parts)


def find_saved_averages(opened: OpenCheckpoint) -> Mapping[str, Any] | None:
    """Return the entry that an averaging callback added to a checkpoint, with lazily read tensors, or None.

    Args:
        opened: The opened checkpoint.
    """
    added = open_added(opened)
    return next((added[key] for key in KEYS if key in added), None)


def averaged_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the averaged weights from a checkpoint as a dict that ``load_state_dict`` accepts.

    Tensors that were not averaged are returned with their trained values.

    Args:
        path: Path or URL of a checkpoint from a run with an averaging callback.

    Returns:
        Tensors by name.

    Raises:
        ValueError, TypeError: If the path is invalid, or the checkpoint is damaged or has no averaged weights.
        OSError: If the checkpoint cannot be read.
    """
    opened = OpenCheckpoint(path)
    opened.verify()
    saved = find_saved_averages(opened)
    if saved is None or not saved["weights"]:
        raise ValueError(
            f"{path} has no averaged weights: it was saved without an averaging callback, or before the weights were "
            "first averaged. Pass a later checkpoint of a run with such a callback."
        )
    weights: dict[str, Tensor] = opened.read_part(model_part(0))
    return weights | dict(_cast(saved["weights"], weights))


def _cast(averages: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each average, and the average in the dtype of the weight with that name."""
    for name, value in averages.items():
        tensor = value.read() if isinstance(value, Stored) else value
        yield name, tensor.to(weights[name].dtype) if name in weights else tensor


def find_measured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers in training mode that have running statistics."""
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.running_mean is not None
    ]


def measure(trainer: Trainer, task: TaskModule) -> None:
    """Run ``training_step`` over the training data once, without gradients, to recompute BatchNorm's statistics.

    Must be called on all ranks. The statistics are the mean over the batches of all processes, weighted by the number
    of samples. The RNG state is restored and the values that the steps log are discarded.

    Args:
        trainer: The Trainer, after training.
        task: The task.
    """
    layers = find_measured_layers(task)
    if not layers or trainer.sources is None or trainer.steps is None:
        return
    accelerator, loader = trainer.accelerator, trainer.sources.train
    announce(
        f"reading the training data once more to update the statistics of "
        f"{format_count(len(layers), 'BatchNorm layer')}"
    )
    saved_buffers = [[buffer.clone() for buffer in layer.buffers()] for layer in layers]
    momenta = [layer.momentum for layer in layers]
    order = None if accelerator.stream is None else accelerator.stream.get_state()
    epoch = loader.epoch
    logged = trainer.new_metrics(training=True)
    try:
        with torch.no_grad(), isolated_random_state(), trainer.logging_to(logged):
            samples = _run_through(trainer, task, layers)
    finally:
        logged.reset()  # otherwise the task's metric objects include these batches
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum  # type: ignore[assignment]
        loader.end_epoch()
        loader.epoch = epoch
        if accelerator.stream is not None and order is not None:
            accelerator.stream.go_to(order)
    if not _average_statistics(trainer, layers, samples):
        for layer, buffers in zip(layers, saved_buffers, strict=True):
            for buffer, value in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(value)
        warn(
            "the training dataloader yielded no batches in a second pass, so the BatchNorm layers keep the statistics "
            "of the trained weights, not of their averages. Use a dataset that can be read more than once."
        )


def _run_through(trainer: Trainer, task: TaskModule, layers: list[nn.Module]) -> float:
    """Recompute the layers' statistics in one pass over the training data and return the number of samples."""
    steps, accelerator = trainer.steps, trainer.accelerator
    assert steps is not None
    step = accelerator.local_method(task, "training_step")
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
    total_samples = 0.0
    for index, batch in enumerate(trainer.sources.train):
        samples = accelerator.cursor.micro.samples  # type: ignore[union-attr]
        total_samples += samples
        for layer in layers:  # a placeholder batch, which keeps the ranks in step, has weight 0
            layer.momentum = samples / total_samples if samples else 0.0  # type: ignore[assignment]
        if steps.takes_index:
            step(batch, index)
        else:
            step(batch)
    return total_samples


def _average_statistics(trainer: Trainer, layers: list[nn.Module], samples: float) -> bool:
    """Average the statistics over all processes, weighted by samples. Return False if there were no samples."""
    world = trainer.accelerator.data_world
    statistics: list[Tensor] = [t for layer in layers for t in (layer.running_mean, layer.running_var)]  # type: ignore
    flat = torch.cat([t.double().flatten() for t in statistics] if world.device.type != "mps" else statistics)
    total = world.all_reduce(torch.cat([flat * samples, flat.new_tensor([samples])]))
    if not total[-1]:
        return False
    if world.size > 1:
        mean = total[:-1] / total[-1]
        for tensor, part in zip(statistics, mean.split([t.numel() for t in statistics]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return True


class Averaging(Callback):
    """Callback that keeps averages of the weights and leaves them in the model after training.

    Subclasses decide when to average. If training fails, the model's own weights are restored.
    """

    exchanges = True

    _key: str
    """Name under which the averages are saved, one of `KEYS`."""

    _position: tuple[str, ...] = ("latest_epoch",)
    """Names of further attributes to save with the averages, without their leading underscore."""

    def __init__(self) -> None:
        self._averages: Averages | None = None
        self._ended = False  # training is over, and the averages are in the model
        self._latest_epoch = -1

    def _make_room(self, trainer: Trainer, task: TaskModule, buffers: bool, device: Any, strict: bool) -> None:
        names = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, Averaging)]
        if len(names) > 1:
            raise ValueError(
                f"the Trainer has {len(names)} callbacks that average weights ({', '.join(names)}), but only one "
                "callback can set the final weights. Keep one of them."
            )
        self._averages = Averages(task, buffers, resolve_averages_device(trainer, device, type(self).__name__, strict))
        self._ended, self._latest_epoch = False, -1

    def _end(self) -> None:
        if self._averages is not None and not self._ended:
            self._averages.restore_model()

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Restore the model's own weights."""
        self._ended = False
        self._end()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Keep the averages in the model after successful training, otherwise the model's own weights."""
        if self._ended and self._averages is not None:
            self._averages.keep_in_model()
        self._end()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages, if any, to the checkpoint."""
        if self._averages is not None:
            position = {name: getattr(self, f"_{name}") for name in self._position}
            checkpoint[self._key] = {**self._averages.state_dict(), "ended": self._ended, **position}

    def added_layout(self) -> dict[str, Any]:
        """Return tensors with the names and sharding of the averages."""
        return {} if self._averages is None else {self._key: {"weights": self._averages.values}}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Restore the averages, if the checkpoint has any."""
        saved = checkpoint.get(self._key)
        if saved is None:
            warn(f"the checkpoint was saved without {type(self).__name__}, so averaging starts with this run.")
            return
        if saved["ended"]:
            warn("the checkpoint was saved after training ended, so training continues from the averaged weights.")
        assert self._averages is not None
        self._averages.load_state_dict(saved)
        for name in self._position:
            setattr(self, f"_{name}", saved[name])
