"""`LightningArgumentParser`: what it adds to jsonargparse, and hyperparameters in a checkpoint that name classes."""

import textwrap

import pytest
import yaml
from jsonargparse import ActionConfigFile
from lightning_cli_samples import Data, DeepEncoder, Encoder, Model
from support.lightning_cli_runs import DEFAULTS
from support.processes import script
from treadle.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import treadle


def parse(*words, **options):
    parser = LightningArgumentParser(exit_on_error=False, **options)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_lightning_class_args(treadle.Trainer, "trainer")
    parser.add_lightning_class_args(Model, "model")
    parser.add_optimizer_args()
    return parser.parse_args(list(words))


def test_jsonargparse_is_imported_by_nothing_else():
    code = """
        import sys
        import treadle
        from treadle.cli import OptimizerCallable, ReduceLROnPlateau, instantiate_class, main

        print("loaded", [name for name in ("jsonargparse", "docstring_parser") if name in sys.modules])
        sys.modules["jsonargparse"] = None
        for name in ("LightningCLI", "LightningArgumentParser", "SaveConfigCallback"):
            try:
                getattr(__import__("treadle.cli", fromlist=[name]), name)
            except ImportError as error:
                print(error)
    """
    printed = script(textwrap.dedent(code)).stdout
    assert "loaded []" in printed
    assert printed.count("Run pip install 'treadle[cli]'") == 3


WRONG = {
    "--trainer.callbacks+=EarlyStoping": r"EarlyStoping[\s\S]*Did you mean 'EarlyStopping'",
    "--optimizer=Adem": r"Adem[\s\S]*Did you mean 'Adam'",
    "--model.lr=fast": r"model.lr[\s\S]*Got value: fast",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_is_wrong_names_what_is_close(word):
    with pytest.raises(Exception, match=WRONG[word]):
        parse(word)


def test_an_error_ends_the_program_with_status_2_and_few_lines(capsys):
    parser = LightningArgumentParser(prog="train.py")
    parser.add_lightning_class_args(treadle.Trainer, "trainer")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--trainer.max_epochz=3"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "usage: train.py [options]"
    assert printed[-1].endswith("--trainer.max_epochz=3. Did you mean 'trainer.max_epochs'?")
    assert len(printed) == 3


def test_classes_are_found_by_short_name_before_they_are_imported():
    config = parse("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x", "--trainer.profiler=SimpleProfiler")
    assert config.trainer.logger.class_path == "treadle.loggers.CSVLogger"
    assert config.trainer.profiler.class_path.endswith("SimpleProfiler")
    callbacks = parse(
        *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=a"),
        *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor", "b"),
    ).trainer.callbacks
    assert [callback.init_args.monitor for callback in callbacks] == ["a", "b"]


def test_arguments_that_only_jsonargparse_has():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("file")
    parser.add_subclass_arguments(Encoder, "encoder")
    built = []

    def build(cls, *args, **kwargs):
        built.append(cls)
        return cls(*args, **kwargs)

    with pytest.warns(DeprecationWarning, match="add_instantiator"):
        parser.add_instantiator(build, Encoder)
    config = parser.parse_args(["a.txt", "--encoder=DeepEncoder"])
    assert config.file == "a.txt"
    assert isinstance(parser.instantiate(config).encoder, DeepEncoder)
    assert built == [DeepEncoder]


def test_only_objects_of_a_run_are_added_as_such():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(treadle.callbacks.EarlyStopping, "early")
    assert parser.callback_keys == ["early"]
    with pytest.raises(ValueError, match="pass a class that extends Trainer, TaskModule, DataModule or Callback"):
        parser.add_lightning_class_args(Encoder, "encoder")
    with pytest.raises(TypeError, match="must be a class that extends Optimizer"):
        parser.add_optimizer_args(Encoder)
    with pytest.raises(TypeError, match="must be a class that extends LRScheduler or ReduceLROnPlateau"):
        parser.add_lr_scheduler_args((Encoder,))


def test_files_of_a_run_are_saved_as_they_were_given(here):
    (here / "data.yaml").write_text("batch_size: 4\n")
    defaults = {**DEFAULTS, "max_epochs": 0, "default_root_dir": str(here / "run")}
    options = {"save_config_callback": SaveConfigCallback, "save_config_kwargs": {"multifile": True}}
    LightningCLI(Model, Data, trainer_defaults=defaults, args=["fit", "--data=data.yaml"], **options)
    saved = yaml.safe_load((here / "run" / "config.yaml").read_text())
    assert saved["data"] == "data.yaml"
    assert yaml.safe_load((here / "run" / "data.yaml").read_text()) == {"batch_size": 4, "samples": 32}
