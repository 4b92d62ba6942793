"""`treadle runs`: the list, a look at one run, curves as they are drawn, and folders that nobody should trust."""

import json
import os
import random
import re
import resource
import subprocess
import sys
import time

import pytest
from support.processes import clean_environment
from treadle.cli.commands.runs import draw_curves, main
from treadle.trainer.runs import index
from treadle.trainer.runs.folder import RunFolder

STEPS = list(range(0, 101))


def made(directory, name="default", state="finished", held=False, charts=None, **facts):
    folder = RunFolder.create(directory, name)
    folder.record({"state": state, **facts}, charts)
    if not held:
        folder.release()
    return folder


def out(capsys, *arguments, status=0):
    assert main([str(one) for one in arguments]) == status
    said = capsys.readouterr()
    return said.err if status else said.out


def listed(text):
    return [line.split()[0] for line in text.splitlines()[1:]]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")


# -- the list --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """One run in each state, held or not."""
    now = time.time()
    runs, best = tmp_path / "runs", {"metric": "val_loss", "value": 0.25, "mode": "min"}
    made(runs, "old", began=now - 3 * 86400, steps=1200, epochs=3, best=best)
    made(runs, "new", "failed: ValueError", began=now - 7200, steps=5, error="ValueError: no")
    made(runs, "new", "interrupted", began=now - 3600)
    made(runs, "new", "running", began=now - 60)
    kept = made(runs, "new", "running", held=True, began=now - 30, best={"metric": "acc", "value": "nan"})
    yield runs
    kept.release()


def test_the_list_shows_how_they_stand_the_newest_last(runs, capsys):
    lines = out(capsys, runs).splitlines()
    assert lines[0].split() == ["run", "state", "began", "took", "steps", "epochs", "best"]
    assert listed("\n".join(lines)) == ["old/1", "new/1", "new/2", "new/3", "new/4"]
    states = [re.split(r"\s{2,}", line)[1] for line in lines[1:]]
    assert states == ["finished", "failed: ValueError", "interrupted", "killed", "running"]
    assert "3 days ago" in lines[1]
    assert lines[1].endswith("1,200       3  val_loss 0.25")
    assert "2 h ago" in lines[2]
    assert lines[5].endswith("acc nan")
    first, *_ = json.loads(out(capsys, runs, "--json"))
    assert (first["path"], first["state"], first["steps"]) == (str(runs / "old" / "1"), "finished", 1200)
    assert first["best"] == {"metric": "val_loss", "value": 0.25, "mode": "min"}
    assert listed(out(capsys, runs / "new")) == ["new/1", "new/2", "new/3", "new/4"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--state", "failed"], ["new/1"]),
        (["--state", "killed"], ["new/3"]),
        (["--name", "old"], ["old/1"]),
        (["--name", "new", "--state", "interrupted"], ["new/2"]),
    ],
)
def test_some_of_them(options, expected, runs, capsys):
    assert listed(out(capsys, runs, *options)) == expected
    found = json.loads(out(capsys, runs, *options, "--json"))
    assert [f"{run['name']}/{run['number']}" for run in found] == expected


def test_a_folder_that_was_renamed_is_called_by_its_name(runs, capsys):
    (runs / "old" / "1").rename(runs / "kept")
    assert out(capsys, "show", runs / "kept").startswith(f"{runs.name}/kept  finished")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--state", "faild"], "--state 'faild' is not one of running, .* Did you mean 'failed'?"),
        (["--name", "nwe"], "--name 'nwe' is not one of old, new. Did you mean 'new'?"),
        (["--sate", "failed"], "unrecognized arguments: --sate"),
        (["show", "9"], "there is no run 9 in runs"),
        (["show", "1"], "1 is the number of several runs: old/1, new/1. Also pass the name"),
        (["show", "old/7"], "there is no run 'old/7'"),
        (["show", "4", "--metric", "vall"], "--metric 'vall' can't be drawn, because the run has no curves"),
        (["show", "4", "--width", "0"], "--width 0 must be between 24 and 1000 characters"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest(options, words, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    said = out(capsys, *options, status=2)
    assert words.split(" .* ")[0] in said
    assert words.split(" .* ")[-1] in said


def test_no_folder_and_no_runs(tmp_path, capsys):
    assert "none cannot be read: No such file" in out(capsys, tmp_path / "none", status=2)
    assert out(capsys, tmp_path) == f"no runs in {tmp_path}\n"
    assert out(capsys, tmp_path, "--json") == "[]\n"
    assert "there are no runs" in out(capsys, "show", "--dir", tmp_path, status=2)


def test_what_is_no_run_is_left_out(runs, capsys):
    (runs / "notes.txt").write_text("")
    (runs / "new" / "99").mkdir()  # claimed a moment ago, or somebody else's
    (runs / "new" / "100").write_text("")
    (runs / ".hidden" / "1").mkdir(parents=True)
    (runs / "deep" / "er" / "1").mkdir(parents=True)
    (runs / "loop").symlink_to(runs)
    assert listed(out(capsys, runs)) == ["old/1", "new/1", "new/2", "new/3", "new/4"]


@pytest.mark.long
def test_a_hundred_runs_are_listed_at_once_and_without_torch(tmp_path):
    metrics = {f"metric {n}": n / 7 for n in range(20)}
    for number in range(1, 101):
        path = tmp_path / "default" / str(number)
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({"state": "running", "began": 1e9, "metrics": metrics}))
        (path / "lock").write_text("")
    code = (
        "import sys; from treadle.__main__ import main; status = main(['runs', sys.argv[1]]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(status)"
    )
    standard_library = "import argparse, asyncio, email.message, json, tomllib, urllib.request"
    spent = {code: [], standard_library: []}
    for program in [*spent] * 3:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        spent[program].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.count("killed") == (100 if program is code else 0)
    assert min(spent[code]) < 2 * min(spent[standard_library])


# -- one of them -----------------------------------------------------------------------------------------------------


@pytest.fixture
def one(tmp_path):
    curves = {"train_loss": (STEPS, [2.0 - s / 100 for s in STEPS]), "val_loss": (STEPS[::10], [1.5] * 11)}
    facts = {"steps": 100, "epochs": 2, "samples": 400, "task": "MyTask", "processes": 2, "note": "stopped early by X"}
    best = {"metric": "val_loss", "value": 1.5, "mode": "min", "checkpoint": "checkpoints/a.ckpt"}
    folder = made(tmp_path / "runs", "a", charts={"loss": curves, "lr": {"lr": ([0, 100], [0.5, 0.5])}},
                  metrics={"val_loss": 1.5, "epoch": 2}, best=best, **facts)  # fmt: skip
    folder.write_config("trainer:\n  max_epochs: 2\n")
    return tmp_path / "runs"


def test_a_look_leaves_the_defaults_out(one, capsys):
    config = "trainer:\n  callbacks:\n    - class: Timer  # a.yaml:2\n      verbose: true  # default\n"
    config += "  devices: auto  # default, runs/1/config.yaml:5\nrun:\n  dir: runs  # default\nseed: 3  # a.yaml:4\n"
    (one / "a" / "1" / "config.yaml").write_text(config)
    shown = out(capsys, "show", one / "a" / "1").partition("Configuration, without defaults\n")[2].partition("\n\n")[0]
    written = ["trainer:", "  callbacks:", "    - class: Timer  # a.yaml:2", "seed: 3  # a.yaml:4"]
    assert shown.splitlines() == [f"  {line}" for line in written]
    shown = out(capsys, "show", one / "a" / "1", "--defaults").partition("Configuration\n")[2].partition("\n\n")[0]
    assert shown.splitlines() == [f"  {line}" for line in config.splitlines()]


def test_a_look_at_one(one, capsys):
    text = out(capsys, "show", one / "a" / "1")
    lines = text.splitlines()
    assert lines[0] == "a/1  finished (stopped early by X)"
    assert lines[1] == str(one / "a" / "1")
    assert lines[2].startswith("began ")
    assert lines[3].startswith("100 steps, 2 epochs, 400 samples, MyTask, 2 processes, on ")
    assert lines[4] == "best val_loss 1.5, checkpoints/a.ckpt"
    titles = {"Configuration, without defaults", "Environment", "Last values", "loss"}
    assert titles | {"lr: 0.5 throughout", "    max_epochs: 2", "  val_loss  1.5"} <= set(lines)
    assert any(line.split()[:1] == ["torch"] for line in lines)
    assert max(map(len, lines[lines.index("loss") :])) <= 100
    for how in ([], ["1"], ["a/1"], ["--name", "a"]):
        assert out(capsys, "show", *how, "--dir", one).startswith("a/1  finished")


def test_the_newest_is_shown(runs, capsys):
    assert out(capsys, "show", "--dir", runs).startswith("new/4  running")
    assert "ValueError: no" in out(capsys, "show", "new/1", "--dir", runs)


def test_some_curves(one, capsys):
    text = out(capsys, "show", "--dir", one, "--metric", "lr", "--metric", "val_loss", "--ascii")
    assert "val_loss" in text
    assert "train_loss" not in text
    assert text.isascii()


def test_one_as_json(one, capsys):
    found = json.loads(out(capsys, "show", "--dir", one, "--json"))
    assert found["config"] == "trainer:\n  max_epochs: 2\n"
    assert found["charts"]["lr"]["lr"] == {"steps": [0, 100], "values": [0.5, 0.5], "missing": 0}
    assert (found["number"], found["problems"]) == (1, [])


# -- curves ----------------------------------------------------------------------------------------------------------


def test_bars_follow_the_values_and_no_peak_gets_lost():
    rows = draw_curves("t", {"up": (STEPS, STEPS), "down": (STEPS, STEPS[::-1])}, 60).splitlines()
    assert (rows[0], rows[-1]) == ("t", "  from 0 to 100, step 0 to 100")
    bars = rows[1].split()[1]
    assert list(bars) == sorted(bars)
    assert len(set(bars)) == 8
    assert rows[1].endswith("  0 to 100")
    falling = rows[2].split()[1]
    assert list(falling) == sorted(falling, reverse=True)
    falling = draw_curves("t", {"a": (STEPS, [10 ** (-s / 25) for s in STEPS])}, 80).splitlines()
    assert falling[0] == "t (logarithmic)"
    counts = [falling[1].count(bar) for bar in "▂▃▄▅▆▇"]  # on a logarithmic scale, each as often
    assert max(counts) - min(counts) <= 1
    values = [0.0] * 50_000
    values[31_234] = 1.0
    bars = draw_curves("t", {"a": (range(50_000), values)}, 60).splitlines()[1].split()[1]
    assert bars.count("█") == 1
    assert abs(bars.index("█") / len(bars) - 31_234 / 50_000) < 0.03


@pytest.mark.parametrize("bars", ["_.-=+*%#", "▁▂▃▄▅▆▇█"])
@pytest.mark.parametrize("width", [24, 77, 200])
def test_no_line_is_wider_than_asked_for(width, bars):
    chance = random.Random(width)
    lines = {f"m{n}": (STEPS, [chance.uniform(-1e5, 1e5) for _ in STEPS]) for n in range(6)}
    text = draw_curves("t", lines, width, bars)
    assert max(map(len, text.splitlines()[:7])) <= max(width, 32)
    assert text.isascii() == bars.isascii()


def test_a_constant_curve_is_a_line():
    assert draw_curves("lr", {"lr": (STEPS, [0.01] * len(STEPS))}, 60) == "lr: 0.01 throughout"
    for lines in ({"lr": ([3], [0.01])}, {"a": (STEPS, [1.0] * len(STEPS)), "b": (STEPS, [2.0] * len(STEPS))}):
        assert len(draw_curves("lr", lines, 60).splitlines()) == 2 + len(lines)  # of two, each is named


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (([], []), "t: no values"),
        (([1], [2.0]), "step 1"),
        (([1, 2], [float("nan"), float("inf")]), "t: none of 2 values is finite and at most 1e+300"),
        (([1, 2, 3], [1.0, float("nan"), 1.0]), "not drawn, because not finite or above 1e+300: 1"),
        (([0, 1], [0.0, 0.0]), "0"),
        (([0, 1], [1e300, -1e300]), "step 0 to 1"),
        (([0, 10**15], [1e-300, 1e300]), "logarithmic"),
        (([1, 2, 3], [1.0, 1.7e308, -1.7e308]), "not drawn, because not finite or above 1e+300: 2"),
        (([1, 2], [0.0, 5e-324]), "step 1 to 2"),
    ],
)
def test_odd_curves(points, words):
    assert words in draw_curves("t", {"a": points}, 60)


# -- what nobody should trust ----------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
BROKEN = {
    "empty": b"",
    "half": b'{"state": "fini',
    "list": b"[]",
    "nan": b'{"steps": NaN}',
    "deep-object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "not-utf8": b'{"state": "\xff\xfe"}',
    "digits": b'{"steps": ' + b"9" * 5000 + b"}",
    "large": b'{"a": "' + b"x" * 2**24 + b'"}',
    "pickle": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
}
ODD = {
    "kinds": {"state": 3, "began": "yesterday", "steps": [], "best": "low", "metrics": [1], "error": {}, "seconds": {}},
    "far": {"state": "finished", "began": 1e14, "updated": -1e14, "seconds": 1e14, "steps": 1e14, "epochs": -5},
    "big": {"state": "finished", "began": 10**400, "steps": 10**400, "seconds": 1e308},
    "escapes": dict.fromkeys(("state", "error", "note"), ESCAPE)
    | {"best": dict.fromkeys(("metric", "value", "checkpoint"), ESCAPE), "metrics": {ESCAPE: 2, "a\nb": 1}}
    | {"task": "‮evil"},
    "deep-best": {"best": {"metric": {"a": 1}, "value": True}, "metrics": {"a": {"b": 1}, "c": "x"}},
}


def test_what_can_not_be_is_left_out(tmp_path, capsys):
    folder = made(tmp_path)
    (folder.path / "run.json").write_text(json.dumps({"state": "finished", "steps": -5, "seconds": -1, "began": -1}))
    assert not {"steps", "seconds", "began"} & index.read(folder.path).facts.keys()


def test_no_line_floods_the_terminal(tmp_path, capsys):
    folder = made(tmp_path, error="e" * 10**5)
    (folder.path / "environment.json").write_text(json.dumps({"a": "x" * 10**6}))
    text = out(capsys, "show", folder.path)
    assert max(map(len, text.splitlines())) < 2100
    assert "x... (1,000,005 characters)" in text


def shown(path, capsys):
    """The list and the look at a folder, both without a word that a terminal would obey."""
    both = out(capsys, path.parents[1]), out(capsys, "show", path)
    for letter in "".join(both):
        assert letter.isprintable() or letter == "\n"
    json.loads(out(capsys, path.parents[1], "--json"))
    json.loads(out(capsys, "show", path, "--json"))
    return both


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_record_that_can_not_be_read(content, tmp_path, capsys):
    folder = made(tmp_path)
    (folder.path / "run.json").write_bytes(content)
    table, look = shown(folder.path, capsys)
    assert "default/1  unreadable" in table
    assert "can't be shown: run.json: " in look
    assert "Environment" in look  # what can be is


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_a_record_of_odd_values(content, tmp_path, capsys):
    folder = made(tmp_path)
    (folder.path / "run.json").write_text(json.dumps(content))
    table, _ = shown(folder.path, capsys)
    assert "default/1" in table


@pytest.mark.parametrize("name", ["run.json", "curves.json", "environment.json", "config.yaml", "lock"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "missing", "no-text"])
def test_files_that_are_none(kind, name, tmp_path, capsys):
    folder = made(tmp_path, charts={"loss": {"a": ([1, 2], [1.0, 2.0])}})
    path = folder.path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "no-text":
        path.write_bytes(b"\xff\xfe\x00")
    _, look = shown(folder.path, capsys)
    if name != "lock" and (kind != "missing" or name == "run.json"):
        assert f"can't be shown: {name}" in look


@pytest.mark.parametrize(
    "content",
    [
        {"charts": []},
        {"charts": {"a": 1}},
        {"charts": {"a": {"b": {"steps": 1, "values": 2}}}},
        {"charts": {"a": {"b": {"steps": [1, 2], "values": [1]}}}},
        {"charts": {"a": {"b": {"steps": [1, "x", None], "values": [1e308, [], 2]}}}},
        {"charts": {"a": {"b": {"steps": [10**400, 2], "values": [-1e308, 10**400], "missing": "many"}}}},
        {"charts": {ESCAPE: {ESCAPE: {"steps": [3, 1, 2], "values": [1, 2, 3]}}}},
        {"charts": {"a": {}}},
    ],
    ids=range(8),
)
def test_curves_that_are_none(content, tmp_path, capsys):
    folder = made(tmp_path)
    (folder.path / "curves.json").write_text(json.dumps(content))
    table, look = shown(folder.path, capsys)
    assert "default/1  finished" in table
    assert f"{folder.path}" in look


@pytest.mark.parametrize("left", [["lock"], ["lock", ".run.json.tmp"], ["run.json"], []], ids=str)
def test_a_folder_of_which_a_killed_job_wrote_a_part(left, tmp_path, capsys):
    folder = made(tmp_path)
    for name in os.listdir(folder.path):
        if name not in left:
            (folder.path / name).unlink()
    for name in left:
        (folder.path / name).touch()
    text = out(capsys, tmp_path)
    assert ("default/1" in text) == bool(left)
    assert ("unreadable" in text) == ("lock" in left)
    if left:
        shown(folder.path, capsys)
        with RunFolder.open(folder.path):
            pass
        assert "default/1  finished" in out(capsys, tmp_path)


def test_a_terminal_with_few_letters(one, tmp_path):
    made(one, "höhe", began=time.time(), charts={"größe": {"ü": ([1, 2], [1.0, 2.0])}})
    command = [sys.executable, "-m", "treadle", "runs", "show", "--dir", str(one)]
    env = clean_environment({"PYTHONIOENCODING": "ascii", "COLUMNS": "60"})
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert b"h?he/1" in done.stdout
    assert b"_#  1 to 2" in done.stdout


def test_a_reader_that_has_seen_enough(runs):
    command = f"{sys.executable} -m treadle runs show --dir {runs} --json | true"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, env=clean_environment())
    assert (done.returncode, done.stderr) == (0, "")
