"""`Trainer`: runs a task over a strategy chosen by a flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..callbacks import Callback
from ..engine import Accelerator, Metrics
from ..loggers import Logger
from ..strategies import Strategy, choose, nearest
from ..strategies.devices import Devices
from . import diagnosis, flags, restore, resume, summary
from .datamodule import DataModule
from .defaults import as_callbacks, choose_callbacks, choose_loggers
from .evaluation import check_step, evaluate, predictions_in_order
from .fitting import run_fit
from .hooks import Hooks, name_of
from .last_step import LastStep
from .logbook import Logbook
from .names import TrainerNames
from .optimizers import SchedulerConfig
from .progress import Progress
from .sources import KINDS, Sources, check_kinds
from .task import TaskModule

_KIND_OF_STAGE = {"validate": "val", "test": "test", "predict": "predict"}


class Trainer(TrainerNames):
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
        max_epochs: epochs to train; -1 is no limit. By default 1000 where nothing else limits the run.
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
            (which waits for the device in every step), or ``"ignore"``. With float16 the loss scaler decides.

    Attributes:
        accelerator: the `Accelerator` underneath.
        progress: the run's counters.
        should_stop: set it, on any process, to end the run after an optimizer step.
        sanity_checking: whether the validation that runs is the one before training.

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
            valid = Trainer.__init__.__kwdefaults__ or ()
            raise TypeError(f"Trainer() has no argument {name!r}.{nearest(name, valid)}")
        fast = flags.check_batches("fast_dev_run", fast_dev_run)
        if max_epochs is None:
            max_epochs = 1000 if max_steps == -1 and max_time is None else -1
        self.fast_dev_run = fast_dev_run
        self.max_epochs = 1 if fast else flags.check_count("max_epochs", max_epochs, -1)
        self.max_steps = fast or flags.check_count("max_steps", max_steps, -1)
        self.min_epochs = flags.check_count("min_epochs", min_epochs or 0, 0)
        self.min_steps = flags.check_count("min_steps", min_steps or 0, 0)
        if not fast:
            flags.check_bounds("epochs", self.min_epochs, self.max_epochs)
            flags.check_bounds("steps", self.min_steps, self.max_steps)
        self.max_seconds = flags.seconds("max_time", max_time)
        self.limit_train_batches = fast or flags.check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = fast or flags.check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = fast or flags.check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = fast or flags.check_limit("limit_predict_batches", limit_predict_batches)
        self.val_check_interval = 1.0 if fast else flags.check_interval("val_check_interval", val_check_interval)
        epochs = 1 if fast else check_val_every_n_epoch
        self.check_val_every_n_epoch = flags.check_epochs("check_val_every_n_epoch", epochs, self.val_check_interval)
        sanity = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.num_sanity_val_steps = 0 if fast else flags.check_count("num_sanity_val_steps", sanity, -1)
        every = 50 if log_every_n_steps is None else log_every_n_steps
        self.log_every_n_steps = flags.check_count("log_every_n_steps", every, 0)
        self.gradient_clip_val = flags.check_positive("gradient_clip_val", gradient_clip_val)
        algorithm = gradient_clip_algorithm or "norm"
        self.gradient_clip_algorithm = choose("gradient_clip_algorithm", algorithm, ("norm", "value"))
        self.inference_mode = flags.check_switch("inference_mode", inference_mode)
        self.use_distributed_sampler = flags.check_switch("use_distributed_sampler", use_distributed_sampler)
        self.detect_anomaly = flags.check_switch("detect_anomaly", detect_anomaly)
        self.default_root_dir = flags.check_directory("default_root_dir", default_root_dir)
        self.on_nonfinite = choose("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
        flags.set_determinism(deterministic, benchmark)
        self.accelerator = Accelerator(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            mixed_precision=precision,
            gradient_accumulation_steps=flags.check_count("accumulate_grad_batches", accumulate_grad_batches, 1),
            spread=True,
        )
        self.callbacks = choose_callbacks(
            callbacks,
            checkpointing=enable_checkpointing,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            keep_nothing=bool(fast),
        )
        self.loggers = choose_loggers(logger, self.default_root_dir, silent=bool(fast))
        self.logbook = Logbook(self.accelerator.world, self.accelerator.data_world, self.loggers)
        self.progress = Progress()
        self.metrics = Metrics(training=True)
        self.should_stop = False
        self.sanity_checking = False
        self.evaluation_batch = 0
        self.evaluation_total: int | None = None
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        # Of the stage that runs, or ran last.
        self.stage: str | None = None
        self.task: TaskModule | None = None
        self.datamodule: DataModule | None = None
        self.hooks: Hooks | None = None
        self.sources: Sources | None = None
        self.ckpt_path: Path | None = None
        self.last_step: LastStep | None = None

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
            ckpt_path: a checkpoint to go on from: a path; ``"last"``, the newest that is intact; ``"best"``; or
                ``"auto"``, as ``"last"``, or a fresh start where there is none.
        """
        given = {"train": train_dataloaders, "val": val_dataloaders}
        self._run("fit", model, given, datamodule, ckpt_path, partial(run_fit, self))

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
        return self._measure("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the test; arguments and result as of `validate`."""
        return self._measure("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Return ``predict_step``'s result for each batch of all processes, in the dataset's order, on each process.

        Args:
            model: the task; by default the one of the last ``fit``, at its best checkpoint.
            dataloaders: the loader, several (then the result is a list of lists), or a data module.
            datamodule: instead of loaders.
            return_predictions: False keeps nothing, for streams that a callback writes away.
            ckpt_path: a checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
        """
        keep = return_predictions is not False
        work = partial(self._evaluate, "predict", keep)
        found = self._run("predict", model, {"predict": dataloaders}, datamodule, ckpt_path, work)
        return predictions_in_order(found, self.accelerator.data_world) if keep else None

    def _measure(
        self, stage: str, model: TaskModule | None, loaders: Any, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        given = {_KIND_OF_STAGE[stage]: loaders}
        found = self._run(stage, model, given, datamodule, ckpt_path, partial(self._evaluate, stage, False)).metrics
        if verbose:
            self.print(summary.results(stage, found))
        return found

    def _evaluate(self, stage: str, keep: bool, task: TaskModule, hooks: Hooks, sources: Sources) -> Any:
        kind = _KIND_OF_STAGE[stage]
        loaders = sources.evaluation(kind)
        if not loaders:
            raise ValueError(f"{stage} needs a loader: pass one or a datamodule, or give the task a {kind}_dataloader.")
        check_step(task, stage)
        self.accelerator.prepare_model(task, evaluation_mode=True)
        if self.ckpt_path is not None:
            self.accelerator.load_state(self.ckpt_path, state=False)
        return evaluate(self, task, hooks, loaders, stage, within_fit=False, keep_predictions=keep)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        blocking: bool = True,
        also: Sequence[str | Path] = (),
    ) -> None:
        """Save the run as it is between two optimizer steps. Call it on all processes.

        Args:
            filepath: the checkpoint, a directory.
            weights_only: the task's weights and hyperparameters only.
            blocking, also: see `Accelerator.save_state`.
        """
        if self.task is None:
            raise ValueError("save_checkpoint needs a task: call fit, or another stage, first.")
        restore.save(self, self.task, [filepath, *also], weights_only, blocking)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank zero, beside the progress bar."""
        bar = self.progress_bar_callback
        if self.is_global_zero:
            (print if bar is None or self.stage is None else bar.print)(*args, **kwargs)

    # -- one stage -----------------------------------------------------------------------------------------------

    def _run(
        self,
        stage: str,
        task: TaskModule | None,
        given: dict[str, Any],
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        work: Callable[[TaskModule, Hooks, Sources], Any],
    ) -> Any:
        """Set a stage up, do its work, and tear it down whatever happened."""
        first = next(iter(given))
        if isinstance(given[first], DataModule):
            given, datamodule = {**given, first: None}, given[first]
        if task is None:
            task, ckpt_path = restore.fitted(self, stage, ckpt_path)
            datamodule = datamodule or (None if any(v is not None for v in given.values()) else self.datamodule)
        check_kinds(stage, task, datamodule)
        if datamodule is not None and any(loader is not None for loader in given.values()):
            raise ValueError("pass loaders or a datamodule, not both.")
        self.stage, self.task, self.datamodule, self.hooks, self.ckpt_path = stage, task, datamodule, None, None
        self.should_stop, self.last_step = False, None
        failure: BaseException | None = None
        try:
            hooks, sources = self._setup(stage, task, given, ckpt_path)
            with torch.autograd.set_detect_anomaly(True) if self.detect_anomaly else nullcontext():
                return work(task, hooks, sources)
        except BaseException as error:
            failure = error
            self._tell_of(error)
            raise
        finally:
            self._teardown(stage, task, failure)

    def _setup(self, stage: str, task: TaskModule, given: dict[str, Any], ckpt_path: Any) -> tuple[Hooks, Sources]:
        task.trainer = self
        if self.datamodule is not None:
            self.datamodule.trainer = self
        self.accelerator.free_memory()
        added = as_callbacks("what configure_callbacks returns", task.configure_callbacks())
        self.callbacks = [c for c in self.callbacks if type(c) not in {type(a) for a in added}] + added
        self.hooks = hooks = Hooks(self, task, self.callbacks)
        self.ckpt_path = resume.find_checkpoint(self, stage, ckpt_path)
        limits = {kind: getattr(self, f"limit_{kind}_batches") for kind in KINDS}
        shard = self.use_distributed_sampler
        self.sources = sources = Sources(task, self.datamodule, given, self.accelerator, limits, shard)
        self.logbook.agree_on_versions()
        with self.accelerator.world.together():
            for owner in (self.datamodule, task):
                if owner is not None and self.accelerator.is_local_main_process:
                    owner.prepare_data()
        if self.datamodule is not None:
            self.datamodule.setup(stage)
        for hook in hooks.setup:
            hook(stage)
        with self.init_module():
            task.configure_model()
        return hooks, sources

    def _teardown(self, stage: str, task: TaskModule, failure: BaseException | None) -> None:
        """Give everyone the chance to clean up; the first cause, if there is one, stays the error."""
        errors: list[Exception] = []
        owners = () if self.datamodule is None else (self.datamodule.teardown,)
        for clean_up in (*owners, *(self.hooks.teardown if self.hooks is not None else ())):
            try:
                clean_up(stage)
            except Exception as error:
                errors.append(error)
                if failure is not None:
                    failure.add_note(f"in the teardown after it, {clean_up!r} raised {type(error).__name__}: {error}")
        self.accelerator.close_loaders()
        self.logbook.call("finalize", "success" if failure is None else "failed")
        task.__dict__["_metrics"] = None
        self.stage = None
        if errors and failure is None:
            raise errors[0]

    def _tell_of(self, error: BaseException) -> None:
        diagnosis.annotate(error, self)
        owners = () if self.datamodule is None else (self.datamodule.on_exception,)
        for hook in (*(self.hooks.on_exception if self.hooks is not None else ()), *owners):
            try:
                hook(error)
            except Exception as second:
                error.add_note(f"while it was handled, {name_of(hook)} raised {type(second).__name__}: {second}")

    # -- what a stage knows of itself ----------------------------------------------------------------------------

    @property
    def has_validation(self) -> bool:
        """Whether ``fit`` validates: there is a loader, a ``validation_step``, and no limit of zero."""
        if self.sources is None or self.task is None:
            return False
        if type(self.task).validation_step is TaskModule.validation_step:
            return False
        return self.limit_val_batches != 0 and bool(self.sources.evaluation("val"))

    @contextmanager
    def logging_to(self, metrics: Metrics | None) -> Iterator[None]:
        """Inside, the task's ``log`` goes to ``metrics``; with None it warns that there is no place for it."""
        assert self.task is not None
        attributes = self.task.__dict__  # a module's own assignment would cost, and is not wanted
        before, attributes["_metrics"] = attributes["_metrics"], metrics
        try:
            yield
        finally:
            attributes["_metrics"] = before

    def update_train_epoch_values(self) -> None:
        """Bring ``callback_metrics`` up to date with what training logged in this epoch."""
        self.logbook.update_epoch(self.metrics)
