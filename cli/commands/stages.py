"""`treadle fit`, `validate`, `test` and `predict`: commands that validate a configuration and run it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.command_results import fail, report
from ...common.messages import announce
from ...common.remote_path import RemotePath, as_path
from ...trainer.checkpointing import WORDS_FOR_CHECKPOINTS
from ...trainer.runs import CONFIG, RECORD
from ..config import COMMAND_LINE, ConfigError, format_path, hide_secrets, iterate_values, make_value
from .command_line import Options, format_usage, load_config, parse_options, print_on_rank_zero, report_error

if TYPE_CHECKING:
    from ...callbacks import Callback
    from ...trainer import Trainer
    from ...trainer.core import DataModule, TaskModule
    from ...trainer.runs import RunFolder
    from ..config import Config
    from ..config.instantiate import CheckedConfig


@dataclass
class Session:
    """Objects and result of a stage that was run from a command line.

    Attributes:
        data: The data module; None if the configuration has none.
        result: The return value of the Trainer's method, such as the metrics from ``validate``.
        folder: Path of the run's folder; None if the stage has none.
    """

    trainer: Trainer
    model: TaskModule
    data: DataModule | None
    result: Any
    folder: str | None = None


def run(
    stage: str,
    arguments: Sequence[str],
    program: str,
    model: type[TaskModule] | None = None,
    data: type[DataModule] | None = None,
    defaults: Mapping[str, Any] | None = None,
    keep: bool = True,
) -> Session | None:
    """Run a stage with the configuration that a command line specifies. Return None if only printing was requested.

    ``model`` and ``data`` are used unless the configuration names subclasses of them. With ``keep=False``, ``predict``
    does not return the predictions. Instead, it writes them to files, unless the configuration has a callback that may
    use them.

    Raises:
        ConfigError: If the command line or the configuration is invalid.
    """
    if (current_directory := os.getcwd()) not in sys.path:
        # As python -m does, so that it can name modules next to the configuration.
        sys.path.insert(0, current_directory)
    options = parse_options(arguments)
    if options.help == "":
        print_on_rank_zero(format_usage(stage, program))
        return None
    config = load_config(options, defaults)
    # torch is needed from here on; errors in the files themselves have been reported without waiting for it.
    if options.help is not None:
        from .config_help import describe_target, find_target

        print_on_rank_zero(
            describe_target(find_target(options.help, config.to_plain(), {"model": model, "data": data}), options.help)
        )
        return None
    from ..config.instantiate import check
    from .yaml_dump import dump_yaml

    checked = check(config, model, data)
    text = dump_yaml(checked.resolve_defaults(), config.secrets, f"{program}, with all defaults")
    if options.show:
        print_on_rank_zero(text.rstrip("\n"), {"config": text})
        return None
    try:
        return _execute(stage, program, checked, text, options, keep)
    except ConfigError as error:
        raise ConfigError(*(hide_secrets(problem, config.secrets) for problem in error.problems)) from error


def _execute(stage: str, program: str, checked: CheckedConfig, text: str, options: Options, keep: bool) -> Session:
    """Build the objects and run the stage. First, create the run folder and the Trainer, which may launch processes."""
    from ...engine import seed_everything
    from ...trainer import Trainer, as_callbacks
    from ..config.instantiate import locate_error

    if checked.seed is not None:
        seed_everything(checked.seed)
    flags = checked.build_flags()
    folder: RunFolder | None = None
    companion: Any = None
    with ExitStack() as stack:
        blamed_section = "run"
        try:
            if stage == "fit" and not flags["fast_dev_run"]:
                folder = stack.enter_context(_open_run_folder(checked, flags, options))
                if folder.companion is not None and (companion := _load_companion(folder)) is not None:
                    flags["callbacks"] = [*as_callbacks("callbacks", flags["callbacks"]), companion]
                flags = folder.flags(flags)
                folder.write_config(text)
            elif stage != "fit":
                flags["callbacks"] = _prepare_callbacks(options.from_run, flags)
                flags["logger"] = flags["logger"] or False  # the values are printed
            if stage == "predict" and not keep:
                flags["callbacks"] = _keep_predictions(flags["callbacks"], options.from_run)
            blamed_section = "trainer"
            trainer = Trainer(**flags)
        except ConfigError:
            raise
        except (ValueError, TypeError, OSError) as error:
            raise locate_error(checked.config, error, blamed_section) from error
        trainer.config = text
        if folder is not None:
            place = folder.path if isinstance(folder.path, RemotePath) else os.path.relpath(folder.path)
            trainer.resume_command = f"{program} --from-run {place} ckpt_path=auto"
        model, data = checked.build_task(), checked.build_datamodule()
        _refuse_saved_secrets(checked.config, {"model": model, "data": data})
        ckpt_path = checked.ckpt_path if stage == "fit" else _choose_weights(checked, options, trainer)
        if companion is not None and not trainer.checkpoint_callbacks:
            ckpt_path = None  # a prepared run that saves nothing starts over after an interruption
        stage_options: dict[str, Any] = {}
        if stage == "fit":
            stage_options["schedule"] = checked.schedule
        elif checked.config.find_source("schedule") == COMMAND_LINE:
            raise ConfigError(f"{COMMAND_LINE}: schedule applies to fit only, not to {stage}. Remove it.")
        if stage == "predict" and not keep:
            stage_options["return_predictions"] = False
        try:
            result = getattr(trainer, stage)(model, datamodule=data, ckpt_path=ckpt_path, **stage_options)
        except ValueError as error:
            if str(error).startswith(("ckpt_path=", "schedule=")):
                raise locate_error(checked.config, error) from error
            raise
        if companion is not None:
            companion.conclude()
        elif folder is not None and not trainer.interrupted:
            announce(_describe_next_steps(trainer, model, str(place), program))
    return Session(trainer, model, data, result, None if folder is None else str(folder.path))


def _load_companion(folder: RunFolder) -> Any:
    """Return the callback of the program that prepared the run, or None; see `RunFolder.prepare`."""
    module, _, name = str(folder.companion).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{folder.path / RECORD}: companion: {folder.companion!r} can't be imported ({error}). Install the package "
            "that prepared this run, or remove the entry."
        ) from error
    return function(folder)


def _describe_next_steps(trainer: Trainer, model: TaskModule, place: str, program: str) -> str:
    """Return commands that may follow a finished fit: show its curves, evaluate the model, train longer."""
    from ...trainer import TaskModule

    # The form in which commands name runs in runs/.
    run = place.removeprefix("runs/") if place.count("/") == 2 else place
    commands = {"curves": f"treadle runs show {run}"}
    if any(callback.best_model_path for callback in trainer.checkpoint_callbacks):
        if type(model).validation_step is not TaskModule.validation_step:
            commands["evaluate"] = f"{program.removesuffix(' fit')} validate --from-run {run}"
        limit = "max_steps" if trainer.max_steps != -1 else "max_epochs"
        if (value := getattr(trainer, limit)) > 0:
            commands["continue"] = f"{program} --from-run {run} ckpt_path=last trainer.{limit}={2 * value}"
    width = max(map(len, commands))
    return "\n".join(["next:", *(f"  {purpose:<{width}}  {command}" for purpose, command in commands.items())])


def _refuse_saved_secrets(config: Config, owners: Mapping[str, TaskModule | DataModule | None]) -> None:
    """Raise a ConfigError if hyperparameters, which are saved and logged, contain a secret."""
    for section, owner in owners.items():
        hyperparameters = make_value(owner.plain_hparams() if owner is not None else {}, "")
        for path, value in iterate_values(hyperparameters, (section,)):
            if isinstance(value.data, int | float | str) and hide_secrets(str(value.data), config.secrets) != str(
                value.data
            ):
                raise ConfigError(
                    f"{config.find_source(format_path(path))}: {format_path(path)} contains a secret, "
                    "which save_hyperparameters() would write to checkpoints and logs. Exclude it with "
                    f"save_hyperparameters(ignore={[path[1]]!r})."
                )


def _keep_predictions(callbacks: list[Callback], earlier: str | None) -> list[Callback]:
    """Return the callbacks, with a `PredictionWriter` added if none of them may use the predictions."""
    from ...callbacks import PredictionWriter

    if any(map(_can_take_predictions, callbacks)):
        return callbacks
    folder = as_path(earlier) if earlier is not None and (as_path(earlier) / CONFIG).is_file() else Path()
    return [*callbacks, PredictionWriter(str(folder / "predictions"))]


def _can_take_predictions(callback: Callback) -> bool:
    """Return whether a callback may use predictions. Of Treadle's callbacks, only writers and LambdaCallback may."""
    from ...callbacks import BasePredictionWriter, Callback

    hooks = ("on_predict_batch_end", "on_predict_epoch_end", "on_predict_end")
    if any(hook in vars(callback) for hook in hooks):
        return True
    counts = type(callback).__module__.startswith(f"{__name__.partition('.')[0]}.")
    if counts and not isinstance(callback, BasePredictionWriter):
        return False
    return any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)


def _choose_weights(checked: CheckedConfig, options: Options, trainer: Trainer) -> str | None:
    """Return the checkpoint to evaluate, from ``ckpt_path`` or the earlier run; None for the task's initial weights."""
    from ...common.messages import warn
    from ...engine.checkpoint import is_checkpoint

    source = checked.config.find_source("ckpt_path")
    if source == COMMAND_LINE:
        return checked.ckpt_path
    earlier = None if options.from_run is None else as_path(options.from_run)
    starts_from_one = earlier is not None and is_checkpoint(earlier)
    is_run = earlier is not None and (earlier / CONFIG).is_file()
    # The ckpt_path in the earlier run's own configuration is the checkpoint from which that run started.
    own_sources = () if earlier is None else (str(earlier / CONFIG), str(earlier))
    origin = source.rpartition(":")[0]
    is_start = any(origin == own or origin.endswith(f", {own}") for own in own_sources)
    if checked.ckpt_path is not None and not is_start:
        return checked.ckpt_path
    if starts_from_one:
        return options.from_run
    if is_run:
        return "best" if any(callback.monitor is not None for callback in trainer.checkpoint_callbacks) else "last"
    warn("ckpt_path is not set, so the task's initial weights are used.")
    return None


def _prepare_callbacks(earlier: str | None, flags: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks, configured to find ``last`` and ``best`` among the earlier run's checkpoints, if any."""
    from ...callbacks import ModelCheckpoint
    from ...trainer import as_callbacks
    from ...trainer.runs import CHECKPOINTS

    callbacks = as_callbacks("callbacks", flags["callbacks"])
    if earlier is not None and (as_path(earlier) / CHECKPOINTS).is_dir() and not flags["barebones"]:
        saves = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in saves:
            callback.dirpath = callback.dirpath or str(as_path(earlier) / CHECKPOINTS)
        if not saves and flags["enable_checkpointing"] is not False:
            callbacks.append(ModelCheckpoint(str(as_path(earlier) / CHECKPOINTS)))
    return callbacks


def _open_run_folder(
    checked: CheckedConfig, flags: Mapping[str, Any], options: Options
) -> AbstractContextManager[RunFolder, bool | None]:
    """Open a new run folder, or the earlier run's folder if that run is resumed."""
    from ...trainer.runs import RunFolder

    earlier, word = options.from_run, checked.ckpt_path
    if earlier is None or word not in WORDS_FOR_CHECKPOINTS:
        return _create_run_folder(checked, flags)
    file = as_path(earlier) / CONFIG
    if not file.is_file():
        raise ConfigError(
            f"--from-run {earlier} is not a run folder (it has no {CONFIG}), but ckpt_path={word} resumes a run. Name "
            "the run's folder to resume it, or set ckpt_path=CHECKPOINT to start a new run."
        )
    for key in ("run.name", "run.dir"):
        source = checked.config.find_source(key)
        if source != "defaults" and f"{file}:" not in source:
            raise ConfigError(
                f"{source}: {key} applies to a new run only, but ckpt_path={word} resumes the run in {earlier}. "
                f"Remove {key}, or set ckpt_path=CHECKPOINT to start a new run."
            )
    return RunFolder.open(earlier, flags)


@contextmanager
def _create_run_folder(checked: CheckedConfig, flags: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Create the folder of a new run. Discard it if the run is refused with a ConfigError."""
    from ...trainer.runs import RunFolder

    with RunFolder.create(checked.run_dir, checked.run_name, flags) as folder:
        try:
            yield folder
        except ConfigError:
            folder.discard()
            raise


def _run_main(stage: str, arguments: Sequence[str]) -> int:
    try:
        session = run(stage, arguments, f"treadle {stage}", keep=False)
    except ConfigError as error:
        return report_error(f"treadle {stage}", error)
    except KeyboardInterrupt as error:
        return fail(f"treadle {stage}", error, 128 + signal.SIGINT, is_printed=True)
    if session is not None:
        report(None, _describe(session))
    return 0


def _describe(session: Session) -> dict[str, Any]:
    """Return what `treadle fit --json` and its like print of a stage that has ended."""
    trainer = session.trainer
    saved = trainer.checkpoint_callback
    return {
        "folder": session.folder,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "interrupted": trainer.interrupted,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best_checkpoint": getattr(saved, "best_model_path", None) or None,
        "last_checkpoint": getattr(saved, "last_model_path", None) or None,
    }


def fit(arguments: Sequence[str]) -> int:
    """Run `treadle fit` and return the exit status."""
    return _run_main("fit", arguments)


def validate(arguments: Sequence[str]) -> int:
    """Run `treadle validate` and return the exit status."""
    return _run_main("validate", arguments)


def test(arguments: Sequence[str]) -> int:
    """Run `treadle test` and return the exit status."""
    return _run_main("test", arguments)


def predict(arguments: Sequence[str]) -> int:
    """Run `treadle predict` and return the exit status."""
    return _run_main("predict", arguments)
