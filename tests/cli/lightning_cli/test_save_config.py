"""The configuration of a run is saved, and repeats it."""

import os
import sys
import uuid
from pathlib import Path

import pytest
import torch
import yaml
from support.lightning_cli_runs import DEFAULTS, execute
from support.processes import run
from treadle.cli import SaveConfigCallback
from treadle.common.remote_path import RemotePath

LOGGED = {**DEFAULTS, "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "name": "logs"}}}
SAVES = {"trainer_defaults": LOGGED, "save_config_callback": SaveConfigCallback}

WORDS = (
    *("fit", "--seed_everything=3", "--model.lr=0.1", "--model.color=BLUE", "--model.path=a/b", "--model.name=no"),
    *("--model.extra={deep: [1, '2', null]}", "--model.options.width=9", "--model.activation=torch.tanh"),
    *("--model.encoder=DeepEncoder", "--model.encoder.activation=ReLU", "--optimizer=AdamW", "--optimizer.lr=0.05"),
    *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.max_epochs=1"),
)


@pytest.mark.filterwarnings("ignore:.*will be overridden by")
def test_the_saved_configuration_repeats_the_run(here):
    first = execute(*WORDS, **SAVES)
    saved = here / "logs" / "version_0" / "config.yaml"
    assert Path(first.trainer.log_dir) == saved.parent.relative_to(here)
    again = execute("fit", "--config", str(saved), **SAVES)
    assert (here / "logs" / "version_1" / "config.yaml").read_text() == saved.read_text()
    assert again.trainer.callback_metrics == first.trainer.callback_metrics
    assert torch.equal(again.model.net.weight, first.model.net.weight)
    hparams = again.model.hparams
    assert (hparams.color, hparams.path, hparams.name, hparams.options["width"]) == ("BLUE", "a/b", "no", 9)
    assert hparams.extra == {"deep": [1, "2", None]}
    assert again.model.activation is torch.tanh
    assert isinstance(again.model.encoder.activation, torch.nn.ReLU)


@pytest.mark.long
def test_a_saved_configuration_is_not_overwritten(here):
    words = ("fit", "--trainer.max_epochs=0", "--trainer.logger.version=0")
    execute(*words, **SAVES)
    with pytest.raises(RuntimeError, match=r"config.yaml already exists.*'overwrite': True"):
        execute(*words, **SAVES)
    execute(*words, "--model.lr=0.5", save_config_kwargs={"overwrite": True}, **SAVES)
    assert "lr: 0.5" in (here / "logs" / "version_0" / "config.yaml").read_text()
    execute(*words, "--model.lr=0.6", save_config_overwrite=True, **SAVES)
    execute(*words, save_config_kwargs={"config_filename": "other.yaml"}, **SAVES)
    assert (here / "logs" / "version_0" / "other.yaml").exists()


@pytest.mark.long
def test_a_configuration_saved_elsewhere():
    class Dumps(SaveConfigCallback):
        def save_config(self, trainer, pl_module, stage):
            pl_module.seen.append((stage, self.parser.dump(self.config, skip_unset=False)))

    kwargs = {"save_config_callback": Dumps, "save_config_kwargs": {"save_to_log_dir": False}}
    ((stage, text),) = execute("fit", "--trainer.max_epochs=1", **kwargs).model.seen
    assert stage == "fit"
    assert yaml.safe_load(text)["model"]["lr"] == 0.02
    with pytest.raises(ValueError, match="`save_to_log_dir=False` only makes sense with"):
        execute("fit", save_config_callback=SaveConfigCallback, save_config_kwargs={"save_to_log_dir": False})


def fit_on_two_ranks(folder):
    os.chdir(folder)
    sys.argv = ["train.py"]
    options = {"trainer_defaults": {**LOGGED, "devices": 2}, "save_config_callback": SaveConfigCallback}
    cli = execute("fit", "--trainer.max_epochs=1", **options)
    with pytest.raises(RuntimeError, match=r"config.yaml already exists"):
        execute("fit", "--trainer.logger.version=0", **options)
    return cli.trainer.callback_metrics["train_loss"].item()


@pytest.mark.long
def test_two_processes_write_one_configuration_and_refuse_together(here):
    first, second = run(fit_on_two_ranks, 2, str(here))
    assert first == second
    assert [path.name for path in (here / "logs").iterdir()] == ["version_0"]


@pytest.mark.long
def test_a_configuration_is_saved_at_a_url(here):
    url = f"memory://{uuid.uuid4().hex}"
    words = ("fit", "--trainer.max_epochs=0", f"--trainer.default_root_dir={url}")
    execute(*words, save_config_callback=SaveConfigCallback)
    assert url in (RemotePath(url) / "config.yaml").read_bytes().decode()
    assert not list(here.glob("memory:*"))
    with pytest.raises(RuntimeError, match=r"config.yaml already exists"):
        execute(*words, save_config_callback=SaveConfigCallback)
