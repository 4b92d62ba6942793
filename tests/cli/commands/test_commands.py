"""The commands, from the command line to the run and its folder."""

import os
import re
import subprocess
import sys
import time
import uuid
import warnings
from pathlib import Path

import cli_samples
import pytest
import torch
from support import stored
from support.processes import clean_environment, python, run, script
from treadle.cli.commands import command_line
from treadle.cli.commands.stages import _keep_predictions
from treadle.cli.config.resolve import load
from treadle.common.remote_path import RemotePath
from treadle.trainer.runs import CONFIG, RunFolder, index

import treadle
from treadle.__main__ import main

RUN = """
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
  enable_report: false
  logger: false
model:
  class: cli_samples.Line
  lr: 0.02
data:
  class: cli_samples.Points
  batch_size: 8
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def weights(folder):
    (path,) = Path(folder, "checkpoints").glob("*.ckpt")
    return cli_samples.Line.load_from_checkpoint(path).net.weight


def test_fit_and_its_folder(here):
    assert main(["fit", "--config", "run.yaml", "model.lr=0.05", "run.name=lines"]) == 0
    folder = here / "runs" / "lines" / "1"
    config = load([folder / "config.yaml"])
    assert config.to_plain()["model"] == {"class": "cli_samples.Line", "lr": 0.05, "backbone": None}
    assert re.search(r"lr: 0.05 +# command line", (folder / "config.yaml").read_text())
    (saved,) = (folder / "checkpoints").glob("*.ckpt")
    assert stored.read_part(saved, "config") == {"yaml": (folder / "config.yaml").read_text()}


def test_the_program_that_prepared_a_run_takes_part_in_it(here, monkeypatch, capsys):
    (here / "maker.py").write_text(
        "import treadle as tl\n"
        "class Companion(tl.Callback):\n"
        "    def on_train_end(self, trainer, task):\n"
        "        self.steps = trainer.global_step\n"
        "    def conclude(self):\n"
        "        self.folder.record({'state': 'weighed', 'note': f'{self.steps} steps'})\n"
        "def follow(folder):\n"
        "    companion = Companion()\n"
        "    companion.folder = folder\n"
        "    return companion\n"
    )
    monkeypatch.syspath_prepend(str(here))
    for number, companion in ((1, "maker.follow"), (2, "maker.lead")):
        RunFolder.prepare(here / "runs" / "made" / str(number), RUN, {"companion": companion})
    assert main(["fit", "--from-run", "made/1", "ckpt_path=auto"]) == 0
    run = index.read(here / "runs" / "made" / "1")
    assert (run.state, run.facts["note"]) == ("weighed", f"{run.facts['steps']} steps")
    assert main(["fit", "--from-run", "made/2", "ckpt_path=auto"]) == 2
    assert "made/2/run.json: companion: 'maker.lead' can't be imported (module 'maker'" in capsys.readouterr().err


def test_fit_ends_with_commands_that_work(here, capsys):
    assert main(["fit", "--config", "run.yaml"]) == 0
    printed = capsys.readouterr().err
    lines = printed.partition("next:\n")[2].splitlines()
    assert max(map(len, lines)) <= 80
    commands = [line[line.index("treadle") :] for line in lines]
    assert commands == [
        "treadle runs show default/1",
        "treadle validate --from-run default/1",
        "treadle fit --from-run default/1 ckpt_path=last trainer.max_epochs=4",
    ]
    for command in commands:
        assert main(command.split()[1:]) == 0, command
    assert sorted(path.name for path in Path("runs/default/1/checkpoints").iterdir()) == [
        "epoch=1-step=8.ckpt",
        "epoch=3-step=16.ckpt",
    ]


def test_a_run_that_saves_nothing_is_not_said_to_go_on(here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.enable_checkpointing=false"]) == 0
    shown = capsys.readouterr().err.partition("next:\n")[2]
    assert shown == "  curves  treadle runs show default/1\n"
    assert main(["fit", "--config", "run.yaml", "trainer.fast_dev_run=true"]) == 0
    assert "next:" not in (printed := capsys.readouterr().err)
    assert "logs:" not in printed  # in whose place nothing is kept


def by_hand(lr=0.02, epochs=2):
    """The same run in plain PyTorch."""
    treadle.seed_everything(0)
    task, data = cli_samples.Line(lr), cli_samples.Points(8)
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
    return task.net.weight


def test_it_is_the_same_training_as_by_hand():
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert torch.equal(weights("runs/default/1"), by_hand())


@pytest.mark.parametrize("source", ["folder", pytest.param("checkpoint", marks=pytest.mark.exhaustive)])
def test_a_run_is_repeated(source, here):
    assert main(["fit", "--config", "run.yaml", "model.lr=0.03"]) == 0
    (here / "run.yaml").unlink()
    first = here / "runs" / "default" / "1"
    (saved,) = (first / "checkpoints").glob("*.ckpt")
    assert main(["fit", "--from-run", str(first if source == "folder" else saved)]) == 0
    assert torch.equal(weights("runs/default/2"), weights(first))
    assert main(["fit", "--from-run", str(first), "trainer.max_epochs=3"]) == 0
    assert torch.equal(weights("runs/default/3"), by_hand(0.03, 3))


def test_every_command_takes_every_spelling_of_a_run(here, capsys):
    for name in ("one", "two"):
        assert main(["fit", "--config", "run.yaml", f"run.name={name}", "trainer.max_epochs=1"]) == 0
    assert main(["fit", "--config", "run.yaml", "run.name=two", "model.lr=0.04", "trainer.max_epochs=1"]) == 0
    (saved,) = (here / "runs" / "two" / "2" / "checkpoints").glob("*.ckpt")
    for said in ("2", "two/2", "runs/two/2", "runs/two/2/", str(saved), "runs/two/2/config.yaml"):
        capsys.readouterr()
        assert main(["runs", "show", said]) == 0
        assert capsys.readouterr().out.startswith("two/2  finished")
        assert main(["fit", "--from-run", said, "--print-config"]) == 0
        assert "lr: 0.04" in capsys.readouterr().out
        assert main(["validate", "--from-run", said, "trainer.enable_progress_bar=false"]) == 0
    for command in (["runs", "show", "1"], ["fit", "--from-run", "1"]):
        assert main(command) == 2
        assert (
            "1 is the number of several runs: one/1, two/1. Also pass the name, as in one/1." in capsys.readouterr().err
        )
    assert main(["fit", "--from-run", "2", "ckpt_path=last", "trainer.max_epochs=2"]) == 0
    assert sorted(str(path.relative_to(here)) for path in here.glob("runs/*/*")) == [
        "runs/one/1",
        "runs/two/1",
        "runs/two/2",
    ]
    (here / "runs").rename(here / "elsewhere")
    assert main(["fit", "--from-run", "two/2", "run.dir=elsewhere", "--print-config"]) == 0
    assert "lr: 0.04" in capsys.readouterr().out


def test_a_run_is_gone_on_with_in_its_own_folder(here):
    assert main(["fit", "--config", "run.yaml", "trainer.max_epochs=1"]) == 0
    assert main(["fit", "--from-run", "runs/default/1", "ckpt_path=last", "trainer.max_epochs=2"]) == 0
    assert [path.name for path in (here / "runs" / "default").iterdir()] == ["1"]
    last = max((here / "runs" / "default" / "1" / "checkpoints").glob("*.ckpt"), key=os.path.getmtime)
    assert torch.equal(cli_samples.Line.load_from_checkpoint(last).net.weight, by_hand())
    # A run that went on is repeated from its beginning.
    assert main(["fit", "--from-run", "runs/default/1"]) == 0
    assert torch.equal(weights("runs/default/2"), by_hand())


def test_what_can_not_be_gone_on_with_leaves_no_folder(here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.max_epochs=1"]) == 0
    (saved,) = (here / "runs" / "default" / "1" / "checkpoints").glob("*.ckpt")
    assert main(["fit", "--from-run", "runs/default/1", "ckpt_path=last", "run.name=other"]) == 2
    assert "command line: run.name applies to a new run only" in capsys.readouterr().err
    assert main(["fit", "--from-run", str(saved), "ckpt_path=last"]) == 2
    assert "is not a run folder (it has no config.yaml), but ckpt_path=last resumes a run" in capsys.readouterr().err
    assert [str(path.relative_to(here)) for path in here.glob("runs/*/*")] == ["runs/default/1"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("trainer.precision=fp17", "fp17"),
        ("model.class=cli_samples.Deeper", "no intact checkpoint from this run"),
        ("trainer.max_epochs=1", "nothing is left to train"),
    ],
    ids=["flag", "model", "done"],
)
def test_a_run_that_can_not_go_on_is_as_it_was(wrong, words, here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.max_epochs=1"]) == 0
    folder = here / "runs" / "default" / "1"
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    line = ["fit", "--from-run", "runs/default/1", "ckpt_path=last", wrong]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        status = main(line)
    assert status == (0 if words == "nothing is left to train" else 2)
    assert words in " ".join([capsys.readouterr().err, *(str(one.message) for one in warned)])
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    assert main(["fit", "--from-run", "runs/default/1", "ckpt_path=last", "trainer.max_epochs=2"]) == 0
    assert (folder / "config.1.yaml").read_bytes() == before["config.yaml"]


def test_a_longer_run_follows_the_schedule_in_the_file(here, capsys):
    schedule = [
        "lr_scheduler={class: CosineAnnealingLR, T_max: 4, interval: step}",
        "optimizer=SGD",
        "optimizer.lr=0.1",
    ]
    assert main(["fit", "--config", "run.yaml", "trainer.max_steps=2", *schedule]) == 0
    longer = ["fit", "--from-run", "runs/default/1", "ckpt_path=last", "lr_scheduler.T_max=8"]
    with pytest.warns(UserWarning, match="CosineAnnealingLR: T_max 4 in the checkpoint, 8 in this script"):
        assert main([*longer, "trainer.max_steps=3"]) == 0
    assert main([*longer, "trainer.max_steps=4", "schedule=script"]) == 0
    assert "SGD resumes with lr 0.0691342 from this script's schedule" in capsys.readouterr().err
    assert "schedule" not in (here / "runs" / "default" / "1" / "config.1.yaml").read_text().replace("lr_scheduler", "")
    for line, text in (
        (["fit", "--from-run", "runs/default/1", "schedule=mine"], "schedule='mine' is not one of saved, script"),
        (["fit", "--from-run", "runs/default/1", "schedule=script"], "schedule='script' applies only to a resumed run"),
        (["test", "--from-run", "runs/default/1", "schedule=script"], "schedule applies to fit only"),
    ):
        assert main(line) == 2
        assert text in capsys.readouterr().err


def test_a_repeated_run_still_says_where_each_value_is_from(here, capsys):
    assert main(["fit", "--config", "run.yaml", "model.lr=0.03", "trainer.max_epochs=1"]) == 0
    assert main(["fit", "--from-run", "runs/default/1", "trainer.max_epochs=2"]) == 0
    capsys.readouterr()
    assert main(["fit", "--from-run", "runs/default/2", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"  lr: 0.03 +# command line\n", printed)
    assert re.search(r"  devices: auto +# default\n", printed)
    assert main(["fit", "--from-run", "runs/default/2", "~model.lr", "model.lrr=1"]) == 2


def test_optimizer_section_trains(here):
    line = ["fit", "-c", "run.yaml", "model.class=cli_samples.Bare", "~model.lr", "optimizer=SGD", "optimizer.lr=0.02"]
    assert main(line) == 0
    assert torch.equal(weights("runs/default/1"), by_hand())


def test_evaluation(here, capsys):
    assert main(["fit", "--config", "run.yaml"]) == 0
    (saved,) = (here / "runs" / "default" / "1" / "checkpoints").glob("*.ckpt")
    for stage, name in (("validate", "val_loss"), ("test", "test_loss")):
        capsys.readouterr()
        assert main([stage, "--config", "run.yaml", f"ckpt_path={saved}"]) == 0
        assert name in capsys.readouterr().out
    line = ["predict", "--config", "run.yaml", f"ckpt_path={saved}"]
    task, loader = cli_samples.Line.load_from_checkpoint(saved), cli_samples.Points(8).predict_dataloader()
    with torch.no_grad():
        expected = torch.cat([task.predict_step(batch, 0) for batch in loader])
    bar = ["trainer.enable_progress_bar=true"]  # hears of predictions, but keeps none
    for more, folder in (([], "predictions"), (bar, "predictions-v1")):
        capsys.readouterr()
        assert main([*line, *more]) == 0
        assert f"predictions saved in {folder};" in capsys.readouterr().err
        assert torch.equal(torch.cat(list(treadle.read_predictions(here / folder))), expected)
    assert main([*line, "trainer.callbacks+=cli_samples.Takes"]) == 0
    assert not (here / "predictions-v2").exists()
    assert [path.name for path in (here / "runs" / "default").iterdir()] == ["1"]


def test_evaluation_of_an_earlier_run(here, capsys):
    assert main(["fit", "--config", "run.yaml"]) == 0
    (saved,) = (here / "runs" / "default" / "1" / "checkpoints").glob("*.ckpt")
    for words in (["ckpt_path=last"], ["ckpt_path=best"], []):
        capsys.readouterr()
        assert main(["validate", "--from-run", "runs/default/1", *words]) == 0
        assert f"loads the weights from {saved}" in capsys.readouterr().err
    assert main(["validate", "--from-run", str(saved)]) == 0
    # Its own weights, not those from which it started.
    assert main(["fit", "--config", "run.yaml", f"ckpt_path={saved}", "trainer.max_epochs=3"]) == 0
    (second,) = (here / "runs" / "default" / "2" / "checkpoints").glob("*.ckpt")
    losses = []
    for place in ("runs/default/2", str(second), "runs/default/1"):
        capsys.readouterr()
        assert main(["validate", "--from-run", place]) == 0
        losses.append(capsys.readouterr().out)
    assert losses[0] == losses[1] != losses[2]
    with pytest.warns(UserWarning, match="the task's initial weights are used"):
        assert main(["validate", "--config", "run.yaml"]) == 0
    with pytest.warns(UserWarning, match="the task's initial weights are used"):
        assert main(["validate", "--from-run", "runs/default/1/config.yaml"]) == 0
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml", "runs"]


def test_an_interrupt_says_how_to_go_on(here, capsys):
    line = ["fit", "--config", "run.yaml", "trainer.callbacks+=cli_samples.Interrupts"]
    assert main(line) == 130
    said = capsys.readouterr().err
    assert said.splitlines()[-2:] == [
        "interrupted in fit, epoch 0, after optimizer step 2, in batch 2",
        "no checkpoint was saved",
    ]
    assert main([*line, "trainer.callbacks+={class: ModelCheckpoint, every_n_train_steps: 1}"]) == 130
    said = capsys.readouterr().err
    first, newest, resume = said.splitlines()[-3:]
    assert first == "interrupted in fit, epoch 0, after optimizer step 2, in batch 2"
    assert newest.startswith(f"latest checkpoint: {here / 'runs' / 'default' / '2' / 'checkpoints'}")
    assert newest.endswith(" (optimizer step 2)")
    assert resume == "to resume: treadle fit --from-run runs/default/2 ckpt_path=auto"


def test_who_imports_what_is_not_there_is_named(here, capsys):
    (here / "first_of_two.py").write_text("import second_of_two\n")
    (here / "second_of_two.py").write_text("\nimport no_such_package\n")
    assert main(["fit", "--config", "run.yaml", "model.class=first_of_two.Mine"]) == 2
    assert "second_of_two.py:2 imports 'no_such_package', which is not installed" in capsys.readouterr().err


def test_secrets_are_kept_nowhere(here, monkeypatch, capsys):
    monkeypatch.setenv("TREADLE_KEY", "hush-hush")
    line = ["fit", "-c", "run.yaml", "~model.lr", "model.class=cli_samples.Keeps", "trainer.logger=true"]
    assert main([*line, "model.key=${oc.env:TREADLE_KEY}"]) == 2
    said = capsys.readouterr().err
    assert "command line: model.key contains a secret" in said
    assert "save_hyperparameters(ignore=['key'])" in said
    monkeypatch.setenv("TREADLE_KEY", "7654321")
    assert main([*line, "model.more={a: 1}", "model.more.a=${oc.env:TREADLE_KEY}"]) == 2
    assert "command line: model.more.a contains a secret" in capsys.readouterr().err
    assert (
        main(["fit", "-c", "run.yaml", "~model.lr", "model.class=cli_samples.Open", "model.k=${oc.env:TREADLE_KEY}"])
        == 0
    )
    files = [path for path in here.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert any(path.suffix == ".ckpt" for path in files)
    assert [path for path in files if b"7654321" in path.read_bytes()] == []


def test_fast_dev_run_leaves_nothing(here):
    assert main(["fit", "--config", "run.yaml", "trainer.fast_dev_run=true"]) == 0
    assert not (here / "runs").exists()


def test_print_config_runs_nothing(here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.devices=64", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"max_epochs: 2 +# run.yaml:3\n", printed)
    assert re.search(r"devices: 64 +# command line\n", printed)
    assert re.search(r"samples: 32 +# default\n", printed)
    assert not (here / "runs").exists()
    (here / "again.yaml").write_text(printed)
    assert main(["fit", "--config", "again.yaml", "trainer.devices=1"]) == 0
    assert torch.equal(weights("runs/default/1"), by_hand())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.lrr=1"], ["treadle fit: command line: model.lrr", "'lr'?"]),
        (["trainer.max_epochs=-3"], ["treadle fit: command line: trainer.max_epochs", "max_epochs=-3", "-1"]),
        (
            ["trainer.callbacks+={class: EarlyStopping, monitor: a, mode: up}"],
            ["trainer.callbacks.0: EarlyStopping", "'up'"],
        ),
        (["run.name=a/b"], ["command line: run: name='a/b'"]),
        (["run.dir=/dev/null/runs"], ["command line: run: cannot create a run's folder"]),
        (["trainer.devices=0"], ["command line: trainer.devices: devices=0"]),
        (["trainer.default_root_dir=x"], ["trainer.default_root_dir", "the folder of this run"]),
        (["model.lrr=1", "seed=x"], ["treadle fit: 2 problems:\n  command line: model.lrr", "\n  command line: seed"]),
        (["ckpt_path=nowhere"], ["command line: ckpt_path: ckpt_path='nowhere' does not exist"]),
        (["trainer.plugins=[1]"], ["command line: trainer.plugins: plugins="]),
        (["--from-run", "nowhere"], ["--from-run nowhere", "no run 'nowhere'", "default/3"]),
        (["--from-run", "7"], ["--from-run 7", "there are no runs in runs"]),
        (["--from-run", "\x1b]0;title\x07"], ["--from-run ?]0;title?"]),
    ],
    ids=[
        "argument",
        "flag",
        "callback",
        "name",
        "dir",
        "devices",
        "root",
        "two",
        "ckpt",
        "plugins",
        "from-run",
        "number",
        "bell",
    ],
)
def test_errors_are_words_and_status_2(arguments, words, here, capsys):
    assert main(["fit", "--config", "run.yaml", *arguments]) == 2
    assert list(here.glob("runs/*/*")) == []
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == [], said
    assert "Traceback" not in said


def test_lightnings_spelling(here):
    assert main(["fit", "--config=run.yaml", "--trainer.max_epochs", "1", "--model.lr=0.5", "--print_config"]) == 0
    assert main(["fit", "--config", "run.yaml", "--trainer.max_epochs=1", "--model.init_args.lr", "0.02"]) == 0
    assert torch.equal(weights("runs/default/1"), by_hand(epochs=1))


def test_modules_of_the_working_directory(here):
    (here / "my_own_task.py").write_text("from cli_samples import Line\n\n\nclass Mine(Line):\n    pass\n")
    assert main(["fit", "--config", "run.yaml", "model.class=my_own_task.Mine", "trainer.fast_dev_run=true"]) == 0


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["usage: treadle fit", "--config FILE", "--from-run RUN", "lr_scheduler", "~KEY"]),
        (["--help", "trainer"], ["max_epochs: int or null; default null", "Epochs to train; -1 sets no limit"]),
        (["--help", "EarlyStopping"], ["monitor: text; required", "treadle.callbacks.early_stopping", "patience: int"]),
        (["--help", "cli_samples.Line"], ["Fits a line.", "lr: float; default 0.01\n      the learning rate."]),
        (["--config", "run.yaml", "--help", "model"], ["cli_samples.Line", "backbone: Module or null"]),
        (["optimizer=AdamW", "--help", "optimizer"], ["weight_decay: float", "default [0.9, 0.999]"]),
        (["--help", "cli_samples.Many"], ["mode: 'min' or 'max'", "hidden: int; required", "color: 'RED' or 'BLUE'"]),
    ],
    ids=["fit", "trainer", "callback", "class", "model", "optimizer", "many"],
)
def test_help(arguments, words, capsys):
    assert main(["fit", *arguments]) == 0
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == [], said
    assert max(map(len, said.splitlines())) < 180


@pytest.mark.parametrize("columns", [70, 80, 100])
def test_help_fits_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["fit", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "lr_scheduler" in "".join(lines)


@pytest.mark.parametrize(("wrong", "right"), [("train", "fit"), ("evaluate", "validate"), ("fti", "fit")])
def test_a_command_of_another_name(wrong, right, capsys):
    assert main([wrong]) == 2
    assert f"unknown command {wrong!r}. Did you mean {right!r}?" in capsys.readouterr().err


def test_help_about_nothing(capsys):
    assert main(["fit", "--help", "EarlyStoping"]) == 2
    assert "'EarlyStopping'?" in capsys.readouterr().err
    assert main(["fit", "--help", "model"]) == 2
    assert "names no class for 'model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["fit", "--help"], ["fit", "--config", "none.yaml"]], ids=lambda a: a[0]
)
def test_words_come_at_once(arguments):
    """Without torch, which alone takes a second and more."""
    source = f"import sys; from treadle.__main__ import main; main({arguments!r}); assert 'torch' not in sys.modules"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True)
    assert time.perf_counter() - began < 5  # 0.1 s on an idle machine


# -- scripts and processes -------------------------------------------------------------------------------------------


def test_a_script_becomes_a_command_line(here, capsys):
    done = treadle.cli.run(
        cli_samples.Line,
        cli_samples.Points,
        defaults={"trainer": {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}},
        arguments=["fit", "model.lr=0.02", "trainer.max_epochs=2"],
    )
    assert torch.equal(done.model.net.weight, by_hand())
    assert done.trainer.current_epoch == 2
    for arguments, status, words in (
        (["fit", "model.lrr=1"], 2, "Line has no argument 'lrr'"),
        (["fit", "--help"], 0, "usage: python"),
        (["fit", "--help", "model"], 0, "Fits a line."),
        (["fti"], 2, "'fti' is not one of fit, validate, test, predict"),
        ([], 2, "a command is missing"),
    ):
        with pytest.raises(SystemExit) as raised:
            treadle.cli.run(cli_samples.Line, cli_samples.Points, arguments=arguments)
        assert raised.value.code == status
        said = capsys.readouterr()
        assert words in said.out + said.err


def in_ranks(folder, arguments):
    os.chdir(folder)
    status = main(["fit", "--config", "run.yaml", *arguments])
    return status, sorted(str(path.relative_to(folder)) for path in Path(folder).glob("runs/*/*"))


def test_ranks_that_others_started(here):
    """As under torchrun: one folder, and the training of one process with the same global batch."""
    arguments = ["trainer.strategy=ddp", "data.batch_size=4"]
    found = run(in_ranks, 2, str(here), arguments)
    assert found == [(0, ["runs/default/1"])] * 2
    torch.testing.assert_close(weights("runs/default/1"), by_hand())


def test_errors_are_said_once(monkeypatch, capsys):
    """By rank zero; the others wait until their launcher ends them, and speak if it does not."""
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", lambda seconds: waited.append(seconds or capsys.readouterr().err))
    for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0"), (None, "1")):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert main(["fit", "--config", "none.yaml"]) == 2
        assert "none.yaml: the file does not exist" in capsys.readouterr().err
    assert waited == ["", 6.0, 3.0, 3.0]


def test_a_launched_error_is_said_once(here):
    command = [python(), "-m", "treadle", "launch", "--nproc-per-node", "2", "-m", "treadle", "fit", "model.x=1"]
    done = subprocess.run(command, env=clean_environment({}), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("model names no class") == 1


def test_processes_that_it_starts(here):
    """`treadle fit` starts itself twice; the ranks read the same line."""
    line = ["fit", "--config", "run.yaml", "trainer.strategy=ddp", "trainer.devices=2", "data.batch_size=4"]
    environment = clean_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(cli_samples.__file__).parent)})
    command = [python(), "-m", "treadle", *line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("optimizer steps") == 1
    torch.testing.assert_close(weights("runs/default/1"), by_hand())
    config = load(["runs/default/1/config.yaml"])
    assert config.to_plain()["trainer"]["devices"] == 2


@pytest.mark.slow
def test_a_script_in_processes(here):
    source = """
    import sys
    sys.path.insert(0, {folder!r})
    from cli_samples import Line, Points
    from treadle import cli

    if __name__ == "__main__":
        done = cli.run(Line, Points)
        done.trainer.print("lr", done.model.lr)
    """
    folder = str(Path(cli_samples.__file__).parent)
    text = "\n".join(line[4:] for line in source.format(folder=folder).splitlines())
    path = here / "train.py"
    path.write_text(text)
    done = script(path, "fit", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_epochs=1", "model.lr=0.5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lr 0.5") == 1


def examples(folder, arguments):
    os.chdir(folder)
    sys.argv = ["treadle"]
    return main(["fit", *arguments, "trainer.fast_dev_run=true", "trainer.accelerator=cpu"])


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["digits.yaml"], id="one", marks=pytest.mark.exhaustive),
        pytest.param(["digits.yaml", "digits_sgd.yaml"], id="two"),
    ],
)
def test_examples(files):
    """In a process of its own: the modules of that folder are imported by bare names."""
    folder = Path(__file__).parents[3] / "examples"
    assert run(examples, 1, str(folder), [word for file in files for word in ("--config", file)]) == [0]
    assert not (folder / "runs").exists()


def test_predictions_of_a_run_at_a_url_are_written_next_to_it():
    url = f"memory://{uuid.uuid4().hex}/run"
    (RemotePath(url) / CONFIG).write_bytes(b"{}")
    for earlier, folder in ((url, RemotePath(url) / "predictions"), (None, Path("predictions"))):
        (writer,) = _keep_predictions([], earlier)
        assert (type(writer.dirpath), str(writer.dirpath)) == (type(folder), str(folder))
