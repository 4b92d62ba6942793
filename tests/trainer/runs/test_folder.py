"""Run folders: numbers that no two jobs share, a lock that ends with its job, and what is told of a run's end."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes import run
from support.run_folders import Task, at_once, data, fit, record, refused, settings, state
from treadle.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, RunReport
from treadle.callbacks.reporting.run_record import RunRecord
from treadle.engine.checkpoint.store import verify
from treadle.loggers import CSVLogger, TensorBoardLogger
from treadle.trainer.runs import index
from treadle.trainer.runs.file_names import LOCK
from treadle.trainer.runs.folder import RunFolder
from treadle.trainer.runs.lock import holder

import treadle


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        yield folder


def test_a_prepared_folder_is_named_by_its_number(tmp_path):
    with pytest.raises(ValueError, match=r"path=.*must end in the run's number"):
        RunFolder.prepare(tmp_path / "run", "", {})
    assert not (tmp_path / "run").exists()


def test_a_wrong_argument_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"num_nodes='2' must be an integer"):
        RunFolder.create(tmp_path, "x", {"num_nodes": "2"})
    with pytest.raises(TypeError, match="name=3 must be a string"):
        RunFolder.create(tmp_path, 3)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_twenty_jobs_at_once_share_no_number(tmp_path, monkeypatch):
    listdir = os.listdir

    def slowly(path):
        found = listdir(path)
        time.sleep(0.1)  # as over a network: all have looked before the first one takes a number
        return found

    monkeypatch.setattr(os, "listdir", slowly)
    paths = at_once(20, lambda: str(RunFolder.create(tmp_path, "many").path))
    assert sorted(int(Path(path).name) for path in paths) == list(range(1, 21))
    assert {Path(path).parent for path in paths} == {tmp_path / "many"}
    assert all(record(path)["number"] == int(Path(path).name) for path in paths)


def test_numbers_go_on_from_the_highest(tmp_path):
    for name in ("3", "17", "notes", "٤", "5.old"):
        (tmp_path / "a" / name).mkdir(parents=True)
    assert RunFolder.create(tmp_path, "a").path == tmp_path / "a" / "18"
    assert RunFolder.create(tmp_path, "b").path == tmp_path / "b" / "1"


@pytest.mark.parametrize("name", ["lauf über alles", "3", "a.b-c=d,e", "🎉", "x" * 200, "-n"])
def test_odd_names(name, tmp_path):
    with RunFolder.create(tmp_path, name) as folder:
        pass
    assert folder.path == tmp_path / name / "1"
    (found,) = index.find(tmp_path)
    assert (found.name, found.number, found.state) == (name, 1, "finished")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".hidden", "a/b", "a\\b", " a", "a\n", "a\x1b[31m", "a:b", "x" * 201, "é" * 101]
)
def test_names_that_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="name of a folder"):
        RunFolder.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_where_no_folder_can_be_made_the_text_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "runs", Path("/sys/treadle-runs")):
        with pytest.raises(OSError, match=r"cannot create a run's folder in .*Choose a writable directory"):
            RunFolder.create(place)


# -- one job per folder ----------------------------------------------------------------------------------------------


def test_only_a_run_folder_is_gone_on_with(tmp_path):
    with pytest.raises(ValueError, match=r"none does not exist\."):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(ValueError, match=r"not a run's folder, because it has no run\.json"):
        RunFolder.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [LOCK, ".run.json.tmp", "run.json", "error.json", "report.html.tmp"])
def test_nothing_is_written_through_a_link(name, tmp_path):
    RunFolder.create(tmp_path / "runs").release()
    path, other = tmp_path / "runs" / "default" / "1", tmp_path / "other"
    other.write_text("precious")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(other)
    with pytest.raises(OSError, match="cannot lock") if name == LOCK else contextlib.nullcontext():
        with RunFolder.open(path) as folder:
            fit(folder, max_epochs=1, limit_train_batches=1)
    assert other.read_text() == "precious"


# -- how runs end ----------------------------------------------------------------------------------------------------


def test_the_best_value_is_of_the_callback_that_watches_for_one(folder):
    often, best = ModelCheckpoint(every_n_train_steps=4), ModelCheckpoint(monitor="train_loss", mode="max")
    fit(folder, callbacks=[often, best, EarlyStopping("val_loss")])
    found = record(folder.path)["best"]
    assert (found["metric"], found["mode"], found["value"]) == ("train_loss", "max", best.best_model_score.item())
    assert (folder.path / found["checkpoint"]).samefile(best.best_model_path)
    assert "best train_loss" in (folder.path / "report.html").read_text()


def test_the_best_value_of_early_stopping_and_why_it_stopped(folder):
    stop = EarlyStopping("val_loss", mode="max", patience=1)
    fit(folder, max_epochs=5, callbacks=[stop])
    found = record(folder.path)
    assert found["best"] == {"metric": "val_loss", "mode": "max", "value": stop.best_score.item()}
    assert (found["state"], found["note"]) == ("finished", "stopped early by EarlyStopping")
    assert found["note"] in (folder.path / "report.html").read_text()


def raises(error, at):
    def act(step):
        if step == at:
            raise error

    return act


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (lambda: ValueError("bad\nvalue"), "failed: ValueError", "ValueError: bad\nvalue"),
        (KeyboardInterrupt, "interrupted", None),
        (lambda: SystemExit(3), "failed: SystemExit", "SystemExit: 3"),
    ],
    ids=["failed", "interrupted", "exit"],
)
@pytest.mark.parametrize("within", [True, False], ids=["with", "plain"])
def test_a_run_that_an_error_ends(error, expected, said, within, tmp_path):
    folder, error = RunFolder.create(tmp_path), error()
    with pytest.raises(type(error)), folder if within else contextlib.nullcontext():
        fit(folder, Task(raises(error, at=5)))
    found = record(folder.path)
    assert (found["state"], found["error"], found["steps"]) == (expected, said, 5)
    assert found["ended"] is not None
    assert (holder(folder.path) is None) == within  # else the process still has it
    assert state(folder.path) == expected
    folder.release()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "finished"), (0, "finished"), (2, "failed: SystemExit"), (OSError(), "failed: OSError")],
)
def test_what_ends_the_block_outside_of_a_stage_is_told(error, expected, trained, tmp_path):
    error = SystemExit(error) if isinstance(error, int) else error
    folder = RunFolder.create(tmp_path)
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):  # it goes its way
        with folder:
            if trained:
                fit(folder, max_epochs=1)
            raises(error, at=0)(0 if error else -1)
    assert state(folder.path) == expected
    assert holder(folder.path) is None
    assert record(folder.path).get("steps", 0) == 8 * trained


def test_a_killed_run_goes_on_in_its_folder_to_the_same_end(tmp_path):
    keeps = {"every_n_train_steps": 1, "monitor": "train_loss"}
    whole = RunFolder.create(tmp_path, "whole")
    never = fit(whole, callbacks=ModelCheckpoint(**keeps))
    weights = never.task.net.weight.detach().clone()

    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the others are not in the fork
            task = Task(lambda step: step == 11 and os.kill(os.getpid(), signal.SIGKILL))
            fit(RunFolder.create(tmp_path, "cut"), task, callbacks=ModelCheckpoint(**keeps))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    path = tmp_path / "cut" / "1"
    before = record(path)
    assert before["state"] == "running"
    assert state(path) == "killed"
    with RunFolder.open(path) as folder:
        resumed = fit(folder, ckpt_path="auto", callbacks=ModelCheckpoint(**keeps))
    assert torch.equal(resumed.task.net.weight, weights)
    found = record(path)
    assert (found["state"], found["steps"], found["began"]) == ("finished", 16, before["began"])
    assert found["resumed"] > found["began"]
    curves = [json.loads((one / "curves.json").read_text())["charts"]["loss"] for one in (path, whole.path)]
    assert curves[0] == curves[1]  # from the first step on
    assert found["best"]["value"] == record(whole.path)["best"]["value"]
    whole.release()


class Worse(Task):
    """Its first epoch is its best one."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.trainer.current_epoch))


@pytest.mark.parametrize(
    ("saver", "step"),
    [({}, 24), ({"save_top_k": 2}, 24), ({"save_last": False}, 8)],  # the last as it was asked for
)
def test_a_resume_goes_on_from_the_last_step_and_not_from_the_best(folder, caplog, saver, step):
    with folder:
        fit(folder, Worse(), callbacks=ModelCheckpoint(monitor="val_loss", **saver), max_epochs=3)
    began = []
    with RunFolder.open(folder.path) as folder, caplog.at_level("INFO", "treadle"):
        task = Worse(began.append)
        again = ModelCheckpoint(monitor="val_loss", **saver)
        resumed = fit(folder, task, ckpt_path="last", callbacks=again, max_epochs=4)
    assert (began[0], resumed.global_step) == (step, 32)
    (said,) = [one for one in caplog.messages if "ckpt_path='last'" in one]
    reached = "" if step == 24 else "; the run had reached step 24"
    assert f"(optimizer step {step}{reached})" in said
    assert Path(again.best_model_path).name == "epoch=0-step=8.ckpt"


@pytest.mark.parametrize(
    ("callbacks", "names"),
    [
        ([{"monitor": "val_loss"}, {"every_n_epochs": 1}], []),
        ([{"monitor": "val_loss", "save_top_k": -1}], []),
        ([{"monitor": "val_loss", "save_weights_only": True}], []),
        ([{"monitor": "val_loss", "save_weights_only": True}, {"monitor": "val_loss", "mode": "max"}], ["last.ckpt"]),
        ([{"monitor": "val_loss"}, {"monitor": "val_loss", "filename": "b", "mode": "max"}], ["last.ckpt"]),
    ],
)
def test_the_last_checkpoint_is_kept_once_where_nothing_else_keeps_the_newest(folder, callbacks, names):
    fit(folder, Worse(), callbacks=[ModelCheckpoint(**one) for one in callbacks], max_epochs=1)
    assert [one.name for one in (folder.path / "checkpoints").glob("last*")] == names


def test_the_page_of_a_resumed_run_tells_the_rate_of_what_was_done_since(folder):
    rate = "samples per second of training"
    with folder:
        fit(folder)
    assert rate in (folder.path / "report.html").read_text()
    with RunFolder.open(folder.path) as folder:
        fit(folder, ckpt_path="last")  # which is the end: there is nothing to do
    page = (folder.path / "report.html").read_text()
    assert rate not in page
    assert "since the resume" in page


# -- what a Trainer gets ---------------------------------------------------------------------------------------------


def kinds(callbacks):
    return [type(one).__name__ for one in callbacks]


@pytest.mark.parametrize("given", [{}, {"logger": None}, {"logger": True}], ids=str)
def test_flags_by_default(given, folder):
    before = dict(given)
    flags = folder.flags(given)
    assert given == before
    assert flags["default_root_dir"] == flags["logger"].log_dir == str(folder.path)
    assert isinstance(flags["logger"], TensorBoardLogger)
    assert kinds(flags["callbacks"]) == ["ModelCheckpoint", "RunReport", "RunRecord"]
    assert flags["callbacks"][0].dirpath == str(folder.path / "checkpoints")
    assert flags["callbacks"][1].dirpath == str(folder.path)


def test_flags_leave_what_was_given(folder, tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    placed, free, report = ModelCheckpoint(elsewhere), ModelCheckpoint(monitor="x"), RunReport(elsewhere)
    logger = CSVLogger(elsewhere)
    flags = folder.flags({"logger": logger, "callbacks": [placed, free, report], "max_epochs": 3})
    assert (flags["logger"], flags["max_epochs"]) == (logger, 3)
    assert flags["callbacks"][:3] == [placed, free, report]
    assert kinds(flags["callbacks"][3:]) == ["RunRecord"]
    assert (placed.dirpath, free.dirpath, report.dirpath) == (elsewhere, str(folder.path / "checkpoints"), elsewhere)


@pytest.mark.parametrize("kind", [ModelCheckpoint, RunReport])
def test_a_callback_of_another_run_is_refused(kind, folder, tmp_path):
    used = kind()
    folder.flags({"callbacks": used})
    folder.flags({"callbacks": used})  # of the same run it is not
    with RunFolder.create(tmp_path) as second:
        with pytest.raises(ValueError, match=rf"this {kind.__name__} writes to {folder.path}, .*Create a new callback"):
            second.flags({"callbacks": used})


def test_flags_that_turn_things_off(folder):
    flags = folder.flags({"logger": False, "enable_checkpointing": False, "enable_report": False})
    assert flags["logger"] is False
    assert kinds(flags["callbacks"]) == ["RunRecord"]
    assert kinds(folder.flags({"callbacks": EarlyStopping("x")})["callbacks"])[0] == "EarlyStopping"
    last = folder.flags({"callbacks": OnExceptionCheckpoint(folder.path)})  # saves when all goes wrong
    assert kinds(last["callbacks"])[:2] == ["OnExceptionCheckpoint", "ModelCheckpoint"]
    assert folder.flags({"default_root_dir": folder.path})["default_root_dir"] == str(folder.path)
    with pytest.raises(ValueError, match=r"default_root_dir='/tmp/x' contradicts the folder of this run"):
        folder.flags({"default_root_dir": "/tmp/x"})


@pytest.mark.parametrize("given", [{"barebones": True}, {"fast_dev_run": 2}, {"logger": False}], ids=str)
def test_a_trainer_takes_them(given, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = {} if "barebones" in given else {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = treadle.Trainer(**folder.flags({"accelerator": "cpu", "max_epochs": 1, **quiet, **given}))
    trainer.fit(Task(), data())
    found = record(folder.path)
    assert (found["state"], found["steps"]) == ("finished", 2 if "fast_dev_run" in given else 8)
    assert (folder.path / "checkpoints").exists() == ("logger" in given)
    assert (folder.path / "report.html").exists() == ("logger" in given)
    assert os.listdir(tmp_path) == ["default"]  # nothing stands beside it


def test_a_logger_elsewhere_takes_nothing_else_with_it(folder, tmp_path):
    fit(folder, max_epochs=1, logger=CSVLogger(tmp_path / "elsewhere"))
    assert {"checkpoints", "report.html", "curves.json"} <= set(os.listdir(folder.path))
    assert sorted(os.listdir(tmp_path / "elsewhere" / "treadle_logs" / "version_0")) == ["hparams.yaml", "metrics.csv"]


def test_the_record_is_kept_up_to_date_within_an_epoch(folder):
    flags = folder.flags(settings(max_epochs=1))
    recorder = next(one for one in flags["callbacks"] if isinstance(one, RunRecord))
    seen = []

    def look(step):
        seen.append((record(folder.path)["state"], record(folder.path)["steps"]))
        if step == 3:
            assert json.loads((folder.path / "curves.json").read_text())["charts"]["loss"]["train_loss"]["steps"]
        if step in (2, 5):
            recorder._due = 0.0  # as if that were long ago

    treadle.Trainer(**flags).fit(Task(look), data())
    assert seen == [("running", steps) for steps in (0, 0, 0, 3, 3, 3, 6, 6)]
    assert record(folder.path)["steps"] == 8


# -- several processes -----------------------------------------------------------------------------------------------


def job(directory):
    chosen = settings(devices=2, strategy="ddp", max_epochs=1, callbacks=ModelCheckpoint(monitor="val_loss"))
    with RunFolder.create(directory, "two", chosen) as folder:
        folder.write_config("devices: 2\n")
        trainer = treadle.Trainer(**folder.flags(chosen))
        trainer.fit(Task(), data(), data())
        return str(folder.path), folder.lock is not None, trainer.checkpoint_callback.dirpath, trainer.log_dir


def test_two_processes_share_one_folder(tmp_path):
    path = tmp_path / "two" / "1"
    home = (str(path), str(path / "checkpoints"), str(path))
    results = run(job, 2, str(tmp_path))
    assert [(one[0], *one[2:]) for one in results] == [home, home]
    assert [locked for _, locked, *_ in results] == [True, False]
    assert os.listdir(tmp_path / "two") == ["1"]
    found = record(path)
    assert (found["state"], found["processes"], found["steps"]) == ("finished", 2, 4)
    assert found["best"]["metric"] == "val_loss"
    assert verify(path / found["best"]["checkpoint"]).step == 4
    assert sum(name.startswith("events.") for name in os.listdir(path)) == 1


def failing(directory, rank):
    chosen = settings(devices=2, strategy="ddp", max_epochs=1)
    with RunFolder.create(directory, settings=chosen) as folder:
        task = Task()
        trainer = treadle.Trainer(**folder.flags(chosen))
        task.at = raises(ValueError(f"rank {rank}'s own"), at=2 if trainer.global_rank == rank else -1)
        trainer.fit(task, data())


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_error_of_any_process_is_shown(rank, tmp_path):
    with pytest.raises(ValueError, match=f"rank {rank}'s own"):
        run(failing, 2, str(tmp_path), rank)
    found = index.read(tmp_path / "default" / "1")
    assert (found.state, found.facts["error"]) == ("failed: ValueError", f"ValueError: rank {rank}'s own")
    with RunFolder.open(found.path) as folder:
        assert not (folder.path / "error.json").exists()
    assert state(found.path) == "finished"


def test_all_processes_fail_where_rank_zero_can_not_make_it(tmp_path):
    (tmp_path / "file").write_text("")
    words = run(refused, 2, str(tmp_path / "file" / "runs"))
    assert "cannot create a run's folder" in words[0]
    assert re.match("rank 0 failed: .*cannot create a run's folder", words[1])


# -- hostile ---------------------------------------------------------------------------------------------------------


def attacked(path):
    """Reads everything in a folder; returns what Python saw happen meanwhile. The hook stays: a process of its own."""
    seen, on = [], []
    events = {"exec", "compile", "import", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec"}

    def hook(event, args):
        if on and event in events:
            seen.append(f"{event} {str(args[0])[:80]}")

    from treadle.cli.commands.runs import main

    assert main(["show", path]) == 0  # what it needs is imported now
    sys.addaudithook(hook)
    on.append(True)
    status = [main(["show", path]), main([str(Path(path).parents[1])])]
    on.clear()
    return seen, status


def test_nothing_in_a_folder_is_run(tmp_path):
    marker = tmp_path / "marker"
    with RunFolder.create(tmp_path / "runs") as folder:
        folder.write_config(f"x: !!python/object/apply:os.system ['touch {marker}']\ny: ${{oc.env:HOME}}\n")
    call = f"cos\nsystem\n(S'touch {marker}'\ntR."
    (folder.path / "curves.json").write_bytes(call.encode())
    (folder.path / "environment.json").write_text(json.dumps({"host": f"$(touch {marker})"}))
    ((seen, status),) = run(attacked, 1, str(folder.path))
    assert seen == []
    assert status == [0, 0]
    assert not marker.exists()
