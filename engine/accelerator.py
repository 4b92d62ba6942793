"""One process's share of a training run: devices, precision, accumulation, exchange, checkpoints.

The Trainer owns one and uses only its public calls; a hand-written loop uses the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..strategies import Precision, Strategy, World, nearest, resolve_strategy
from ..strategies.devices import Devices
from . import snapshot
from .agreement import Agreement
from .loader import Loader
from .move import mover
from .optimizer import PreparedOptimizer, PreparedScheduler
from .process import Process
from .random_state import RandomStream, random_state
from .scale import LossScale, divide_gradients

_NOTHING = nullcontext()


class Accelerator(Process):
    """Everything distributed, every precision and every checkpoint, for a loop of your own.

    Args:
        strategy: a name (``"auto"``, ``"single"``, ``"ddp"``, a registered one) or a `Strategy`.
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"mps"``.
        devices: processes on this machine, see `World.from_env`; ``"auto"`` is what the launcher started, else one.
        num_nodes: machines.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"``, or any of `Precision`'s names.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: same as ``accelerator="cpu"``.
        device_placement: whether prepared loaders move their batches to the device.
        spread: whether ``devices="auto"`` may start a process for each GPU; see `World.from_env`.

    Raises:
        TypeError: for an argument that does not exist, with the nearest one that does.
        ValueError: for a value that can not be honoured here.
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        device_placement: bool = True,
        spread: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            name, valid = next(iter(unknown)), Accelerator.__init__.__kwdefaults__ or {}
            raise TypeError(f"Accelerator() has no argument {name!r}.{nearest(name, valid)}")
        if cpu and accelerator not in ("auto", "cpu"):
            raise ValueError(f"cpu=True contradicts accelerator={accelerator!r}; give one of them.")
        self.precision = Precision.parse(mixed_precision)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.device_placement = device_placement
        super().__init__(World.from_env("cpu" if cpu else accelerator, devices, num_nodes, spread=spread))
        self.strategy = resolve_strategy(strategy, self.world)
        self.strategy.attach(self.world, self.precision)
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision.scaled else None
        self.loss_scale = None if self.scaler is None else LossScale(self.scaler)
        self.agreement = Agreement(self.world, self.strategy)
        self.sync_gradients = True
        self.unfinished = False
        self.optimizer_step_was_skipped = False
        self.always_agree = False
        self._count = 0
        self._weight: float | Tensor | None = None
        self._unweighed = False
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Loader] = []
        self.registered: dict[str, Any] = {}
        self.stream: RandomStream | None = None

    @property
    def mixed_precision(self) -> str:
        """The autocast format in Accelerate's words: ``"no"``, ``"bf16"`` or ``"fp16"``."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.precision.compute, "no")  # type: ignore

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between steps."""
        return self._accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"gradient_accumulation_steps={value!r} must be a whole number of at least 1.")
        self._accumulate = value

    # -- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this process; returns them in the same order.

        Raises:
            TypeError: for an object of any other kind.
        """
        # Models first: an optimizer may have to follow its parameters to where they are then.
        models = {id(value): self.prepare_model(value) for value in objects if isinstance(value, nn.Module)}
        prepared = tuple(models[id(value)] if id(value) in models else self._prepare_one(value) for value in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return self.prepare_optimizer(value)
        if isinstance(value, DataLoader | Loader):
            return self.prepare_data_loader(value)
        if hasattr(value, "step") and hasattr(value, "state_dict"):
            return self.prepare_scheduler(value)
        raise TypeError(
            f"prepare takes models, optimizers, schedulers and DataLoaders, not {type(value).__name__}. "
            "An iterable of batches goes through prepare_data_loader."
        )

    def prepare_model(self, model: nn.Module, *, step: str | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Place and wrap one model.

        Args:
            model: the user's module.
            evaluation_mode: place it only; it will not be trained.
            step: the method whose returned loss is trained on, where it is not ``forward``; run it by `method`.
        """
        for known in self.models:
            if self.unwrap_model(known) is self.unwrap_model(model):
                return known
        if evaluation_mode:
            self.strategy.place(model)
            wrapped = model
        else:
            wrapped = self.strategy.wrap(model, step)
        self.models.append(wrapped)
        return wrapped

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Make an optimizer act at the end of each group of micro-batches."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(self.strategy.wrap_optimizer(optimizer), self)
        self.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Make a scheduler advance once per optimizer step that really happened."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        prepared = PreparedScheduler(scheduler, self)
        self.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        loader: Iterable[Any],
        *,
        shard: bool = True,
        evaluation: bool = False,
        move: Callable[[Any], Any] | None = None,
    ) -> Loader:
        """Share a loader out over the processes.

        Args:
            loader: a ``DataLoader`` or any iterable of batches.
            shard: False leaves each process with all that its own loader yields.
            evaluation: no accumulation groups, and every process takes part in every batch.
            move: what to apply to each batch in place of the move to the device.
        """
        if isinstance(loader, Loader):
            return loader
        if self.stream is None:
            self.start_order()
        assert self.stream is not None
        if move is None and self.device_placement:
            move = mover(self.device, self.precision)
        prepared = Loader(
            loader,
            world=self.strategy.data_world,
            cursor=self.cursor,
            stream=self.stream,
            accumulate=lambda: self._accumulate,
            shard=shard,
            evaluation=evaluation,
            move=move,
        )
        prepared.agree(self.strategy.data_world)
        self.loaders.append(prepared)
        return prepared

    def start_order(self) -> None:
        """Take the random state that data order is drawn from: rank zero's, as it is now.

        Happens when the first loader is prepared; call it for a new run with the same Accelerator.
        """
        state = random_state()
        # A CUDA generator's state is of no use to others, and of different size where they see other devices.
        self.stream = RandomStream(self.world.broadcast({name: state[name] for name in ("python", "numpy", "torch")}))

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[Any]:
        """The context to build a model in, so that it is made where and as it will be used.

        Where the strategy shards, parameters get no memory in it: `prepare_model` gives each process its shard, with
        the values that ``reset_parameters`` of each module draws.

        Args:
            empty_init: leave parameters without values, as a checkpoint will be loaded.
        """
        return self.strategy.construction(empty_init)

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model, run so that its gradients are synchronised."""
        return self.strategy.method(model, name)

    def local_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model in the run's precision, without exchange, for evaluation."""
        return self.strategy.local_method(model, name)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self.strategy.unwrap(model)

    # -- one optimizer step --------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """The context of one micro-batch: gradients are reduced, and the optimizer steps, at its group's last one."""
        micro = self.cursor.micro
        if micro is not None:
            last = micro.last
        else:  # batches from elsewhere: every k-th ends a group
            self._count += 1
            last = self._count >= self._accumulate
            self._count = 0 if last else self._count
        self.sync_gradients = last
        if self.strategy.delays_sync:
            for model in models:
                self.strategy.set_gradient_sync(model, last)
        return _NOTHING

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients stay on their process."""
        return self.strategy.no_sync(model)

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision for computations outside a prepared model."""
        return self.precision.context(self.device) or _NOTHING

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Add this micro-batch's share of the gradient.

        Give the plain mean loss: it is weighed by the samples the loader put into the micro-batch, so that the step's
        gradient is the mean over all samples of the group, on all processes.

        Args:
            loss: 0-d tensor.
            weight: what the loss is a mean over, where that is not samples (tokens): then the step's gradient is the
                mean over all of these. Give it in every micro-batch of a group, or in none.
            kwargs: for ``Tensor.backward``.
        """
        micro = self.cursor.micro
        if weight is not None:
            if self._unweighed:
                raise ValueError("this group's earlier micro-batches reported no weight, this one does.")
            if micro is not None and not micro.samples:
                weight = 0.0
            self._weight = weight if self._weight is None else self._weight + weight
            self.unfinished = True
            loss = loss * weight
        elif self._weight is not None:
            raise ValueError("this group's earlier micro-batches reported a weight, this one does not.")
        else:
            self._unweighed = not self.sync_gradients
            scale = 1.0 / self._accumulate if micro is None else micro.scale
            if scale != 1.0:
                loss = loss * scale
        if self.loss_scale is not None:
            loss = self.loss_scale.scale(loss)
        if self.sync_gradients and (self.always_agree or self.unfinished):
            self.agreement.vote(self._weight)
        loss.backward(**kwargs)

    def finish_gradients(self) -> None:
        """Divide the group's gradients by the weights that all processes reported. Happens by itself when needed."""
        if self.unfinished:
            self.agree()

    def drop_gradients(self) -> None:
        """Forget the micro-batches of the group so far: the group will not be finished."""
        self._weight, self.unfinished, self._unweighed = None, False, False
        for optimizer in self.optimizers:
            optimizer.optimizer.zero_grad()

    def agree_on_steps(self, *, finite: bool, at_once: bool) -> None:
        """Let every step's backward carry what all processes must agree on; read it with `agree`.

        Args:
            finite: whether losses are watched (with float16 the loss scaler does that).
            at_once: read it in the same step on accelerators too, which waits for the device.
        """
        self.always_agree = self.num_processes > 1 or self.device.type != "cpu"
        self.agreement.reset()
        self.agreement.watch_finite = finite and self.scaler is None
        self.agreement.immediate = at_once or self.device.type == "cpu"

    def not_finite_on(self) -> list[int]:
        """The processes whose loss was not finite, once `agree` said there are some. Forgets them."""
        own = self.agreement.own_finite
        self.agreement.finite = self.agreement.own_finite = True
        return [rank for rank, fine in enumerate(self.world.gather_objects(own)) if not fine]

    def agree(self) -> Agreement:
        """Read what all processes agreed on in the backward that has just run. For loops with ``always_agree``."""
        total = self.agreement.count()
        if self.unfinished:
            weight = self._weight if total is None else total
            assert weight is not None
            self._weight, self.unfinished = None, False
            parameters = (p for model in self.models for p in self.unwrap_model(model).parameters())
            divide_gradients(parameters, weight, self.world.size)
        return self.agreement

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """At the end of a group: clip the gradients' total norm in place.

        Returns:
            The norm before clipping (0-d tensor); None inside a group, where there is nothing to clip yet.
        """
        if not self.sync_gradients:
            return None
        self.unscale_gradients()
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """At the end of a group: clamp every gradient element to ``[-clip_value, clip_value]`` in place."""
        if self.sync_gradients:
            self.unscale_gradients()
            self.strategy.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients the true ones: divide by reported weights, and by float16's loss scale."""
        self.finish_gradients()
        if self.loss_scale is not None:
            chosen = self.optimizers if optimizer is None else [optimizer]
            self.loss_scale.unscale(o.optimizer if isinstance(o, PreparedOptimizer) else o for o in chosen)

    # -- state ---------------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Add objects with ``state_dict``/``load_state_dict`` to every checkpoint, by name or by order."""
        snapshot.register(self.registered, objects, named)

    def save_state(
        self,
        output_dir: str | os.PathLike[str],
        *,
        info: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        weights_only: bool = False,
    ) -> Path:
        """Save everything prepared or registered, and every process's random state. Call it on all processes.

        Args:
            output_dir: the checkpoint, a directory that is put in place in one move once it is complete.
            info: numbers and names for its manifest (``step``, ``epoch``, ...).
            parts: further states to keep in files of their own, by name.
            weights_only: the models and ``parts`` only.
        """
        return snapshot.save(self, Path(output_dir), info or {}, parts or {}, weights_only)

    def load_state(
        self, input_dir: str | os.PathLike[str], *, models: bool = True, state: bool = True
    ) -> dict[str, Any]:
        """Restore what `save_state` saved; returns its ``info``. Call it on all processes.

        Args:
            input_dir: a checkpoint.
            models: restore the models.
            state: restore everything else.
        """
        return snapshot.load(self, Path(input_dir), models=models, state=state)

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state of the user's own module, whole and under its own names. Call it on all processes."""
        return self.strategy.model_state(model)

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything prepared; returns a None for each object given, to rebind their names."""
        for known in (self.models, self.optimizers, self.schedulers, self.loaders, self.registered):
            known.clear()  # type: ignore[attr-defined]
        self.cursor.micro = self.stream = None
        self._count, self._weight, self.unfinished, self._unweighed = 0, None, False, False
        self.agreement.reset()
        return [None for _ in objects]
