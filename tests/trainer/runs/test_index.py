"""What is written down of runs, and read again by those who list them."""

import json
import os

import pytest
import torch
from support.run_folders import Task, data, fit, record, settings
from treadle.trainer.runs.folder import RunFolder
from treadle.trainer.runs.lock import holder

import treadle


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"seconds": "x", "began": [], "best": 3, "metrics": 0}'])
def test_a_broken_record_does_not_lose_the_folder(content, tmp_path):
    RunFolder.create(tmp_path).release()
    path = tmp_path / "default" / "1"
    (path / "run.json").write_bytes(content)
    with RunFolder.open(path) as folder:
        fit(folder, max_epochs=1)
    found = record(path)
    assert (found["state"], found["steps"], found["number"]) == ("finished", 8, 1)
    assert found["seconds"] >= 0


def test_a_finished_run(tmp_path):
    with RunFolder.create(tmp_path, "a", settings()) as folder:
        folder.write_config("seed: 0\n")
        trainer = fit(folder, callbacks=treadle.callbacks.ModelCheckpoint(monitor="val_loss"))
    found, best = record(folder.path), trainer.checkpoint_callback
    assert (found["state"], found["note"], found["error"]) == ("finished", "finished", None)
    assert (found["steps"], found["epochs"], found["samples"]) == (16, 2, 32)
    checkpoint = os.path.relpath(best.best_model_path, folder.path)
    expected = {"metric": "val_loss", "mode": "min", "value": best.best_model_score.item(), "checkpoint": checkpoint}
    assert found["best"] == expected
    assert found["metrics"]["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"].item())
    assert found["began"] <= found["ended"] <= found["updated"]
    assert 0 < found["seconds"] < 60
    assert (folder.path / "config.yaml").read_text() == "seed: 0\n"
    torch_version = json.loads((folder.path / "environment.json").read_text())["torch"]
    assert torch_version.partition("+")[0] == torch.__version__.partition("+")[0]
    files = {path.name for path in folder.path.iterdir()}
    assert {"report.html", "checkpoints", "run.json", "curves.json", "lock"} <= files
    assert sum(name.startswith("events.") for name in files) == 1
    assert not any(name.endswith(".tmp") for name in files)
    curve = json.loads((folder.path / "curves.json").read_text())["charts"]["loss"]["train_loss"]
    assert curve["steps"] == trainer.history["train_loss"].steps == list(range(1, 17))
    assert curve["values"] == pytest.approx(trainer.history["train_loss"].values, rel=1e-6)


def test_another_stage_in_the_folder_keeps_what_training_came_to(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        fit(folder, callbacks=treadle.callbacks.ModelCheckpoint(monitor="val_loss"))
    before, curves = record(folder.path), (folder.path / "curves.json").read_bytes()
    with RunFolder.open(folder.path) as folder:
        treadle.Trainer(**folder.flags(settings())).test(Task(), data(), verbose=False)
    after = record(folder.path)
    assert (after["stage"], after["state"], after["note"]) == ("test", "finished", "test done")
    for name in ("steps", "epochs", "best", "began"):
        assert after[name] == before[name]
    assert after["metrics"] == {**before["metrics"], "test_loss": after["metrics"]["test_loss"]}
    assert (folder.path / "curves.json").read_bytes() == curves
    assert after["seconds"] > before["seconds"]


def test_a_record_that_can_not_be_written_ends_no_run(tmp_path):
    folder = RunFolder.create(tmp_path)
    (folder.path / "run.json").unlink()
    (folder.path / "run.json").mkdir()
    with pytest.warns(UserWarning, match=r"RunRecord failed and is disabled|the end of the run could not be recorded"):
        with folder:
            trainer = fit(folder)
    assert trainer.global_step == 16
    assert holder(folder.path) is None
    assert not [name for name in os.listdir(folder.path) if name.endswith(".tmp")]


def test_values_that_are_not_finite_are_kept_as_words(tmp_path):
    class Odd(Task):
        def training_step(self, batch, batch_idx):
            self.log("odd", float("nan") if self.trainer.global_step % 2 else 1.0)
            self.log("far", float("-inf"))
            return super().training_step(batch, batch_idx)

    with RunFolder.create(tmp_path) as folder:
        fit(folder, Odd(), max_epochs=1)

    def refuse(name):
        raise AssertionError(name)

    found = json.loads((folder.path / "run.json").read_text(), parse_constant=refuse)
    assert (found["metrics"]["odd"], found["metrics"]["far"]) == ("nan", "-inf")
    curves = json.loads((folder.path / "curves.json").read_text(), parse_constant=refuse)["charts"]
    assert curves["odd"]["odd"] == {"steps": [1, 3, 5, 7], "values": [1.0] * 4, "missing": 4}
    assert curves["far"]["far"] == {"steps": [], "values": [], "missing": 8}
