"""`treadle fit`, `validate`, `test` and `predict`: a configuration, checked, then run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_line import CONFIG, Options, config_of, options_of, told, usage
from .config_values import ConfigError

if TYPE_CHECKING:
    from .build import Checked
    from .datamodule import DataModule
    from .task import TaskModule
    from .trainer import Trainer


@dataclass
class Session:
    """What a command line has run.

    Attributes:
        trainer, model, data: what was built.
        result: what the stage returned.
    """

    trainer: Trainer
    model: TaskModule
    data: DataModule | None
    result: Any


def run(
    stage: str,
    arguments: Sequence[str],
    program: str,
    model: type[TaskModule] | None = None,
    data: type[DataModule] | None = None,
    defaults: Mapping[str, Any] | None = None,
    keep: bool = True,
) -> Session | None:
    """Do what a command line asks for.

    Args:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        arguments: what stands behind that.
        program: the name of the command, for help.
        model, data: classes that the configuration need not name.
        defaults: a configuration that files and overrides win over.
        keep: whether anybody wants the predictions of ``predict``.

    Returns:
        What was run; None where only something was printed.

    Raises:
        ConfigError: something is wrong with the command line or the configuration.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as for python -m: modules beside the configuration can be named in it
    options = options_of(arguments)
    if options.help == "":
        print(usage(stage, program))
        return None
    config = config_of(options, defaults)
    # From here on torch is needed; what is wrong with the files themselves was said without waiting for it.
    if options.help is not None:
        from .config_help import about, target_of

        print(about(target_of(options.help, config.plain(), {"model": model, "data": data}), options.help))
        return None
    from .build import check
    from .printed import as_yaml

    checked = check(config, model, data)
    text = as_yaml(checked.resolved(), config.secrets, f"{program}, with everything filled in")
    if options.show:
        print(text, end="")
        return None
    return _execute(stage, checked, text, options, keep)


def _execute(stage: str, checked: Checked, text: str, options: Options, keep: bool) -> Session:
    """The Trainer comes first: where it starts other processes, this one only waits for them."""
    from ..engine import seed_everything
    from .build import located
    from .trainer import Trainer

    if checked.seed is not None:
        seed_everything(checked.seed)
    flags = checked.settings().flags()
    with ExitStack() as stack:
        about = "run"
        try:
            if stage == "fit" and not flags["fast_dev_run"]:
                folder = stack.enter_context(_run_folder(checked, flags, options))
                folder.write_config(text)
                flags = folder.flags(flags)
            about = "trainer"
            trainer = Trainer(**flags)
        except (ValueError, TypeError, OSError) as error:
            raise located(checked.config, error, about) from error
        trainer.config = text
        model, data = checked.task(), checked.datamodule()
        more: dict[str, Any] = {}
        if stage == "predict" and not keep:
            more["return_predictions"] = False
            _say_where_predictions_go(trainer)
        result = getattr(trainer, stage)(model, datamodule=data, ckpt_path=checked.ckpt_path, **more)
    return Session(trainer, model, data, result)


def _say_where_predictions_go(trainer: Trainer) -> None:
    from ..callbacks import Callback
    from ..strategies import warn

    hooks = ("on_predict_batch_end", "on_predict_epoch_end", "on_predict_end")
    if not any(getattr(type(one), hook) is not getattr(Callback, hook) for one in trainer.callbacks for hook in hooks):
        warn(
            "no callback takes the predictions: unless predict_step writes them itself they are lost. Add an extension "
            "of BasePredictionWriter to trainer.callbacks."
        )


def _run_folder(checked: Checked, flags: Mapping[str, Any], options: Options) -> Any:
    """The folder of the run: a new one, or the earlier run's own where that is gone on with."""
    from .run_folder import RunFolder

    earlier = options.from_run
    if checked.ckpt_path in ("last", "auto") and earlier is not None and (Path(earlier) / CONFIG).is_file():
        return RunFolder.open(earlier, flags)
    return RunFolder.create(checked.run_dir, checked.run_name, flags)


def _main(stage: str, arguments: Sequence[str]) -> int:
    try:
        run(stage, arguments, f"treadle {stage}", keep=False)
    except ConfigError as error:
        print(told(f"treadle {stage}", error), file=sys.stderr)
        return 2
    return 0


def fit(arguments: Sequence[str]) -> int:
    """`treadle fit`; returns the exit status."""
    return _main("fit", arguments)


def validate(arguments: Sequence[str]) -> int:
    """`treadle validate`; returns the exit status."""
    return _main("validate", arguments)


def test(arguments: Sequence[str]) -> int:
    """`treadle test`; returns the exit status."""
    return _main("test", arguments)


def predict(arguments: Sequence[str]) -> int:
    """`treadle predict`; returns the exit status."""
    return _main("predict", arguments)
