"""The commands, from the command line to the run and its folder."""

import os
import re
import subprocess
import sys
import types
import uuid
import warnings
from pathlib import Path

import cli_samples
import pytest
import torch
from support import stored
from support.command_runs import RUN, by_hand, weights
from support.processes import clean_environment, python, run
from treadle.cli.commands.stages import _keep_predictions
from treadle.cli.config.resolve import load
from treadle.common.remote_path import RemotePath
from treadle.trainer.runs import CONFIG, RunFolder, index

import treadle
from treadle.__main__ import main

pytestmark = pytest.mark.usefixtures("here")


def saved_by(run):
    (path,) = Path("runs", run, "checkpoints").resolve().glob("*.ckpt")
    return path


def test_fit_and_its_folder(here):
    assert main(["fit", "--config", "run.yaml", "model.lr=0.05", "run.name=lines"]) == 0
    folder = here / "runs" / "lines" / "1"
    config = load([folder / "config.yaml"])
    assert config.to_plain()["model"] == {"class": "cli_samples.Line", "lr": 0.05, "backbone": None}
    assert re.search(r"lr: 0.05 +# command line", (folder / "config.yaml").read_text())
    assert stored.read_part(saved_by("lines/1"), "config") == {"yaml": (folder / "config.yaml").read_text()}


def test_the_program_that_prepared_a_run_takes_part_in_it(here, monkeypatch, capsys):
    class Companion(treadle.Callback):
        def on_train_end(self, trainer, task):
            self.steps = trainer.global_step

        def conclude(self):
            self.folder.record({"state": "weighed", "note": f"{self.steps} steps"})

    def follow(folder):
        companion = Companion()
        companion.folder = folder
        return companion

    monkeypatch.setitem(sys.modules, "maker", types.SimpleNamespace(follow=follow))
    for number, companion in ((1, "maker.follow"), (2, "maker.lead")):
        RunFolder.prepare(here / "runs" / "made" / str(number), RUN, {"companion": companion})
    assert main(["fit", "--from-run", "made/1", "ckpt_path=auto"]) == 0
    run = index.read(here / "runs" / "made" / "1")
    assert (run.state, run.facts["note"]) == ("weighed", f"{run.facts['steps']} steps")
    assert main(["fit", "--from-run", "made/2", "ckpt_path=auto"]) == 2
    assert "made/2/run.json: companion: 'maker.lead' can't be imported (" in capsys.readouterr().err


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
    names = [path.name for path in Path("runs/default/1/checkpoints").iterdir()]
    assert sorted(names) == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]


def test_a_run_that_saves_nothing_is_not_said_to_go_on(here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.enable_checkpointing=false"]) == 0
    shown = capsys.readouterr().err.partition("next:\n")[2]
    assert shown == "  curves  treadle runs show default/1\n"
    assert main(["fit", "--config", "run.yaml", "trainer.fast_dev_run=true"]) == 0
    assert "next:" not in (printed := capsys.readouterr().err)
    assert "logs:" not in printed  # in whose place nothing is kept
    assert [path.name for path in (here / "runs" / "default").iterdir()] == ["1"]


@pytest.mark.parametrize("source", ["folder", pytest.param("checkpoint", marks=pytest.mark.exhaustive)])
def test_a_run_is_repeated(source, here):
    assert main(["fit", "--config", "run.yaml", "model.lr=0.03"]) == 0
    (here / "run.yaml").unlink()
    first = here / "runs" / "default" / "1"
    assert main(["fit", "--from-run", str(first if source == "folder" else saved_by("default/1"))]) == 0
    assert torch.equal(weights("runs/default/2"), weights(first))
    assert main(["fit", "--from-run", str(first), "trainer.max_epochs=3"]) == 0
    assert torch.equal(weights("runs/default/3"), by_hand(0.03, 3))


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
    saved = saved_by("default/1")
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
)
def test_a_run_that_can_not_go_on_is_as_it_was(wrong, words, here, capsys):
    assert main(["fit", "--config", "run.yaml", "trainer.max_epochs=1"]) == 0
    folder = here / "runs" / "default" / "1"

    def contents():
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    before = contents()
    line = ["fit", "--from-run", "runs/default/1", "ckpt_path=last", wrong]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        status = main(line)
    assert status == (0 if words == "nothing is left to train" else 2)
    assert words in " ".join([capsys.readouterr().err, *(str(one.message) for one in warned)])
    assert contents() == before
    assert main(["fit", "--from-run", "runs/default/1", "ckpt_path=last", "trainer.max_epochs=2"]) == 0
    assert (folder / "config.1.yaml").read_bytes() == before["config.yaml"]


def test_a_longer_run_follows_the_schedule_in_the_file(here, capsys):
    schedule = "lr_scheduler={class: CosineAnnealingLR, T_max: 4, interval: step}"
    line = ["fit", "--config", "run.yaml", "trainer.max_steps=2", schedule, "optimizer={class: SGD, lr: 0.1}"]
    assert main(line) == 0
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
    saved = saved_by("default/1")
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
    saved = saved_by("default/1")
    for words in (["ckpt_path=last"], ["ckpt_path=best"], []):
        capsys.readouterr()
        assert main(["validate", "--from-run", "runs/default/1", *words]) == 0
        assert f"loads the weights from {saved}" in capsys.readouterr().err
    assert main(["validate", "--from-run", str(saved)]) == 0
    # Its own weights, not those from which it started.
    assert main(["fit", "--config", "run.yaml", f"ckpt_path={saved}", "trainer.max_epochs=3"]) == 0
    losses = []
    for place in ("runs/default/2", str(saved_by("default/2")), "runs/default/1"):
        capsys.readouterr()
        assert main(["validate", "--from-run", place]) == 0
        losses.append(capsys.readouterr().out)
    assert losses[0] == losses[1] != losses[2]
    for words in (["--config", "run.yaml"], ["--from-run", "runs/default/1/config.yaml"]):
        with pytest.warns(UserWarning, match="the task's initial weights are used"):
            assert main(["validate", *words]) == 0
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml", "runs"]


def test_an_interrupt_says_how_to_go_on(here, capsys):
    line = ["fit", "--config", "run.yaml", "trainer.callbacks+=cli_samples.Interrupts"]
    assert main([*line, "trainer.callbacks+={class: ModelCheckpoint, every_n_train_steps: 1}"]) == 130
    said = capsys.readouterr().err
    assert said.splitlines()[-3:] == [
        "interrupted in fit, epoch 0, after optimizer step 2, in batch 2",
        f"latest checkpoint: {saved_by('default/1')} (optimizer step 2)",
        "to resume: treadle fit --from-run runs/default/1 ckpt_path=auto",
    ]


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
    line = ["fit", "-c", "run.yaml", "~model.lr", "model.class=cli_samples.Open", "model.k=${oc.env:TREADLE_KEY}"]
    assert main(line) == 0
    files = [path for path in here.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert any(path.suffix == ".ckpt" for path in files)
    assert [path for path in files if b"7654321" in path.read_bytes()] == []


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


# -- scripts and processes -------------------------------------------------------------------------------------------


@pytest.mark.long
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
    assert load(["runs/default/1/config.yaml"]).to_plain()["trainer"]["devices"] == 2
    assert os.listdir("runs/default") == ["1"]
    facts = index.read(here / "runs" / "default" / "1").facts
    assert (facts["processes"], facts["steps"]) == (2, 8)


def examples(folder, arguments):
    os.chdir(folder)
    sys.argv = ["treadle"]
    return main(["fit", *arguments, "trainer.fast_dev_run=true", "trainer.accelerator=cpu"])


@pytest.mark.long
def test_examples():
    """In a process of its own: the modules of that folder are imported by bare names."""
    folder = Path(__file__).parents[3] / "examples"
    assert run(examples, 1, str(folder), ["--config", "digits.yaml", "--config", "digits_sgd.yaml"]) == [0]
    assert not (folder / "runs").exists()


def test_predictions_of_a_run_at_a_url_are_written_next_to_it():
    url = f"memory://{uuid.uuid4().hex}/run"
    (RemotePath(url) / CONFIG).write_bytes(b"{}")
    for earlier, folder in ((url, RemotePath(url) / "predictions"), (None, Path("predictions"))):
        (writer,) = _keep_predictions([], earlier)
        assert (type(writer.dirpath), str(writer.dirpath)) == (type(folder), str(folder))
