"""With --json, each command prints one value that `docs/reference/command_output.json` describes, and nothing else."""

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest
from support.command_runs import RUN
from support.processes import clean_environment, programs
from treadle.cli import COMMANDS
from treadle.common import command_results

from treadle.__main__ import main

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "command_output.json").read_text(encoding="utf-8"))
OURS = {entry.name for entry in entry_points(group="treadle.commands") if entry.value.startswith("treadle.")}
SWEEP = """
config: run.yaml
method: random
metric: {name: val_loss, goal: minimize}
trials: 2
parameters: {model.lr: {min: 1e-4, max: 1e-1, log: true}}
"""
NOISY = """
import cli_samples
class Line(cli_samples.Line):
    def on_fit_start(self):
        print('from the task')
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "run.yaml").write_text(RUN.replace("cli_samples.Line", "noisy.Line"))
    return tmp_path


def check(name, printed):
    """Return the value that a command printed, after it was validated."""
    value = json.loads(printed)  # it has nothing else
    jsonschema.validate(value, {**SCHEMA, "$ref": f"#/$defs/{name}"})
    return value


def call(capsys, *arguments, status=0, name=None):
    assert main([*arguments, "--json"]) == status
    return check(name or arguments[0], capsys.readouterr().out)


def test_the_schema_has_each_command_and_each_code():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert {*COMMANDS, *OURS} <= SCHEMA["$defs"].keys()
    listed = SCHEMA["$defs"]["error"]["properties"]["error"]["properties"]["code"]["enum"]
    codes = {code for _, code in command_results.CODES} | {"exception", "invalid_configuration", "unknown_command"}
    assert listed == sorted(codes)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z_]+)` \| \d+ \|", page, re.MULTILINE) == listed


@pytest.mark.long
def test_runs_and_what_is_read_of_them(here, capsys):
    config = ["--config", "run.yaml"]
    assert "max_epochs: 2" in call(capsys, "fit", *config, "--print-config")["config"]
    trained = call(capsys, "fit", *config)
    assert trained["step"] == 8 == call(capsys, "fit", *config, "model.lr=0.1")["step"]
    assert trained["metrics"]["val_loss"] > 0
    assert Path(trained["folder"]).samefile(here / "runs" / "default" / "1")
    assert Path(trained["best_checkpoint"]).exists()
    evaluated = call(capsys, "validate", "--from-run", "runs/default/1")
    assert evaluated["metrics"]["val_loss"] == trained["metrics"]["val_loss"]
    call(capsys, "test", "--from-run", "runs/default/1")
    call(capsys, "predict", "--from-run", "runs/default/1")
    assert [run["number"] for run in call(capsys, "runs")] == [1, 2]
    assert call(capsys, "runs", "show", "1")["path"] == trained["folder"]
    assert call(capsys, "runs", "compare", "1", "2")["labels"] == ["default/1", "default/2"]
    exported = call(capsys, "export", trained["best_checkpoint"], "line.safetensors")
    assert exported["bytes"] <= (here / "line.safetensors").stat().st_size


@pytest.mark.long
def test_commands_without_a_run(here, capsys):
    (here / "sweep.yaml").write_text(SWEEP)
    (here / "old.py").write_text("import lightning as L\ntrainer = L.Trainer(logger=L.no_such_name)\n")
    assert "_shtab_treadle" in call(capsys, "completion", "bash")["script"]
    assert call(capsys, "sweep", "--config", "sweep.yaml", "--dry-run")["trials"] == {"left": 2}
    found = call(capsys, "migrate", "old.py", status=1)
    assert "+import treadle as L" in found["changes"][0]["diff"]
    assert [finding["line"] for finding in found["findings"]] == [2]
    sizes = ("--world-size", "8", "--length", "64")
    planned = call(capsys, "plan", "--model", "gpt-162m", *sizes, "--gpu", "h100", "--no-advice")
    assert planned["fits"] is True
    assert sum(planned["memory"].values()) == planned["peak_bytes"] < planned["gpu_bytes"]


def test_errors_have_codes(here, capsys):
    def code(*arguments, status=2):
        return call(capsys, *arguments, status=status, name="error")["error"]

    wrong = code("fit", "--config", "run.yaml", "trainer.max_epoch=1", "model.lr=fast")
    assert (wrong["code"], len(wrong["problems"])) == ("invalid_configuration", 2)
    assert code("export", "nowhere", "x.safetensors")["code"] == "file_error"
    assert code("runs", "--state", "asleep")["code"] == "invalid_argument"
    assert code("plan", "--model", "7b", "--gpu", "abacus")["code"] == "invalid_argument"
    assert code("trian")["code"] == "unknown_command"
    (here / "noisy.py").write_text(NOISY.replace("print", "raise RuntimeError"))
    sys.modules.pop("noisy")
    with pytest.raises(RuntimeError, match="from the task"):
        main(["fit", "--config", "run.yaml", "--json"])
    assert check("error", capsys.readouterr().out)["error"]["code"] == "exception"


def test_without_it_nothing_but_the_text_is_printed(capsys):
    assert main(["export", "nowhere", "x.safetensors"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("treadle export: nowhere")


@pytest.mark.exhaustive
def test_commands_that_start_processes(here):
    def start(*words):
        env = clean_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "tests/support/samples")})
        done = subprocess.run([programs() / "treadle", *words], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (here / "sweep.yaml").write_text(SWEEP)
    (here / "train.py").write_text("print('from the script')")
    first, _, printed = start("launch", "--json", "--nproc-per-node", "1", "train.py", "--json").partition("\n")
    assert first == "from the script"
    assert check("launch", printed)["command"][-1] == "--json"
    assert check("doctor", start("doctor", "--json"))["result"] != "fault"
    swept = check("sweep", start("sweep", "--config", "sweep.yaml", "--json"))
    assert swept["trials"] == {"complete": 2, "pruned": 0, "failed": 0, "left": 0}
    assert swept["best"]["parameters"].keys() == {"model.lr"}
    ranks = check("fit", start("fit", "--config", "run.yaml", "trainer.devices=2", "--json"))
    assert ranks["metrics"]["val_loss"] > 0
