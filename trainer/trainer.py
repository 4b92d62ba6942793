"""`Trainer`: runs a task through training, validation, testing and prediction."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# The rooms import their files on first use, so that the import of this class does not wait for all of them.
from .. import callbacks, engine, strategies
from ..callbacks import Callback
from ..common.validation import Limit, WrongTypeError, choose
from ..engine import checkpoint, optim
from ..engine.profilers import Profiler, choose_profiler
from ..loggers import Logger
from ..strategies import report_uncaught
from ..strategies.distributed import Devices
from . import arguments, checkpointing, core, logging, loop
from .copies import Copyable
from .default_callbacks import choose_callbacks, choose_loggers, drop_idle
from .function_ranks import plan_ranks
from .lightning_aliases import LightningAliases
from .states import TrainerStatus
from .watched import find_directory, locate

if TYPE_CHECKING:
    from ..engine import Metrics
    from ..engine.checkpoint import OpenCheckpoint
    from .checkpointing import LastStep
    from .core import DataModule, SchedulerConfig, TaskModule
    from .loop import Hooks, Sources, Steps
    from .profiling import Profiled


class Trainer(LightningAliases, Copyable):
    """Trainer that runs a `TaskModule` and manages its devices, precision, checkpoints and logging.

    Most flags have the same names and meanings as in Lightning.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``) or ``"mps"``. Default: ``"auto"``, which is CUDA if
            available, else MPS, else the CPU.
        strategy: ``"single"``, ``"ddp"``, ``"fsdp"``, another registered name, a `Strategy`, or ``"auto"``, which is
            DDP for several processes and a single device otherwise. ``"ddp_spawn"``, ``"ddp_fork"`` and
            ``"ddp_notebook"`` run each stage in processes of its own. Default: ``"auto"``.
        devices: Devices on this machine, one per process: a number, ``-1`` for all GPUs, the indices of GPUs (a list or
            ``"0,2"``), or ``"auto"``. ``"auto"`` uses the processes that a launcher started. Without a launcher, it
            uses all GPUs if the accelerator is CUDA and Treadle can run the script again. Otherwise, it uses one
            process. Default: ``"auto"``.
        num_nodes: Number of machines. Default: 1.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``, ``"64-true"``, an
            alias such as ``16`` or ``"bf16"``, ``"float8"`` (needs ``treadle[quantization]``), or a `Precision`.
            Default: ``"32-true"``.
        logger: True (TensorBoard), False, a `Logger`, or several. Default: True.
        callbacks: A `Callback`, or several. Default: none.
        fast_dev_run: Run only this many batches in each stage, to find errors early. True runs one batch. Loggers,
            `ModelCheckpoint`, `EarlyStopping` and the report are disabled. Default: False.
        max_epochs: Epochs to train; -1 sets no limit. Default: 1000 if neither ``max_steps`` nor ``max_time`` is set,
            else no limit. The attribute of this name, like ``min_epochs``, is None until the first `fit` sets the
            default.
        min_epochs: Epochs that must complete before an early stop takes effect. Default: 0.
        max_steps: Optimizer steps to train; -1 sets no limit. Default: -1.
        min_steps: Optimizer steps that must complete before an early stop takes effect. Default: 0.
        max_time: Time limit for training: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments. Default: no limit.
        limit_train_batches: Maximum number (int) or fraction (float) of batches per epoch on each process. Default:
            all batches.
        limit_val_batches: Maximum number (int) or fraction (float) of batches of each validation dataloader. Default:
            all batches.
        limit_test_batches: Maximum number (int) or fraction (float) of batches of each test dataloader. Default: all
            batches.
        limit_predict_batches: Maximum number (int) or fraction (float) of batches of each prediction dataloader.
            Default: all batches.
        overfit_batches: Train and validate on this number (int) or fraction (float) of batches, in a fixed order.
            Overrides ``limit_train_batches`` and ``limit_val_batches``. Default: 0, which has no effect.
        val_check_interval: Interval between validations: a number of micro-batches (int), a fraction of an epoch
            (float), or a duration in any format that ``max_time`` accepts. Validations run between optimizer steps.
            Default: 1.0.
        check_val_every_n_epoch: Validate in every n-th epoch. If None, ``val_check_interval`` is counted across epochs.
            Default: 1.
        num_sanity_val_steps: Batches of each validation dataloader to run before training; -1 runs all. A resumed run
            omits this sanity check. Default: 2.
        log_every_n_steps: Interval, in optimizer steps, at which values of single steps are sent to the loggers; 0
            disables sending them. Default: 50.
        enable_checkpointing: Add a `ModelCheckpoint` if ``callbacks`` has no checkpoint callback. An
            `OnExceptionCheckpoint` does not count as one. Default: True.
        enable_progress_bar: Add a `TQDMProgressBar` if ``callbacks`` has no progress bar. Default: True.
        enable_model_summary: Add a `ModelSummary` if ``callbacks`` has none. Default: True.
        enable_report: Add a `RunReport` if ``callbacks`` has none. Default: True if a logger has a folder.
        accumulate_grad_batches: Micro-batches per optimizer step. Default: 1.
        step_micro_batches: Micro-batches per step over all processes, in place of ``accumulate_grad_batches``. Weights
            and losses have the same bits on any number of processes; see `Accelerator`. Default: None.
        gradient_clip_val: Maximum norm or absolute value of the gradients; None or 0 disables clipping. A dict has a
            limit for each part of the task, by the name of a submodule or parameter: ``{"backbone": 1.0, "*": 0.1}``,
            where ``"*"`` stands for all other parameters. Default: None.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``. Default: ``"norm"``.
        deterministic: Use only deterministic algorithms. ``"warn"`` allows operations that have no deterministic
            algorithm, with a warning. Default: torch's current setting.
        benchmark: Let cuDNN measure its algorithms and use the fastest. Default: False if ``deterministic`` is True or
            ``"warn"``, else torch's current setting.
        float32_matmul_precision: Precision of float32 matrix products in the whole process: ``"highest"``, ``"high"``
            or ``"medium"``. Default: torch's current setting.
        inference_mode: Run ``validate``, ``test`` and ``predict`` under ``torch.inference_mode`` instead of
            ``torch.no_grad``. Validation within ``fit`` always uses ``torch.no_grad``. Default: True.
        use_distributed_sampler: Shard the data over the processes; set it to False if your dataloaders already do so.
            Default: True.
        sync_batchnorm: Compute the statistics of BatchNorm layers over all processes (DDP only). Default: False.
        reload_dataloaders_every_n_epochs: Number of epochs between calls to the dataloader hooks; 0 calls them only
            once. Default: 0.
        detect_anomaly: Report the operation that produced a NaN gradient, at the cost of slower training. Default:
            False.
        barebones: Disable features that add overhead, such as logging, checkpoints and the progress bar. Default:
            False.
        profiler: Profile the actions of the loop, such as hooks, with ``"simple"``, ``"advanced"``, ``"pytorch"``,
            ``"events"`` or a `Profiler`. Default: no profiling.
        compile: Compile the model's modules; a dict sets arguments of ``torch.compile``. Default: False.
        plugins: A `Precision`, `CheckpointIO`, `SLURMEnvironment`, `ClusterEnvironment`, ``TorchSyncBatchNorm()``, or a
            list. Default: none.
        enable_autolog_hparams: Send hyperparameters to the loggers when ``fit`` begins. Default: True.
        default_root_dir: Folder for logs and checkpoints for which no other folder is set. Default: the working
            directory.
        on_nonfinite: Policy for a loss or a gradient that is not finite on at least one process. ``"raise"`` raises an
            error; on accelerators, it is raised one step later. ``"skip"`` skips the step on all processes.
            ``"ignore"`` disables the check. In precision ``"16-mixed"``, the loss scaler skips steps with non-finite
            gradients under every policy. Default: ``"raise"``.
        timeout: Maximum time that a rank may go without progress before the run is ended, in any format that
            ``max_time`` accepts. Default: see `Accelerator`.
        grace: Maximum time from a signal to the end of the stage, in any format that ``max_time`` accepts. After this
            time, all ranks exit, even if a save is incomplete. Default: no limit.
        unknown: Any other flag raises a TypeError.

    Attributes:
        accelerator: The `Accelerator` that the loop uses.
        progress: Counters of the run; see `Progress`.
        history: Curves of the logged values, and the time spent in each activity; see `History`.
        stop_requests: Who requests the end of the run. An `EarlyStopping` withdraws its request if the monitored value
            recovers before ``min_epochs`` and ``min_steps`` are reached.
        decided: Settings that the latest ``fit`` announced, as text; "" before the first ``fit``.

    Raises:
        TypeError, ValueError: If a flag is unknown, or a value is invalid or cannot be applied.
        SystemExit: If the constructor has run the script again in one process per device. It is raised once these
            processes have ended.

    Examples:
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> trainer = tl.Trainer(max_steps=2, accelerator="cpu", devices=1, barebones=True)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step
        2
    """

    @arguments.hide_unknown
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | strategies.Strategy = "auto",
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
        step_micro_batches: int | None = None,
        gradient_clip_val: float | dict[str, float] | None = None,
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
        report_uncaught()  # also errors in the flags
        self.changed_flags = arguments.select_changed_flags(locals(), Trainer.__init__.__kwdefaults__)
        fast = arguments.check_batches("fast_dev_run", fast_dev_run)
        self.barebones = arguments.check_bool("barebones", barebones)
        if barebones:
            arguments.refuse_with_barebones(self.changed_flags)
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = enable_report = False
            num_sanity_val_steps = log_every_n_steps = 0
        self.fast_dev_run = True if fast_dev_run == 1 else fast_dev_run
        self.max_epochs = 1 if fast else arguments.check_count("max_epochs", max_epochs, -1)
        self.max_steps = fast or arguments.check_int("max_steps", max_steps, -1)
        self.min_epochs = arguments.check_count("min_epochs", min_epochs, 0)
        self.min_steps = arguments.check_count("min_steps", min_steps, 0)
        if not fast:
            arguments.check_bounds("epochs", self.min_epochs, self.max_epochs)
            arguments.check_bounds("steps", self.min_steps, self.max_steps)
        self.max_seconds = arguments.seconds("max_time", max_time)
        self.grace_seconds = arguments.seconds("grace", grace)
        self.limit_train_batches = fast or arguments.check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = fast or arguments.check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = fast or arguments.check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = fast or arguments.check_limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = arguments.check_limit("overfit_batches", overfit_batches)
        if self.overfit_batches and not fast:
            arguments.warn_of_overridden_limits(self.overfit_batches, limit_train_batches, limit_val_batches)
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        self.val_check_seconds: float | None = None
        if isinstance(val_check_interval, str | timedelta | Mapping):
            self.val_check_seconds = None if fast else arguments.seconds("val_check_interval", val_check_interval)
            val_check_interval = None
        self.val_check_interval = 1.0 if fast else arguments.check_val_interval(val_check_interval, max_steps)
        epochs = 1 if fast else check_val_every_n_epoch
        interval = self.val_check_interval if self.val_check_seconds is None else None
        self.check_val_every_n_epoch = arguments.check_epochs("check_val_every_n_epoch", epochs, interval)
        sanity = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        sanity = 0 if fast else arguments.check_int("num_sanity_val_steps", sanity, -1)
        self.num_sanity_val_steps = float("inf") if sanity == -1 else sanity
        every = 50 if log_every_n_steps is None else log_every_n_steps
        self.log_every_n_steps = arguments.check_int("log_every_n_steps", every, 0)
        self.gradient_clip_val = arguments.check_clipping("gradient_clip_val", gradient_clip_val)
        self.gradient_clip_algorithm = core.check_clip_algorithm(gradient_clip_algorithm)
        self.inference_mode = arguments.check_bool("inference_mode", inference_mode)
        self.use_distributed_sampler = arguments.check_bool("use_distributed_sampler", use_distributed_sampler)
        every = reload_dataloaders_every_n_epochs
        self.reload_dataloaders_every_n_epochs = arguments.check_int("reload_dataloaders_every_n_epochs", every, 0)
        self.detect_anomaly = arguments.check_bool("detect_anomaly", detect_anomaly)
        self.enable_autolog_hparams = arguments.check_bool("enable_autolog_hparams", enable_autolog_hparams)
        self._plugged = arguments.unpack_plugins(plugins, precision, sync_batchnorm, strategy)
        if isinstance(self._plugged.environment, strategies.ClusterEnvironment):
            self._plugged.environment.export(accelerator, devices, num_nodes)
        self.default_root_dir = arguments.check_directory("default_root_dir", default_root_dir)
        self.on_nonfinite = choose("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
        arguments.set_determinism(deterministic, benchmark)
        arguments.set_matmul_precision(float32_matmul_precision)
        place: dict[str, Any] = {"strategy": strategy, "accelerator": accelerator, "devices": devices}
        self.function_ranks, place = plan_ranks(place | {"num_nodes": num_nodes}, self.changed_flags)
        self.build_accelerator = partial(
            engine.Accelerator,
            **place,
            mixed_precision=strategies.Precision.parse(self._plugged.precision),
            gradient_accumulation_steps=arguments.check_int("accumulate_grad_batches", accumulate_grad_batches, 1),
            step_micro_batches=step_micro_batches,
            spread=True,
            dynamo_plugin=arguments.parse_compilation(compile),
            timeout=timeout,
        )
        self.sync_batchnorm = self._plugged.sync_batchnorm
        self.connect()
        self.profiler = choose_profiler(profiler)
        self.profiled: Profiled | None = None
        loggers = choose_loggers(logger, self.default_root_dir, silent=bool(fast))
        self.callbacks = choose_callbacks(
            callbacks,
            checkpointing=enable_checkpointing,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            report=enable_report,
            in_folder=any(configured_logger.save_dir for configured_logger in loggers),
            collects_garbage=self.accelerator.num_processes > 1
            and self.accelerator.device.type == "cuda"
            and not barebones,
        )
        self.history = logging.History(self.accelerator.cursor)
        self.logbook = logging.Logbook(self.accelerator.world, self.accelerator.data_world, loggers, self.history)
        self.progress = loop.Progress()
        self.new_metrics = logging.choose_metrics(self.accelerator, barebones)
        self.metrics = self.new_metrics(training=True)
        self.config: str | None = None  # the run's configuration as YAML, if any; saved in checkpoints
        self.resume_command: str | None = None  # the shell command that resumes the run, if one started it
        self.stop_requests: set[object] = set()
        self.interrupted = self.sanity_checking = False
        self.decided = ""
        self.evaluation_batch = 0
        self.evaluation_total: int | None = None
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        # State of the current or last stage. `task`, `hooks` and `sources` are None until a stage has set them up.
        self.stage: str | None = None
        self.latest_stage: str | None = None
        self.status = TrainerStatus.INITIALIZING
        self.task: TaskModule = None  # type: ignore[assignment]
        self.datamodule: DataModule | None = None
        self.hooks: Hooks = None  # type: ignore[assignment]
        self.sources: Sources = None  # type: ignore[assignment]
        self.ckpt_path: str | None = None
        self.opened_checkpoint: OpenCheckpoint | None = None  # of ckpt_path, until it is restored
        self.last_step: LastStep | None = None
        self.steps: Steps | None = None

    def connect(self) -> None:
        """Create the objects that belong to this process, such as the `Accelerator`."""
        self.accelerator = self.build_accelerator()
        if self.accelerator.watchdog is not None:
            self.accelerator.watchdog.follow(self, locate, find_directory)
        arguments.set_sync_batchnorm(self.strategy, self.sync_batchnorm)
        self.strategy.checkpoint_io = self._plugged.writer
        accumulation, watchdog = self.accelerator.accumulation, self.accelerator.watchdog
        self.preemption = engine.Preemption(accumulation, watchdog, self.grace_seconds, self._plugged.requeue_signal)
        self.checkpointer = checkpointing.TrainerCheckpointer(self)
        if "logbook" in vars(self):  # in a copy
            self.logbook.move_to(self.accelerator)

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
        """Train a task, from the start or from a checkpoint.

        Args:
            model: Task to train.
            train_dataloaders: The training dataloader or a data module. Dataloaders in a dict, list or tuple are
                combined by a `CombinedLoader` in mode ``"max_size_cycle"``. Default: the result of the data module's
                ``train_dataloader`` or, failing that, the task's.
            val_dataloaders: The validation dataloader, or several. Default: the result of the data module's
                ``val_dataloader`` or, failing that, the task's.
            datamodule: Data module to use instead of dataloaders.
            ckpt_path: Checkpoint to resume from: a path, ``"last"`` (the latest intact checkpoint), ``"best"`` or
                ``"auto"``. ``"auto"`` resumes from the latest intact checkpoint of this run, or starts from scratch if
                there is none. Default: a fresh start.
            weights_only: Ignored; code stored in a checkpoint is never executed.
            schedule: Source of the learning rates and schedules of a resumed run: ``"saved"`` for the checkpoint, or
                ``"script"`` for ``configure_optimizers``. With ``"script"``, the schedules are advanced to the
                position of the saved ones. Default: ``"saved"``, with a warning if the script configures its optimizers
                or schedules differently.

        Raises:
            TypeError, ValueError: If an argument is invalid, or the task, its data or the flags prevent training.
            Preempted: If a signal, such as SIGTERM, ends the run.
            KeyboardInterrupt: If Ctrl-C ends the run.
        """
        if optim.check_schedule(schedule) is not None and ckpt_path is None:
            raise ValueError(
                f"schedule={schedule!r} applies only to a resumed run. Set ckpt_path too, or remove schedule."
            )
        if self.function_ranks is not None:
            more = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "schedule": schedule}
            more |= {"datamodule": datamodule, "ckpt_path": ckpt_path, "weights_only": weights_only}
            return self.function_ranks.run(self, "fit", model, **more)
        more = {} if schedule is None else {"schedule": schedule}
        self._fit_impl(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only, **more)

    def _fit_impl(
        self, model: TaskModule, train: Any, val: Any, data: Any, path: Any, code: bool | None, schedule: Any = None
    ) -> None:
        """Train in this process. Lightning's name and order of arguments: tests of its users replace this method."""
        core.warn_of_code(code)
        began = time.time()
        stage = loop.Stage(self, "fit", model, {"train": train, "val": val}, data, path)
        with self.preemption.watching():
            stage.run(loop.Fit(self, schedule).work)
        loop.announce_end(self, began)

    def validate(
        self,
        model: TaskModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate a task and return the logged values.

        Args:
            model: Task to validate. Default: the task of the last stage, with the weights of its best checkpoint, if
                any.
            dataloaders: One dataloader, several, or a data module. Default: those of the last stage's data module if
                ``model`` is None, else those of the task.
            ckpt_path: Checkpoint to load weights from: a path, ``"last"`` or ``"best"``. If there is no last one, the
                current weights of ``model`` are used, with a warning. Default: see ``model``.
            verbose: Print the values. Default: True.
            datamodule: Data module to use instead of dataloaders.
            weights_only: See `fit`.

        Returns:
            A list with one dict of logged values per dataloader. It is empty if ``limit_val_batches`` is 0.

        Raises:
            TypeError, ValueError: If an argument is invalid, or the stage cannot run with the task and its data.
            Preempted, KeyboardInterrupt: If a signal or Ctrl-C ends the stage.
        """
        core.warn_of_code(weights_only)
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
        """Test a task and return the logged values.

        Args:
            model: Task to test. Default: see `validate`.
            dataloaders: See `validate`.
            ckpt_path: See `validate`.
            verbose: Print the values. Default: True.
            datamodule: See `validate`.
            weights_only: See `fit`.

        Returns:
            A list with one dict of logged values per dataloader. It is empty if ``limit_test_batches`` is 0.

        Raises:
            TypeError, ValueError, Preempted, KeyboardInterrupt: See `validate`.
        """
        core.warn_of_code(weights_only)
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
        """Predict with a task and return the results of ``predict_step``.

        Args:
            model: Task to predict with. Default: see `validate`.
            dataloaders: See `validate`. With several dataloaders, the result is a list of lists.
            datamodule: See `validate`.
            return_predictions: False discards the results. Default: True.
            ckpt_path: See `validate`.
            weights_only: See `fit`.

        Returns:
            A list with one result for each batch of all processes, on the CPU. The list is the same on every process.
            If Treadle shards the data, the results are in the order of the dataloader. None if ``return_predictions``
            is False; an empty list if ``limit_predict_batches`` is 0.

        Raises:
            TypeError, ValueError, Preempted, KeyboardInterrupt: See `validate`.
        """
        core.warn_of_code(weights_only)
        if self.function_ranks is not None:
            more = {"return_predictions": return_predictions, "ckpt_path": ckpt_path, "datamodule": datamodule}
            return self.function_ranks.run(self, "predict", model, dataloaders=dataloaders, **more)
        keep = return_predictions is not False
        stage = loop.Stage(self, "predict", model, {"predict": dataloaders}, datamodule, ckpt_path)
        with self.preemption.watching():
            evaluation = stage.run(partial(self._evaluate, "predict", keep))
        return loop.predictions_in_order(evaluation, self.accelerator.data_world) if keep else None

    def _measure(
        self, stage: str, model: TaskModule | None, loaders: Any, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        if self.function_ranks is not None:
            more = {"datamodule": datamodule, "ckpt_path": ckpt_path, "verbose": verbose}
            return self.function_ranks.run(self, stage, model, dataloaders=loaders, **more)
        evaluation = loop.Stage(self, stage, model, {loop.KIND_OF_STAGE[stage]: loaders}, datamodule, ckpt_path)
        with self.preemption.watching():
            metrics = evaluation.run(partial(self._evaluate, stage, False)).metrics
        if verbose:
            self.print(loop.describe_results(stage, metrics))
        return metrics

    def _evaluate(self, stage: str, keep: bool, task: TaskModule, hooks: Hooks, sources: Sources) -> loop.Work:
        kind = loop.KIND_OF_STAGE[stage]
        if self.opened_checkpoint is not None:
            self.checkpointer.restore_datamodule(self.opened_checkpoint)
        if getattr(self, f"limit_{kind}_batches") == 0:
            return nullcontext(lambda: loop.Evaluation([], []))
        loaders = sources.evaluation(kind)
        if not loaders:
            raise WrongTypeError(
                f"{stage} has no dataloader. Pass dataloaders or a datamodule, or define {kind}_dataloader in the task."
            )
        loop.check_step(task, stage)
        manual = not task.automatic_optimization
        place = partial(
            self.accelerator.prepare_model, task, evaluation_mode=True, manual_optimization=manual, by_parts=True
        )
        loop.place_and_load(self, task, place)
        evaluation = loop.EvaluationLoop(self, task, hooks, loaders, stage, within_fit=False, keep_predictions=keep)
        return nullcontext(evaluation.run)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        trainable_only: bool = False,
        blocking: bool = True,
        also: Sequence[str | Path] = (),
        format: str | None = None,
    ) -> None:
        """Save a checkpoint of the task and, unless ``weights_only`` is True, of the run. Call it on all processes.

        Args:
            filepath: Path or URL of the checkpoint.
            weights_only: Omit all state that is needed only to resume the run, such as the optimizer state. After a
                stage other than ``fit``, this state is always omitted. Default: False.
            trainable_only: Omit frozen weights; see `Accelerator.save_state`. Default: False.
            blocking: Wait until the checkpoint is written; see `Accelerator.save_state`. Default: True.
            also: Further paths for copies of the checkpoint; see `Accelerator.save_state`. Default: none.
            format: ``"file"`` or ``"directory"``. Default: a file where one is possible; see `ModelCheckpoint`.

        Raises:
            ValueError: If there is no task, or the run cannot be saved at this moment; see also
                `Accelerator.save_state`.
            TypeError, OSError: See `Accelerator.save_state`.
        """
        task = self.checkpointer.find_task()
        if task is None:
            raise ValueError(
                "save_checkpoint needs a task. Call fit or another stage first, or trainer.strategy.connect(task)."
            )
        self.task = task
        checkpoint.check_places("save_checkpoint", {"filepath": filepath}, also)
        with self.preemption.holding_interrupts():
            self.checkpointer.save(self.task, [filepath, *also], weights_only, trainable_only, blocking, format)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank zero, without disturbing the progress bar.

        Args:
            args: Positional arguments of ``print``.
            kwargs: Keyword arguments of ``print``.
        """
        bar = self.progress_bar_callback
        if self.is_global_zero:
            (print if bar is None or self.stage is None else bar.print)(*args, **kwargs)

    # -- task and processes --------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """True if this process is rank zero."""
        return self.accelerator.is_main_process

    @property
    def received_sigterm(self) -> bool:
        """True if, in the latest stage, SIGTERM was the first signal that asked this process to end."""
        return self.preemption.caught is signal.SIGTERM

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """Rank of this process in the run."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def strategy(self) -> strategies.Strategy:
        """Strategy that distributes the model over the processes."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """Name of the run's precision, such as ``"bf16-mixed"``."""
        return self.accelerator.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler of float16 precision; None if the run uses none."""
        return self.accelerator.scaler

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the task, unwrapped. May be set to other optimizers of the same parameters."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.strategy.optimizers = optimizers

    # -- progress ------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch; after training, the number of completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken, not counting skipped steps; see `Progress`."""
        return self.progress.step

    @property
    def num_training_batches(self) -> int | float:
        """Number of micro-batches per epoch on this process; infinite if it is unknown or nothing is trained."""
        if self.sources is None:
            return float("inf")
        loader = self.sources.train if self.stage == "fit" else self.sources.prepared_train
        length = None if loader is None else loader.length
        return float("inf") if length is None else length

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total optimizer steps until ``max_epochs`` or ``max_steps`` is reached; infinite if unlimited or unknown."""
        batches = self.num_training_batches
        if self.max_epochs == -1 or not isinstance(batches, int):
            return self.max_steps if self.max_steps != -1 else float("inf")
        steps = -(-batches // self.accelerator.gradient_accumulation_steps) * self.max_epochs
        for schedule in (c for c in self.callbacks if isinstance(c, callbacks.GradientAccumulationScheduler)):
            steps = schedule.estimate_steps(self.sources.train, self.max_epochs)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def has_validation(self) -> bool:
        """True if the task has a ``validation_step`` and a validation dataloader that is not known to be empty."""
        if self.sources is None or self.task is None or self.limit_val_batches == 0:
            return False
        if not core.overrides(self.task, "validation_step"):
            return False
        return len(self.sources.evaluation("val")) > len(self.sources.empty("val"))

    @property
    def should_stop(self) -> bool:
        """Set to True to end the run after an optimizer step, once ``min_epochs`` and ``min_steps`` are reached."""
        return bool(self.stop_requests)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            self.stop_requests.add("user")
        else:
            self.stop_requests.clear()

    # -- numbers and settings ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Latest logged values of the stage, by name, and values that were written into this dict.

        Values of single steps may be those of this process only. A number that was written can be monitored. Where
        ranks wrote different numbers under a name, monitors use that of the lowest rank.
        """
        return logging.collect_callback_metrics(self)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values that the progress bar shows. Reading them synchronizes with the device."""
        return {name: float(value) for name, value in self.collect_bar_values().items()}

    def collect_bar_values(self) -> dict[str, Any]:
        """Return the values that the progress bar shows, still on the device."""
        evaluation = {} if self.metrics.evaluation is None else self.metrics.evaluation.bar_values()
        return {**self.logbook.bar_values, **self.metrics.bar_values(), **evaluation}

    @property
    def loggers(self) -> list[Logger]:
        """Loggers of the run. Set them between two stages."""
        return self.logbook.loggers

    @loggers.setter
    def loggers(self, loggers: Iterable[Logger] | None) -> None:
        self.logbook.loggers = choose_loggers(list(loggers or ()), self.default_root_dir, silent=False)

    @property
    def logger(self) -> Logger | None:
        """First logger, or None. Setting it replaces all loggers."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str:
        """Folder of the first logger that has one; otherwise, the folder created for the run, or the default folder."""
        folders = (logger.log_dir for logger in self.loggers if logger.log_dir)
        return next(folders, self.logbook.folder or self.default_root_dir)

    @property
    def settings(self) -> dict[str, Any]:
        """Current settings as plain data, by name."""
        return arguments.describe_settings(self, Trainer.__init__.__kwdefaults__ or ())

    @property
    def changed_settings(self) -> set[str]:
        """Names of the flags that differ from their defaults, spelled as in `settings`."""
        renamed = {"accelerator": "device", "logger": "loggers"}
        return {renamed.get(name, name) for name in self.changed_flags}

    # -- callbacks -----------------------------------------------------------------------------------------------

    @property
    def active_callbacks(self) -> list[Callback]:
        """Callbacks whose hooks are called: all but those that a ``fast_dev_run`` disables."""
        return drop_idle(self.callbacks) if self.fast_dev_run else self.callbacks

    @property
    def checkpoint_callbacks(self) -> list[callbacks.ModelCheckpoint]:
        """All active `ModelCheckpoint` callbacks."""
        return [callback for callback in self.active_callbacks if isinstance(callback, callbacks.ModelCheckpoint)]

    @property
    def early_stopping_callbacks(self) -> list[callbacks.EarlyStopping]:
        """All active `EarlyStopping` callbacks."""
        return [callback for callback in self.active_callbacks if isinstance(callback, callbacks.EarlyStopping)]

    @property
    def progress_bar_callback(self) -> callbacks.ProgressBar | None:
        """First progress bar among the callbacks, or None."""
        return next((callback for callback in self.callbacks if isinstance(callback, callbacks.ProgressBar)), None)

    # -- for the loop and callbacks ------------------------------------------------------------------------------

    @contextmanager
    def logging_to(self, metrics: Metrics | None) -> Iterator[None]:
        """Return a context in which values that the task logs are sent to ``metrics``.

        Args:
            metrics: Destination; None makes ``log`` warn that it has no effect.
        """
        previous = self.task._metrics
        core.log_to(self.task, metrics)
        try:
            yield
        finally:
            core.log_to(self.task, previous)

    def rewrap(self) -> None:
        """Wrap the task with the strategy again after the set of trained parameters has changed.

        Call it between two steps, on all processes.
        """
        if self.task is not None and self.steps is not None:
            self.steps.use(loop.wrap(self, self.task))

    def update_train_epoch_values(self) -> None:
        """Update ``callback_metrics`` with the values that training logged in this epoch. Call it on all processes."""
        self.logbook.update_epoch(self.metrics)
        self.logbook.note_epoch(self.progress.step)
