"""`Trainer`: runs a task over a strategy chosen by a flag."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ProgressBar,
)
from ..common.remote_path import AnyPath
from ..common.validation import choose
from ..engine import Accelerator, Metrics, Preemption
from ..engine.checkpoint import OpenCheckpoint
from ..engine.metrics import MutedMetrics
from ..engine.optim import check_schedule
from ..engine.profilers import Profiler, choose_profiler
from ..loggers import Logger
from ..strategies import Strategy, report_uncaught
from ..strategies.distributed import Devices
from . import arguments
from .checkpointing import LastStep, TrainerCheckpointer
from .core import DataModule, SchedulerConfig, TaskModule, log_to, overrides, warn_of_code
from .default_callbacks import choose_callbacks, choose_loggers, set_aside
from .lightning_aliases import LightningAliases
from .logging import History, Logbook, tensors_by_name
from .loop import (
    KIND_OF_STAGE,
    Evaluation,
    EvaluationLoop,
    Fit,
    Hooks,
    Progress,
    RunSummary,
    Sources,
    Stage,
    Steps,
    check_step,
    describe_results,
    predictions_in_order,
    wrap,
)
from .profiling import Profiled
from .settings import Limit, TrainerSettings
from .states import TrainerStatus
from .watched import find_directory, locate


class Trainer(LightningAliases):
    """Runs the loop of a `TaskModule`: processes, precision, accumulation, checkpoints, logging.

    The flags have Lightning's names and meanings.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``) or ``"mps"``.
        strategy: ``"auto"``, ``"single"``, ``"ddp"``, a registered name, or a `Strategy`.
        devices: Processes on this machine: a number, ``-1``, a list of device indices, ``"auto"``.
        num_nodes: Machines.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``, ``"64-true"``, or
            ``"float8"``: as bf16-mixed, with linear layers that multiply in float8 (needs ``treadle[quantization]``).
        logger: True (TensorBoard), False, a `Logger`, or several.
        callbacks: One or several.
        fast_dev_run: Run so many batches (True is one) of each stage, without logging or checkpoints.
        max_epochs: Epochs to train; -1 is no limit. By default 1000 where nothing else limits the run.
        min_epochs: Epochs before anything may stop the run early.
        max_steps: Optimizer steps to train; -1 is no limit.
        min_steps: Optimizer steps before anything may stop the run early.
        max_time: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments.
        limit_train_batches: Batches of an epoch (int) or a share of it (float); per process.
        limit_val_batches: The same, for validation.
        limit_test_batches: The same, for testing.
        limit_predict_batches: The same, for prediction.
        overfit_batches: Train and validate on so many batches (int) or such a share (float), in one order; 0 for all.
        val_check_interval: Validate every so many micro-batches (int), every such share of an epoch (float), or after
            so much time (as ``max_time``). It happens at the end of the optimizer step that reaches it.
        check_val_every_n_epoch: Validate in every n-th epoch; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: Validation batches before training; -1 for all.
        log_every_n_steps: Optimizer steps between writes to the loggers; 0 for none.
        enable_checkpointing: Add a `ModelCheckpoint` if there is none.
        enable_progress_bar: Add a `TQDMProgressBar` if there is none.
        enable_model_summary: Add a `ModelSummary` if there is none.
        enable_report: Add a `RunReport` if there is none: a page about the run, in the folder of its logger.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: The limit of the gradients' norm or value, per optimizer step; None or 0 for none.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        deterministic: Use deterministic algorithms only; ``"warn"`` warns where there is none.
        benchmark: Let cuDNN try its algorithms.
        float32_matmul_precision: How float32 matrices are multiplied: ``"highest"``, or ``"high"`` or ``"medium"``
            with fewer bits (TF32 or bfloat16 on GPUs that have it), which is several times faster. It is the whole
            process's. Default: as it is set, ``"highest"`` unless the script has called torch.
        inference_mode: Evaluate under ``torch.inference_mode`` rather than ``no_grad`` (not within ``fit``).
        use_distributed_sampler: Share the data out over the processes; False if your loaders do so themselves.
        sync_batchnorm: BatchNorm layers see the samples of all processes (DDP).
        reload_dataloaders_every_n_epochs: Ask for the loaders anew every so many epochs; 0 for never.
        detect_anomaly: Find the operation that made a gradient NaN; slow.
        barebones: Nothing that costs time: no logging, checkpoints, bar, summary, nor sanity check.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"`` or a `Profiler`: where the time goes.
        compile: Compile the model's parts; a dict for ``torch.compile``'s arguments.
        plugins: A `Precision`, or ``TorchSyncBatchNorm()``; one or several.
        enable_autolog_hparams: Hand hyperparameters to the loggers at the start.
        default_root_dir: Where logs and checkpoints go that are given no place.
        on_nonfinite: A loss or a gradient that is not finite on any process: ``"raise"`` (on accelerators one step
            later), ``"skip"`` the step on all processes (which waits for the device in every step), or ``"ignore"``.
            With float16 gradients are the loss scaler's affair.
        timeout: How long a rank may make no progress, as ``max_time``; see `Accelerator`.
        grace: How long a stage may take to end after a signal, as ``max_time``. Then all ranks end, even if a save is
            incomplete; the latest complete checkpoint is what counts. Default: as long as it takes.

    Attributes:
        accelerator: The `Accelerator` underneath.
        progress: The run's counters.
        history: The curves of what was logged, and where the time went; see `History`.
        should_stop: Set it, on any process, to end the run after an optimizer step.
        interrupted: Whether Ctrl-C ended the stage that ran last.
        sanity_checking: Whether the validation that runs is the one before training.
        decided: What ``fit`` said when it began: devices, strategy, precision, effective batch, steps, parameters.

    Raises:
        TypeError: For an argument that does not exist, with the nearest one that does.
        ValueError: For a value that can not be honoured.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Iterable[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        enable_report: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        float32_matmul_precision: str | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        detect_anomaly: bool = False,
        barebones: bool = False,
        profiler: Profiler | str | None = None,
        compile: bool | dict[str, Any] = False,
        plugins: Any = None,
        enable_autolog_hparams: bool = True,
        default_root_dir: str | Path | None = None,
        on_nonfinite: str = "raise",
        timeout: str | timedelta | dict[str, int] | None = None,
        grace: str | timedelta | dict[str, int] | None = None,
        **unknown: Any,
    ) -> None:
        report_uncaught()  # also what is wrong with the flags
        self.changed_flags = arguments.select_changed_flags(locals(), Trainer.__init__.__kwdefaults__)
        fast = arguments.check_batches("fast_dev_run", fast_dev_run)
        self.barebones = arguments.check_bool("barebones", barebones)
        if barebones:
            arguments.refuse_with_barebones(
                fast_dev_run=fast,
                logger=logger,
                enable_checkpointing=enable_checkpointing,
                enable_progress_bar=enable_progress_bar,
                enable_model_summary=enable_model_summary,
                enable_report=enable_report,
                num_sanity_val_steps=num_sanity_val_steps,
                log_every_n_steps=log_every_n_steps,
                detect_anomaly=detect_anomaly,
                profiler=profiler,
            )
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = enable_report = False
            num_sanity_val_steps = log_every_n_steps = 0
        if max_epochs is None:
            max_epochs = 1000 if max_steps == -1 and max_time is None else -1
        self.fast_dev_run = fast_dev_run
        self.max_epochs = 1 if fast else arguments.check_int("max_epochs", max_epochs, -1)
        self.max_steps = fast or arguments.check_int("max_steps", max_steps, -1)
        self.min_epochs = arguments.check_int("min_epochs", min_epochs or 0, 0)
        self.min_steps = None if min_steps is None else arguments.check_int("min_steps", min_steps, 0)
        if not fast:
            arguments.check_bounds("epochs", self.min_epochs, self.max_epochs)
            arguments.check_bounds("steps", self.min_steps or 0, self.max_steps)
        self.max_seconds = arguments.seconds("max_time", max_time)
        self.grace_seconds = arguments.seconds("grace", grace)
        self.limit_train_batches = fast or arguments.check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = fast or arguments.check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = fast or arguments.check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = fast or arguments.check_limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = arguments.check_limit("overfit_batches", overfit_batches)
        if self.overfit_batches and not fast:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        self.val_check_seconds: float | None = None
        if isinstance(val_check_interval, str | timedelta | Mapping):
            self.val_check_seconds = None if fast else arguments.seconds("val_check_interval", val_check_interval)
            val_check_interval = None
        self.val_check_interval = 1.0 if fast else arguments.check_interval("val_check_interval", val_check_interval)
        epochs = 1 if fast else check_val_every_n_epoch
        interval = self.val_check_interval if self.val_check_seconds is None else None
        self.check_val_every_n_epoch = arguments.check_epochs("check_val_every_n_epoch", epochs, interval)
        sanity = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.num_sanity_val_steps = 0 if fast else arguments.check_int("num_sanity_val_steps", sanity, -1)
        every = 50 if log_every_n_steps is None else log_every_n_steps
        self.log_every_n_steps = arguments.check_int("log_every_n_steps", every, 0)
        self.gradient_clip_val = arguments.check_clipping("gradient_clip_val", gradient_clip_val)
        self.gradient_clip_algorithm = gradient_clip_algorithm  # None is "norm"
        choose("gradient_clip_algorithm", gradient_clip_algorithm or "norm", ("norm", "value"))
        self.inference_mode = arguments.check_bool("inference_mode", inference_mode)
        self.use_distributed_sampler = arguments.check_bool("use_distributed_sampler", use_distributed_sampler)
        every = reload_dataloaders_every_n_epochs
        self.reload_dataloaders_every_n_epochs = arguments.check_int("reload_dataloaders_every_n_epochs", every, 0)
        self.detect_anomaly = arguments.check_bool("detect_anomaly", detect_anomaly)
        self.enable_autolog_hparams = arguments.check_bool("enable_autolog_hparams", enable_autolog_hparams)
        precision, sync_batchnorm = arguments.unpack_plugins(plugins, precision, sync_batchnorm)
        self.default_root_dir = arguments.check_directory("default_root_dir", default_root_dir)
        self.on_nonfinite = choose("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
        arguments.set_determinism(deterministic, benchmark)
        arguments.set_matmul_precision(float32_matmul_precision)
        self.accelerator = Accelerator(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            mixed_precision=precision,
            gradient_accumulation_steps=arguments.check_int("accumulate_grad_batches", accumulate_grad_batches, 1),
            spread=True,
            dynamo_plugin=arguments.parse_compilation(compile),
            timeout=timeout,
        )
        if self.accelerator.watchdog is not None:
            self.accelerator.watchdog.follow(self, locate, find_directory)
        arguments.set_sync_batchnorm(self.accelerator.strategy, sync_batchnorm)
        self.profiler = choose_profiler(profiler)
        self.profiled: Profiled | None = None
        self.loggers = choose_loggers(logger, self.default_root_dir, silent=bool(fast))
        self.callbacks = choose_callbacks(
            callbacks,
            checkpointing=enable_checkpointing,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            report=enable_report,
            in_folder=any(configured_logger.save_dir for configured_logger in self.loggers),
            collects_garbage=self.accelerator.num_processes > 1
            and self.accelerator.device.type == "cuda"
            and not barebones,
        )
        # Scripts read their paths; they are never called.
        self.idle_callbacks = set_aside(self.callbacks) if fast else []
        self.history = History(self.accelerator.cursor)
        self.logbook = Logbook(self.accelerator.world, self.accelerator.data_world, self.loggers, self.history)
        self.progress = Progress()
        self.checkpointer = TrainerCheckpointer(self)
        graphs = self.accelerator.dynamo_plugin.uses_cuda_graphs(self.accelerator.device)
        self.new_metrics = MutedMetrics if barebones else partial(Metrics, copies=graphs)
        self.metrics = self.new_metrics(training=True)
        self.config: str | None = None  # the run's configuration as YAML, where it has one; it goes into checkpoints
        self.resume_command: str | None = None  # the shell command that resumes the run, where one started it
        self.should_stop = self.interrupted = self.sanity_checking = False
        self.preemption = Preemption(self.accelerator, self.grace_seconds)
        self.decided = ""
        self.evaluation_batch = 0
        self.evaluation_total: int | None = None
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        # Of the stage that runs, or ran last.
        self.stage: str | None = None
        self.latest_stage: str | None = None
        self.status = TrainerStatus.INITIALIZING
        self.task: TaskModule | None = None
        self.datamodule: DataModule | None = None
        self.hooks: Hooks | None = None
        self.sources: Sources | None = None
        self.ckpt_path: AnyPath | None = None
        self.opened_checkpoint: OpenCheckpoint | None = None  # that of ckpt_path, until all is restored
        self.last_step: LastStep | None = None
        self.steps: Steps | None = None

    # -- entry points --------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        schedule: str | None = None,
    ) -> None:
        """Train.

        Args:
            model: The task.
            train_dataloaders: The training loader, or a data module; a dict, list or tuple of loaders is read at once.
            val_dataloaders: The validation loader, or several.
            datamodule: Instead of loaders.
            ckpt_path: A checkpoint to go on from: a path; ``"last"``, the newest that is intact; ``"best"``; or
                ``"auto"``, as ``"last"``, or a fresh start where there is none.
            weights_only: Accepted for Lightning's signature; a checkpoint never holds anything but data.
            schedule: Whose learning rates and schedule hold after a resume: ``"saved"``, those of the checkpoint, or
                ``"script"``, those that ``configure_optimizers`` returns, as they are after as many steps. Default: the
                saved ones, with a warning if the script's are others.

        Raises:
            ValueError: For a ``schedule`` without a ``ckpt_path``, and whatever the run itself raises.
        """
        warn_of_code(weights_only)
        if check_schedule(schedule) is not None and ckpt_path is None:
            raise ValueError(f"schedule={schedule!r} is for a resume: give ckpt_path too, or leave it out.")
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        began = time.time()
        stage = Stage(self, "fit", model, loaders, datamodule, ckpt_path)
        with self.preemption.watching():
            stage.run(Fit(self, schedule).run)
        RunSummary(self).announce_end(began)

    def validate(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation; returns the logged values, one dict per loader.

        Args:
            model: The task; by default the one of the last ``fit``, at its best checkpoint.
            dataloaders: The loader, several, or a data module.
            ckpt_path: A checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
            verbose: Print the values.
            datamodule: Instead of loaders.
            weights_only: See `fit`.
        """
        warn_of_code(weights_only)
        return self._measure("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run the test; arguments and result as of `validate`."""
        warn_of_code(weights_only)
        return self._measure("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Return ``predict_step``'s result for each batch of all processes, in the dataset's order, on each process.

        Args:
            model: The task; by default the one of the last ``fit``, at its best checkpoint.
            dataloaders: The loader, several (then the result is a list of lists), or a data module.
            datamodule: Instead of loaders.
            return_predictions: False keeps nothing, for streams that a callback writes away.
            ckpt_path: A checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
            weights_only: See `fit`.
        """
        warn_of_code(weights_only)
        keep = return_predictions is not False
        stage = Stage(self, "predict", model, {"predict": dataloaders}, datamodule, ckpt_path)
        with self.preemption.watching():
            evaluation = stage.run(partial(self._evaluate, "predict", keep))
        return predictions_in_order(evaluation, self.accelerator.data_world) if keep else None

    def _measure(
        self, stage: str, model: TaskModule | None, loaders: Any, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        by_kind = {KIND_OF_STAGE[stage]: loaders}
        evaluation = Stage(self, stage, model, by_kind, datamodule, ckpt_path)
        with self.preemption.watching():
            metrics = evaluation.run(partial(self._evaluate, stage, False)).metrics
        if verbose:
            self.print(describe_results(stage, metrics))
        return metrics

    def _evaluate(self, stage: str, keep: bool, task: TaskModule, hooks: Hooks, sources: Sources) -> Any:
        kind = KIND_OF_STAGE[stage]
        if self.opened_checkpoint is not None:
            self.checkpointer.restore_datamodule(self.opened_checkpoint)
        if getattr(self, f"limit_{kind}_batches") == 0:
            return Evaluation([], [])
        loaders = sources.evaluation(kind)
        if not loaders:
            raise ValueError(f"{stage} needs a loader: pass one or a datamodule, or give the task a {kind}_dataloader.")
        check_step(task, stage)
        self.accelerator.prepare_model(task, evaluation_mode=True, by_parts=True)
        if self.opened_checkpoint is not None:
            self.checkpointer.load_weights(task, self.opened_checkpoint)
        return EvaluationLoop(self, task, hooks, loaders, stage, within_fit=False, keep_predictions=keep).run()

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        trainable_only: bool = False,
        blocking: bool = True,
        also: Sequence[str | Path] = (),
    ) -> None:
        """Save the run as it is between two optimizer steps. Call it on all processes.

        Args:
            filepath: The checkpoint, a directory.
            weights_only: The task's weights and hyperparameters only.
            trainable_only, blocking, also: See `Accelerator.save_state`.
        """
        if self.task is None:
            raise ValueError("save_checkpoint needs a task: call fit, or another stage, first.")
        with self.preemption.holding_interrupts():
            self.checkpointer.save(self.task, [filepath, *also], weights_only, trainable_only, blocking)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank zero, beside the progress bar."""
        bar = self.progress_bar_callback
        if self.is_global_zero:
            (print if bar is None or self.stage is None else bar.print)(*args, **kwargs)

    # -- what runs, on which processes ---------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """True on rank zero."""
        return self.accelerator.is_main_process

    @property
    def received_sigterm(self) -> bool:
        """True once this process got a SIGTERM in the latest ``fit``."""
        return self.preemption.caught is signal.SIGTERM

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def strategy(self) -> Strategy:
        """How the model lies on the processes."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.accelerator.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaler of float16, where one is in use."""
        return self.accelerator.scaler

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The task's optimizers."""
        return [prepared.optimizer for prepared in self.accelerator.optimizers]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return the context to build a model in where and as it will be trained; see `Accelerator.init_module`.

        ``configure_model`` runs in it by itself.

        Args:
            empty_init: Leave parameters without values, as a checkpoint will be loaded.
        """
        return self.accelerator.init_module(bool(empty_init))

    # -- how far the run is --------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch being trained; once training is over, the epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps that really happened."""
        return self.progress.step

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of an epoch, of this process; None where that is unknown, or nothing is trained."""
        if self.sources is None or (self.stage != "fit" and not self.sources.has_train):
            return None
        return self.sources.train.length

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that the whole run will take; infinite where nothing limits it."""
        batches = self.num_training_batches
        if self.max_epochs == -1 or batches is None:
            return self.max_steps if self.max_steps != -1 else float("inf")
        schedule = next((c for c in self.callbacks if isinstance(c, GradientAccumulationScheduler)), None)
        if schedule is not None:
            steps = schedule.steps(batches, self.max_epochs)
        else:
            steps = -(-batches // self.accelerator.gradient_accumulation_steps) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def has_validation(self) -> bool:
        """True if ``fit`` validates: a loader that is not empty, a ``validation_step``, and no limit of zero."""
        if self.sources is None or self.task is None or self.limit_val_batches == 0:
            return False
        if not overrides(self.task, "validation_step"):
            return False
        return len(self.sources.evaluation("val")) > len(self.sources.empty("val"))

    # -- numbers and settings ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Everything that the stage logged: epoch values of all processes, and this process's newest step values.

        A name that is logged by step and by epoch has the step's value until the epoch is over.
        """
        latest = self.metrics.latest()
        values = {**latest, **self.logbook.callback_values, **latest}  # the task's own come first, as in Lightning
        if self.stage == "fit" and not self.progress.epoch_is_trained:
            evaluation = () if self.metrics.evaluation is None else self.metrics.evaluation.entries
            newer = self.logbook.watch.just_measured(self).union(entry.name for entry in evaluation)
            values |= {name: value for name, value in self.metrics.latest_of_both().items() if name not in newer}
        return tensors_by_name(values)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows. Waits for the device."""
        return {name: float(value) for name, value in self.collect_bar_values().items()}

    def collect_bar_values(self) -> dict[str, Any]:
        """Return what the progress bar shows, still on the device."""
        evaluation = {} if self.metrics.evaluation is None else self.metrics.evaluation.bar_values()
        return {**self.logbook.bar_values, **self.metrics.bar_values(), **evaluation}

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The run's folder: the first logger's, or the one that ``fit`` has made. No process has to ask another."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), self.logbook.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """The flags as they hold at the moment, by name, where they are plain values."""
        settings: dict[str, Any] = {"strategy": self.strategy.name, "device": str(self.accelerator.device)}
        settings |= {"num_nodes": self.num_nodes, "devices": self.num_devices, "precision": self.precision}
        settings["loggers"] = ", ".join(type(logger).__name__ for logger in self.loggers) or None
        settings["callbacks"] = ", ".join(type(callback).__name__ for callback in self.callbacks) or None
        for field in fields(TrainerSettings):
            value = getattr(self, field.name, self.changed_flags.get(field.name, settings))
            if isinstance(value, int | float | str | None):
                settings[field.name] = value
        if self.val_check_seconds is not None:
            settings["val_check_interval"] = f"{self.val_check_seconds:g} s"
        settings["max_time"] = None if self.max_seconds is None else f"{self.max_seconds:g} s"
        settings["grace"] = None if self.grace_seconds is None else f"{self.grace_seconds:g} s"
        settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
        settings["benchmark"] = torch.backends.cudnn.benchmark
        return settings

    @property
    def changed_settings(self) -> set[str]:
        """The names in `settings` of the flags that were given another value than their default."""
        renamed = {"accelerator": "device", "logger": "loggers"}
        return {renamed.get(name, name) for name in self.changed_flags}

    # -- callbacks -----------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback, of those that save while all goes well; with ``fast_dev_run`` it is idle."""
        callbacks = self.checkpoint_callbacks or [c for c in self.idle_callbacks if isinstance(c, ModelCheckpoint)]
        return min(callbacks, key=lambda callback: isinstance(callback, OnExceptionCheckpoint), default=None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The early-stopping callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # -- for the loop and callbacks ------------------------------------------------------------------------------

    @contextmanager
    def logging_to(self, metrics: Metrics | None) -> Iterator[None]:
        """Inside, ``log`` of the task and of those in it goes to ``metrics``; None: it warns that it has no place."""
        assert self.task is not None
        before = self.task._metrics
        log_to(self.task, metrics)
        try:
            yield
        finally:
            log_to(self.task, before)

    def rewrap(self) -> None:
        """Let the strategy know that other parameters are trained now. Between two steps, on all processes."""
        if self.task is not None and self.steps is not None:
            self.steps.use(wrap(self, self.task))

    def update_train_epoch_values(self) -> None:
        """Bring ``callback_metrics`` up to date with what training logged in this epoch."""
        self.logbook.update_epoch(self.metrics)
        self.logbook.note_epoch(self.progress.step)
