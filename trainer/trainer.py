"""`Trainer`: runs a task over a strategy chosen by a flag."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelSummary, TQDMProgressBar
from ..engine import Accelerator, Loader, Metrics, isolated_random_state, random_state, set_random_state
from ..loggers import Logger, TensorBoardLogger
from ..strategies import Strategy, announce, choose, nearest
from ..strategies.world import Devices
from . import flags, summary
from .datamodule import DataModule, TransferHooks
from .evaluation import evaluate, merge
from .hooks import Hooks
from .logbook import Logbook, SilentLogger
from .loop import FitLoop
from .optimizers import SchedulerConfig, parse_optimizers
from .progress import Progress
from .restore import Bundle, callback_states, load_callback_states, resolve_checkpoint
from .task import TaskModule

NON_FINITE = ("raise", "skip", "ignore")


class Trainer:
    """Runs the loop of a `TaskModule`: processes, precision, accumulation, checkpoints, logging.

    The flags have Lightning's names and meanings.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``) or ``"mps"``.
        strategy: ``"auto"``, ``"single"``, ``"ddp"``, a registered name, or a `Strategy`.
        devices: processes on this machine: a number, ``-1``, a list of device indices, ``"auto"``.
        num_nodes: machines.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``, ``"64-true"``.
        logger: True (TensorBoard), False, a `Logger`, or several.
        callbacks: one or several.
        fast_dev_run: run so many batches (True is one) of each stage, without logging or checkpoints.
        max_epochs: epochs to train; -1 is no limit. By default 1000 where ``max_steps`` is not given.
        min_epochs: epochs before anything may stop the run early.
        max_steps: optimizer steps to train; -1 is no limit.
        min_steps: optimizer steps before anything may stop the run early.
        max_time: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments.
        limit_train_batches: batches of an epoch (int) or a share of it (float); per process.
        limit_val_batches: the same, for validation.
        limit_test_batches: the same, for testing.
        limit_predict_batches: the same, for prediction.
        val_check_interval: validate every so many micro-batches (int), or every such share of an epoch (float). It
            happens at the end of the optimizer step that reaches it.
        check_val_every_n_epoch: validate in every n-th epoch; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches before training; -1 for all.
        log_every_n_steps: optimizer steps between writes to the loggers; 0 for none.
        enable_checkpointing: add a `ModelCheckpoint` if there is none.
        enable_progress_bar: add a `TQDMProgressBar` if there is none.
        enable_model_summary: add a `ModelSummary` if there is none.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the limit of the gradients' norm or value, per optimizer step.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        deterministic: use deterministic algorithms only; ``"warn"`` warns where there is none.
        benchmark: let cuDNN try its algorithms.
        inference_mode: evaluate under ``torch.inference_mode`` rather than ``no_grad`` (not within ``fit``).
        use_distributed_sampler: share the data out over the processes; False if your loaders do so themselves.
        detect_anomaly: find the operation that made a gradient NaN; slow.
        default_root_dir: where logs and checkpoints go that are given no place.
        on_nonfinite: a loss that is not finite on any process: ``"raise"``, ``"skip"`` the step on all processes
            (which waits for the device in every step), or ``"ignore"``.

    Raises:
        TypeError: for an argument that does not exist, with the nearest one that does.
        ValueError: for a value that can not be honoured.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: flags.Limit = None,
        limit_val_batches: flags.Limit = None,
        limit_test_batches: flags.Limit = None,
        limit_predict_batches: flags.Limit = None,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        default_root_dir: str | Path | None = None,
        on_nonfinite: str = "raise",
        **unknown: Any,
    ) -> None:
        if unknown:
            name = next(iter(unknown))
            raise TypeError(
                f"Trainer() has no argument {name!r}.{nearest(name, Trainer.__init__.__kwdefaults__ or ())}"
            )
        fast = int(fast_dev_run)
        self.fast_dev_run = fast_dev_run
        if max_epochs is None:
            max_epochs = -1 if max_steps != -1 or max_time is not None else 1000
        self.max_epochs = 1 if fast else flags.check_count("max_epochs", max_epochs, -1)
        self.max_steps = fast if fast else flags.check_count("max_steps", max_steps, -1)
        self.min_epochs = flags.check_count("min_epochs", min_epochs or 0, 0)
        self.min_steps = flags.check_count("min_steps", min_steps or 0, 0)
        self.max_seconds = flags.seconds("max_time", max_time)
        given = (limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches)
        names = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
        limits = [fast or flags.check_limit(name, value) for name, value in zip(names, given, strict=True)]
        self.limit_train_batches, self.limit_val_batches, self.limit_test_batches, self.limit_predict_batches = limits
        self.val_check_interval = 1.0 if val_check_interval is None or fast else val_check_interval
        if isinstance(self.val_check_interval, int):
            flags.check_count("val_check_interval", self.val_check_interval, 1)
        else:
            flags.check_limit("val_check_interval", self.val_check_interval)
        self.check_val_every_n_epoch = 1 if fast else check_val_every_n_epoch
        self.num_sanity_val_steps = 0 if fast else 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.log_every_n_steps = flags.check_count(
            "log_every_n_steps", 50 if log_every_n_steps is None else log_every_n_steps, 0
        )
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = choose(
            "gradient_clip_algorithm", gradient_clip_algorithm or "norm", ("norm", "value")
        )
        self.inference_mode = inference_mode
        self.use_distributed_sampler = use_distributed_sampler
        self.detect_anomaly = detect_anomaly
        self.default_root_dir = str(default_root_dir or Path.cwd())
        self.on_nonfinite = choose("on_nonfinite", on_nonfinite, NON_FINITE)
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        if benchmark is not None or deterministic:
            torch.backends.cudnn.benchmark = bool(benchmark)
        self.accelerator = Accelerator(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            mixed_precision=precision,
            gradient_accumulation_steps=accumulate_grad_batches,
            spread=True,
        )
        self.progress = Progress()
        self.metrics = Metrics(training=True)
        self.callbacks = self._default_callbacks(
            callbacks, enable_checkpointing, enable_progress_bar, enable_model_summary
        )
        self.loggers = self._default_loggers(logger)
        self.logbook = Logbook(self.accelerator.world, self.loggers)
        self.should_stop = False
        self.sanity_checking = False
        self.stage: str | None = None
        self.task: TaskModule | None = None
        self.model: Any = None
        self.hooks: Hooks | None = None
        self.datamodule: DataModule | None = None
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.num_training_batches: int | None = None
        self.num_val_batches: list[int | None] = []
        self.evaluation_batch = 0
        self.evaluation_total: int | None = None
        self.ckpt_path: str | Path | None = None
        self._fitted = False
        self._given: dict[str, Any] = {}
        self._train_loader: Loader | None = None
        self._val_loaders: list[Loader] | None = None
        self._restored_random_state: Any = None

    def _default_callbacks(
        self, given: list[Callback] | Callback | None, checkpointing: bool | None, bar: bool | None, table: bool | None
    ) -> list[Callback]:
        callbacks = [given] if isinstance(given, Callback) else list(given or ())
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be treadle.Callback objects, not {type(callback).__name__}.")
        if any(isinstance(c, ModelCheckpoint) for c in callbacks) and checkpointing is False:
            raise ValueError(
                "enable_checkpointing=False contradicts the ModelCheckpoint in callbacks; drop one of them."
            )
        defaults = ((bar, TQDMProgressBar), (table, ModelSummary), (checkpointing, ModelCheckpoint))
        for wanted, kind in defaults:
            if wanted is not False and not any(isinstance(c, kind) for c in callbacks):
                callbacks.append(kind())
        if self.fast_dev_run:  # nothing is kept of such a run
            callbacks = [c for c in callbacks if not isinstance(c, ModelCheckpoint | EarlyStopping)]
        return callbacks

    def _default_loggers(self, given: Logger | list[Logger] | bool | None) -> list[Logger]:
        if self.fast_dev_run:
            return [SilentLogger()] if given is not False else []
        if given is None or given is True:
            return [TensorBoardLogger(self.default_root_dir)]
        if given is False:
            return []
        loggers = list(given) if isinstance(given, list | tuple) else [given]
        for logger in loggers:
            if not (hasattr(logger, "log_metrics") and hasattr(logger, "finalize")):
                raise TypeError(f"logger must be True, False, a treadle.loggers.Logger or several, not {logger!r}.")
        return loggers  # type: ignore[return-value]

    # -- entry points --------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train.

        Args:
            model: the task.
            train_dataloaders: the training loader, or a data module.
            val_dataloaders: the validation loader, or several.
            datamodule: instead of loaders.
            ckpt_path: a checkpoint to go on from: a path, ``"last"`` or ``"best"``.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        given = {"train": train_dataloaders, "val": val_dataloaders}
        path = resolve_checkpoint(self, ckpt_path)
        self._run("fit", model, given, datamodule, path, self._fit)

    def validate(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation; returns the logged values, one dict per loader.

        Args:
            model: the task; by default the one of the last ``fit``, at its best checkpoint.
            dataloaders: the loader, several, or a data module.
            ckpt_path: a checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
            verbose: print the values.
            datamodule: instead of loaders.
        """
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the test; arguments and result as of `validate`."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Return ``predict_step``'s result for each batch, in the dataset's order, of all processes, on each.

        Args:
            model: the task; by default the one of the last ``fit``, at its best checkpoint.
            dataloaders: the loader, several (then the result is a list of lists), or a data module.
            datamodule: instead of loaders.
            return_predictions: False keeps nothing, for streams that a callback writes away.
            ckpt_path: a checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
        """
        keep = return_predictions is not False
        return self._evaluation("predict", model, dataloaders, ckpt_path, datamodule, partial(self._predict, keep))

    def _evaluate(
        self, stage: str, model: TaskModule | None, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        found = self._evaluation(stage, model, loaders, ckpt_path, datamodule, partial(self._measure, stage))
        if verbose and self.is_global_zero:
            self.print(summary.results(stage, found))
        return found

    def _evaluation(
        self,
        stage: str,
        model: TaskModule | None,
        loaders: Any,
        ckpt_path: Any,
        datamodule: Any,
        work: Callable[[], Any],
    ) -> Any:
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if model is None:
            if self.task is None:
                raise ValueError(f"{stage} needs a model: pass one, or call fit first.")
            model = self.task
            if ckpt_path is None and self._fitted and self.checkpoint_callback is not None:
                ckpt_path = "best" if self.checkpoint_callback.best_model_path else None
        if datamodule is None and loaders is None:
            datamodule = self.datamodule
        given = {stage if stage != "validate" else "val": loaders}
        return self._run(stage, model, given, datamodule, resolve_checkpoint(self, ckpt_path), work)

    # -- one stage -----------------------------------------------------------------------------------------------

    def _run(
        self,
        stage: str,
        task: TaskModule,
        given: dict[str, Any],
        datamodule: DataModule | None,
        ckpt_path: Path | None,
        work: Callable[[], Any],
    ) -> Any:
        """Set a stage up, do its work, and tear it down whatever happened."""
        if not isinstance(task, TaskModule):
            raise TypeError(f"{stage} takes a treadle.TaskModule, not {type(task).__name__}.")
        if datamodule is not None and any(loader is not None for loader in given.values()):
            raise ValueError("pass loaders or a datamodule, not both.")
        self.stage, self.task, self.datamodule, self._given, self.ckpt_path = stage, task, datamodule, given, ckpt_path
        self.should_stop = False
        status = "failed"
        try:
            self._setup(stage, task)
            with torch.autograd.set_detect_anomaly(self.detect_anomaly) if self.detect_anomaly else isolated_nothing():
                result = work()
            status = "success"
            return result
        except BaseException as error:
            self._tell_of(error)
            raise
        finally:
            self._teardown(stage, task, status)

    def _setup(self, stage: str, task: TaskModule) -> None:
        world = self.accelerator.world
        task.trainer = self
        self.accelerator.free_memory()
        self._train_loader = self._val_loaders = None
        callbacks = self._callbacks_with(task.configure_callbacks())
        self.hooks = Hooks(self, task, callbacks)
        self.callbacks = callbacks
        self.logbook.agree_on_versions()
        sources: list[Any] = [task] if self.datamodule is None else [self.datamodule, task]
        if self.datamodule is not None:
            self.datamodule.trainer = self
        error: BaseException | None = None
        if world.local_rank == 0:
            try:
                for source in sources:
                    source.prepare_data()
            except Exception as caught:
                error = caught
        world.raise_together(error)
        if self.datamodule is not None:
            self.datamodule.setup(stage)
        for hook in self.hooks.setup:
            hook(stage)
        task.configure_model()

    def _callbacks_with(self, own: Any) -> list[Callback]:
        """The Trainer's callbacks, with the task's in place of those of the same class."""
        added = [own] if isinstance(own, Callback) else list(own or ())
        kinds = tuple(type(callback) for callback in added)
        return [c for c in self.callbacks if type(c) not in kinds] + added

    def _teardown(self, stage: str, task: TaskModule, status: str) -> None:
        errors: list[BaseException] = []

        def attempt(function: Callable[..., Any], *args: Any) -> None:
            try:
                function(*args)
            except Exception as error:
                errors.append(error)

        if self.datamodule is not None:
            attempt(self.datamodule.teardown, stage)
        for hook in self.hooks.teardown if self.hooks is not None else ():
            attempt(hook, stage)
        self.logbook.call("finalize", status)
        task.__dict__["_metrics"] = None
        self.stage = None
        if errors and status == "success":  # never in the place of the first cause
            raise errors[0]

    def _tell_of(self, error: BaseException) -> None:
        for hook in self.hooks.on_exception if self.hooks is not None else ():
            try:
                hook(error)
            except Exception as second:
                error.add_note(f"while handling it, {hook!r} raised {type(second).__name__}: {second}")
        if self.datamodule is not None:
            self.datamodule.on_exception(error)

    # -- training ------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        task, hooks, accelerator = self.task, self.hooks, self.accelerator
        assert task is not None and hooks is not None
        if not task.automatic_optimization:
            raise ValueError("automatic_optimization=False is not supported yet.")
        optimizers = self._configure_optimizers(task)
        self.model = accelerator.prepare_model(task, step="training_step")
        for optimizer in optimizers:
            accelerator.prepare_optimizer(optimizer)
        accelerator.schedulers.extend(config.scheduler for config in self.lr_scheduler_configs)
        accelerator.always_agree = accelerator.num_processes > 1
        accelerator.agreement.reset()
        watch = self.on_nonfinite != "ignore" and accelerator.scaler is None
        accelerator.agreement.watch_finite = watch
        accelerator.agreement.immediate |= self.on_nonfinite == "skip"
        if self.ckpt_path is not None:
            accelerator.load_state(self.ckpt_path, state=False)
        for hook in hooks.on_fit_start:
            hook()
        self._log_hyperparameters()
        loader = self.train_loader
        self._register_state(task)
        if self.ckpt_path is not None:
            self._restore(self.ckpt_path)
        summary.announce_fit(self, loader)
        self._sanity_check()
        loop = FitLoop(self, task, self.model, hooks, loader, self.lr_scheduler_configs)
        task.train()
        with self.logging_to(self.metrics):
            loop.run()
        for hook in hooks.on_fit_end:
            hook()
        self._fitted = True

    def _configure_optimizers(self, task: TaskModule) -> list[torch.optim.Optimizer]:
        if type(task).configure_optimizers is TaskModule.configure_optimizers:
            raise ValueError(f"{type(task).__name__} needs a configure_optimizers that returns an optimizer, or None.")
        if type(task).training_step is TaskModule.training_step:
            raise ValueError(f"{type(task).__name__} needs a training_step that returns the loss.")
        optimizers, self.lr_scheduler_configs = parse_optimizers(task.configure_optimizers())
        if len(optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization steps one. Put "
                "their parameters into groups of one optimizer."
            )
        return optimizers

    def _sanity_check(self) -> None:
        if not self.num_sanity_val_steps or not self.has_validation or self.ckpt_path is not None:
            return
        assert self.task is not None and self.hooks is not None and self.accelerator.stream is not None
        stream = dict(self.accelerator.stream.state)
        self.sanity_checking = True
        with isolated_random_state():
            for hook in self.hooks.on_sanity_check_start:
                hook()
            self._validate_once(self.num_sanity_val_steps)
            for hook in self.hooks.on_sanity_check_end:
                hook()
        self.sanity_checking = False
        self.accelerator.stream.state = stream
        self.logbook.callback_values.clear()
        self.logbook.bar_values.clear()

    def validate_within_fit(self) -> None:
        """Validate between two steps; the progress bar, the callbacks and the loggers are told."""
        self._validate_once(None)

    def _validate_once(self, steps: int | None) -> None:
        assert self.task is not None and self.hooks is not None
        loaders = self.val_loaders
        for loader, total in zip(loaders, self.num_val_batches, strict=True):
            some = steps is not None and steps >= 0
            loader.limit = steps if some and total is None else min(steps, total) if some else total  # type: ignore
        evaluate(self, self.task, self.hooks, loaders, "validate", within_fit=True)

    def may_go_on_after_non_finite(self, micro: Any) -> bool:
        """Decide what a loss that is not finite means; every process comes here after the same step.

        Raises:
            ValueError: where the flag says ``"raise"``; it names the step and the processes.
        """
        agreement = self.accelerator.agreement
        ranks = [r for r, fine in enumerate(self.accelerator.world.gather_objects(agreement.own_finite)) if not fine]
        agreement.finite = agreement.own_finite = True
        where = f"optimizer step {self.progress.step + 1} (epoch {self.progress.epoch}, micro-batch {self.progress.batch - 1})"
        if self.on_nonfinite == "raise":
            raise ValueError(
                f"the loss is not finite on rank {', '.join(map(str, ranks))} in {where}. Lower the learning rate, clip "
                "the gradients or look at that batch; Trainer(on_nonfinite='skip') leaves such steps out."
            )
        announce(f"the loss is not finite on rank {', '.join(map(str, ranks))}: {where} is skipped.")
        return False

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _place_for_evaluation(self) -> None:
        assert self.task is not None
        self.accelerator.prepare_model(self.task, evaluation_mode=True)
        if self.ckpt_path is not None:
            self.accelerator.load_state(self.ckpt_path, state=False)

    def _measure(self, stage: str) -> list[dict[str, float]]:
        assert self.task is not None and self.hooks is not None
        self._place_for_evaluation()
        loaders = self._evaluation_loaders("val" if stage == "validate" else stage)
        return evaluate(self, self.task, self.hooks, loaders, stage, within_fit=False).metrics

    def _predict(self, keep: bool) -> list[Any] | None:
        assert self.task is not None and self.hooks is not None
        self._place_for_evaluation()
        loaders = self._evaluation_loaders("predict")
        done = evaluate(self, self.task, self.hooks, loaders, "predict", within_fit=False, keep_predictions=keep)
        if not keep:
            return None
        world = self.accelerator.world
        every = [world.gather_objects(part) for part in done.predictions]
        # Each round of batches is dealt in rank order, so taking turns gives the dataset's order.
        ordered = [[p[i] for i in range(max(map(len, parts))) for p in parts if i < len(p)] for parts in every]
        return merge(ordered)

    # -- loaders -------------------------------------------------------------------------------------------------

    def _source(self, name: str) -> Any:
        """The loader(s) of a kind: passed, the data module's, or the task's; None where there are none."""
        if (given := self._given.get(name)) is not None:
            return given
        method = f"{name}_dataloader"
        owners = (self.datamodule,) if self.datamodule is not None else ()
        for owner, base in (*((o, DataModule) for o in owners), (self.task, TaskModule)):
            own = getattr(type(owner), method) is not getattr(base, method) or method in vars(owner)
            if own:
                return getattr(owner, method)()
        return None

    def _mover(self, number: int) -> Callable[[Any], Any] | None:
        """The user's own way to the device, or None for the accelerator's."""
        for owner in (self.datamodule, self.task):
            names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
            if owner is not None and any(getattr(type(owner), n) is not getattr(TransferHooks, n) for n in names):
                return partial(self._transfer, owner, number)
        return None

    def _transfer(self, owner: TransferHooks, number: int, batch: Any) -> Any:
        batch = owner.on_before_batch_transfer(batch, number)
        batch = owner.transfer_batch_to_device(batch, self.accelerator.device, number)
        return owner.on_after_batch_transfer(self.accelerator.precision.cast(batch), number)

    @property
    def train_loader(self) -> Loader:
        """The prepared training loader; fetched when first asked for."""
        if self._train_loader is None:
            source = self._source("train")
            if source is None:
                raise ValueError(
                    "fit needs a training loader: pass train_dataloaders or a datamodule, or give the task one."
                )
            if isinstance(source, list | tuple | dict) and any(isinstance(s, DataLoader) for s in _values(source)):
                raise ValueError("several training loaders at once are not supported yet: pass one.")
            loader = self.accelerator.prepare_data_loader(
                source, shard=self.use_distributed_sampler, move=self._mover(0)
            )
            loader.limit = self.num_training_batches = flags.limited(
                "limit_train_batches", self.limit_train_batches, loader.length
            )
            self._train_loader = loader
        return self._train_loader

    @property
    def val_loaders(self) -> list[Loader]:
        """The prepared validation loaders; fetched when first asked for."""
        if self._val_loaders is None:
            self._val_loaders = self._evaluation_loaders("val", missing_ok=True)
            self.num_val_batches = [loader.limit for loader in self._val_loaders]
        return self._val_loaders

    def _evaluation_loaders(self, name: str, missing_ok: bool = False) -> list[Loader]:
        source = self._source(name)
        if source is None:
            if missing_ok:
                return []
            raise ValueError(
                f"there is no {name} loader: pass one, or a datamodule, or give the task {name}_dataloader."
            )
        several = isinstance(source, list | tuple | dict) and all(
            isinstance(s, DataLoader | Loader) for s in _values(source)
        )
        loaders = []
        for number, each in enumerate(_values(source) if several else [source]):
            loader = self.accelerator.prepare_data_loader(
                each, shard=self.use_distributed_sampler, evaluation=True, move=self._mover(number)
            )
            flag = f"limit_{name}_batches"
            loader.limit = flags.limited(flag, getattr(self, flag), loader.length)
            loaders.append(loader)
        return loaders

    @property
    def has_validation(self) -> bool:
        """Whether ``fit`` validates: there is a loader, a ``validation_step``, and no limit of zero."""
        if self.limit_val_batches == 0 or type(self.task).validation_step is TaskModule.validation_step:
            return False
        return bool(self.val_loaders)

    def explain_loader(self, loader: Loader) -> str:
        """Why a loader may have yielded nothing."""
        return summary.explain_empty(loader, self.world_size)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps the whole run will take; infinite where nothing limits it."""
        batches = self.train_loader and self.num_training_batches
        if self.max_epochs == -1 or batches is None:
            return self.max_steps if self.max_steps != -1 else float("inf")
        steps = -(-batches // self.accelerator.gradient_accumulation_steps) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    # -- numbers -------------------------------------------------------------------------------------------------

    @contextmanager
    def logging_to(self, metrics: Metrics) -> Iterator[None]:
        """Inside, the task's ``log`` goes to ``metrics``."""
        assert self.task is not None
        before = self.task.__dict__["_metrics"]
        self.task.__dict__["_metrics"] = metrics
        try:
            yield
        finally:
            self.task.__dict__["_metrics"] = before

    def update_train_epoch_values(self) -> None:
        """Bring ``callback_metrics`` up to date with what training logged in this epoch."""
        self.logbook.update_epoch(self.metrics)

    def monitored(self, config: SchedulerConfig) -> float | None:
        """The value a plateau scheduler is stepped with, agreed over the processes.

        Raises:
            ValueError: if it was never logged; lists what was.
        """
        from ..callbacks.monitor import monitored_value

        return monitored_value(self, config.monitor or "", "the scheduler's monitor", strict=config.strict)

    def _log_hyperparameters(self) -> None:
        for owner in (self.task, self.datamodule):
            if owner is not None and owner.hparams and getattr(owner, "_log_hyperparams", True):
                self.logbook.call("log_hyperparams", dict(owner.hparams))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save the run as it is between two optimizer steps. Call it on all processes.

        Args:
            filepath: the checkpoint, a directory.
            weights_only: the task's weights and hyperparameters only.
        """
        if self.task is None:
            raise ValueError("save_checkpoint needs a task: call fit (or another stage) first.")
        progress = self.progress
        info = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
        info["task"] = f"{type(self.task).__module__}.{type(self.task).__qualname__}"
        hparams = {"hparams": dict(self.task.hparams)} if self.task.hparams else {}
        self.accelerator.save_state(filepath, info=info, parts=hparams, weights_only=weights_only)

    def _register_state(self, task: TaskModule) -> None:
        world = self.accelerator.world
        self.accelerator.register_for_checkpointing(
            progress=self.progress,
            metrics=Bundle(lambda: self.metrics.state_dict(world), lambda s: self.metrics.load_state_dict(s, world)),
            callbacks=Bundle(
                lambda: callback_states(self, task, self.callbacks),
                lambda s: load_callback_states(self, task, self.callbacks, s),
            ),
        )
        if self.datamodule is not None:
            self.accelerator.register_for_checkpointing(datamodule=self.datamodule)

    def _restore(self, path: Path) -> None:
        with isolated_random_state():
            self.accelerator.load_state(path, models=False)
            self._restored_random_state = random_state()

    def restore_random_state(self) -> None:
        """Just before the first step: go on with the random state of the checkpoint that was restored, if any."""
        if self._restored_random_state is not None:
            set_random_state(self._restored_random_state)
            self._restored_random_state = None

    # -- what users read -----------------------------------------------------------------------------------------
    # Names that other people's code uses; ours does not, except for the first few.

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank zero, beside the progress bar."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None and self.stage is not None:
            bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank zero."""
        return self.accelerator.is_main_process

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return self.accelerator.local_process_index

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps that really happened."""
        return self.progress.step

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Everything logged: the newest epoch values, and this process's newest step values."""
        return {**self.logbook.callback_values, **self.metrics.latest()}

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What the loggers got last, by name."""
        return dict(self.logbook.logged_values)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows. Reads the device."""
        return {**self.logbook.bar_values, **self.metrics.local_values()}

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The first logger's directory, if it has one."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The task's optimizers."""
        return [prepared.optimizer for prepared in self.accelerator.optimizers]

    @property
    def strategy(self) -> Strategy:
        """How the model lies on the processes."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self.accelerator.precision.name

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task."""
        return self.task

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The checkpoint callbacks."""
        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        return next((c for c in self.callbacks if isinstance(c, EarlyStopping)), None)

    @property
    def progress_bar_callback(self) -> TQDMProgressBar | None:
        """The progress bar."""
        return next((c for c in self.callbacks if isinstance(c, TQDMProgressBar)), None)

    @property
    def train_dataloader(self) -> Any:
        """The user's training loader."""
        return None if self._train_loader is None else self._train_loader.source

    @property
    def val_dataloaders(self) -> Any:
        """The user's validation loader, or the list of them."""
        sources = [loader.source for loader in self._val_loaders or ()]
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def training(self) -> bool:
        """Whether a ``fit`` runs."""
        return self.stage == "fit" and not self.sanity_checking


def _values(source: Any) -> list[Any]:
    return list(source.values()) if isinstance(source, dict) else list(source)


@contextmanager
def isolated_nothing() -> Iterator[None]:
    """Nothing."""
    yield


__all__ = ["Trainer"]
_ = time
