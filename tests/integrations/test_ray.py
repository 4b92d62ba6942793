"""Ray's workers: its process group is used, killed ones resume exactly, searches stop bad trials."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import object_store
from support.models import Line, loader
from support.object_store import S3Server
from support.processes import run, script
from support.ray_jobs import ENVIRONMENT, without_ray
from support.trainers import make_trainer
from treadle.engine import CheckpointStore
from treadle.integrations import ray as integration
from treadle.trainer import load_checkpoint

pytest.importorskip("ray")
JOBS = Path(__file__).parents[1] / "support" / "ray_jobs.py"


def start(folder, *jobs, timeout=280, **environment):
    """Run jobs in one cluster; return what they printed."""
    done = script(JOBS, str(folder), *jobs, env={**ENVIRONMENT, **environment}, timeout=timeout, fresh=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text


def undisturbed(folder):
    """The losses by rank and step, and the weights, of the same training without Ray."""
    folder.mkdir()
    run(without_ray, 2, folder)
    return read_losses(folder), read_weights(folder)


def read_losses(folder):
    return [[line.split() for line in (folder / f"losses-{rank}").read_text().splitlines()] for rank in range(2)]


def read_weights(folder):
    return [json.loads((folder / f"weights-{rank}").read_text()) for rank in range(2)]


def check_training(folder, expected):
    """See that a run with a killed rank is the undisturbed one, bit for bit."""
    losses, weights = expected
    assert read_weights(folder) == weights
    assert (folder / "killed").is_dir()
    for rank, seen in enumerate(read_losses(folder)):
        steps = [int(step) for step, _ in seen]
        assert max(steps.count(step) for step in steps) == 2, f"rank {rank} did not resume"
        assert steps.count(1) == 1, "Ray started the run from its beginning"
        assert steps[-1] == 18
        by_step = dict(losses[rank])
        assert all(by_step[step] == loss for step, loss in seen)


def test_a_step_that_float16_skips_is_not_reported(monkeypatch):
    class Report(integration.RayTrainReportCallback):
        _shared_root = "folder"

        def _hand_over(self, metrics, place, name, mode):
            reported.append(name)

        def _choose_name(self, trainer):
            return trainer.global_step

    storage = SimpleNamespace(build_checkpoint_path_from_name=str, storage_filesystem=None)
    monkeypatch.setattr(integration, "_get_storage", lambda: storage)
    monkeypatch.setattr(integration, "_collect_metrics", lambda trainer: {})
    callback, reported = Report(every_n_train_steps=2), []
    trainer = SimpleNamespace(is_global_zero=True, save_checkpoint=len)
    trainer.accelerator = SimpleNamespace(world=SimpleNamespace(broadcast=lambda value: value))
    for step in (0, 1, 2, 2, 3, "epoch", 4, 5):  # the first step, the second with the number 2 and that after the epoch
        trainer.progress = SimpleNamespace(epoch_is_trained=step == "epoch")
        trainer.global_step = 4 if step == "epoch" else step
        (callback.on_train_epoch_end if step == "epoch" else callback.on_step_end)(trainer, None)
    assert reported == [2, 4]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """What a training and a search have left; one cluster, as it takes long to start."""
    folder = tmp_path_factory.mktemp("ray")
    start(folder, "train(folder, 1)", "search(folder)")
    return folder


@pytest.mark.exhaustive
def test_a_killed_worker_is_restarted_and_resumes_exactly(cluster, tmp_path):
    check_training(cluster, undisturbed(tmp_path / "alone"))


@pytest.mark.exhaustive
def test_the_process_group_that_ray_made_is_used(cluster):
    for rank in range(2):
        facts = json.loads((cluster / f"facts-{rank}").read_text())
        assert facts["place"] == facts["by_ray"] == [rank, 2, rank]
        assert facts["same_group"]
        assert facts["timeout"] == 300
        assert not facts["main_thread"]
        assert not facts["started"]
        assert "devices=3 asks for 3 processes" in facts["refused"]
        assert "TorchTrainer with `ScalingConfig(num_workers=3)`" in facts["refused"]


@pytest.mark.exhaustive
def test_metrics_and_committed_checkpoints_are_reported(cluster):
    result = json.loads((cluster / "result").read_text())
    assert result["metrics"]["step"] == 18
    assert result["metrics"]["epoch"] == 2
    assert {"train_loss", "val_loss"} <= result["metrics"].keys()
    names = [Path(path).name for path in result["checkpoints"]]
    assert names == result["listed"] == [f"checkpoint_step={step:08d}" for step in (12, 16, 18)]
    assert result["weights"] == read_weights(cluster)[0]
    for path in filter(os.path.isdir, result["checkpoints"]):
        assert [entry.name for entry in Path(path).iterdir()] == ["checkpoint.ckpt"]
        assert CheckpointStore(path).find() == [Path(path) / "checkpoint.ckpt"]


@pytest.mark.exhaustive
def test_a_search_stops_bad_trials(cluster):
    found = json.loads((cluster / "search").read_text())
    assert found["errors"] == []
    assert found["reports"] == {"0.05": 4, "1e-06": 1, "2e-06": 1}
    lr, loss, steps, checkpoint = found["best"]
    assert (lr, steps) == (0.05, 24)
    assert loss < 1
    assert load_checkpoint(Path(checkpoint) / "run.ckpt")["global_step"] == 24
    for trial, count in (("trial-0.05", 24), ("trial-1e-06", 6)):
        assert len((cluster / trial / "losses-0").read_text().splitlines()) == count
    # A trial starts no processes of its own.
    refused = (cluster / "trial-0.05" / "refused").read_text()
    assert refused.startswith("devices=2 starts 2 processes, but this is a worker of Ray")
    assert "TorchTrainer with ScalingConfig(num_workers=2)" in refused


@pytest.mark.exhaustive
def test_the_example(tmp_path):
    start(tmp_path, "example(folder)", "example(folder, '--search')")
    lines = (tmp_path / "example").read_text().splitlines()
    accuracy, checkpoint = re.search(r"accuracy ([\d.]+), checkpoint (.*)", lines[0]).groups()
    assert float(accuracy) > 0.85
    assert load_checkpoint(Path(checkpoint) / "checkpoint.ckpt")["global_step"] == 100
    assert lines[-1] in ("best: lr 0.003", "best: lr 0.01")
    assert sum(line.startswith("lr ") and ": 1 epochs" in line for line in lines) >= 2


@pytest.mark.exhaustive
def test_the_rank_that_keeps_the_store_is_killed(tmp_path):
    (tmp_path / "ray").mkdir()
    start(tmp_path / "ray", "train(folder, 0)")
    check_training(tmp_path / "ray", undisturbed(tmp_path / "alone"))


@pytest.mark.exhaustive
def test_ray_copies_the_checkpoints_to_storage_that_treadle_cannot_write(tmp_path):
    (tmp_path / "ray").mkdir()
    start(tmp_path / "ray", "train(folder, 1, copied=True)")
    check_training(tmp_path / "ray", undisturbed(tmp_path / "alone"))
    test_metrics_and_committed_checkpoints_are_reported(tmp_path / "ray")


@pytest.mark.exhaustive
def test_all_ranks_write_into_object_storage(tmp_path):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    (tmp_path / "ray").mkdir()
    with contextlib.closing(S3Server()) as server:
        server.make_bucket("runs")
        url = f"s3://runs/storage?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{server.port}"
        start(tmp_path / "ray", f"train(folder, 1, None, {url!r})", **object_store.environment(server.url))
    check_training(tmp_path / "ray", undisturbed(tmp_path / "alone"))
    test_metrics_and_committed_checkpoints_are_reported(tmp_path / "ray")


@pytest.mark.exhaustive
def test_a_trial_continues_from_the_checkpoint_of_another(tmp_path):
    start(tmp_path, "population(folder)")
    found = json.loads((tmp_path / "population").read_text())
    assert found["errors"] == []
    assert [steps for steps, *_ in found["reports"]] == [18, 18]
    begins = [line.split() for file in tmp_path.glob("perturbed-*") for line in file.read_text().splitlines()]
    epochs = {int(step) // 6 for step, *_ in begins}
    assert epochs > {0}
    for step, rate, configured in begins:  # halved with each epoch
        assert float(rate) == pytest.approx(float(configured) * 0.5 ** (int(step) // 6))


@pytest.mark.exhaustive
def test_a_worker_that_hangs_is_named_and_ends_the_run(tmp_path):
    text = start(tmp_path, "hang(folder)")
    assert "rank 1 of 2 has made no progress for 4 s: in Hang.on_train_batch_end" in text
    assert (tmp_path / "failed").read_text() == "WorkerGroupError"


def test_outside_of_ray_the_callbacks_name_where_they_belong():
    from treadle.compat.ray import RayLightningEnvironment

    with pytest.raises(RuntimeError, match=r"^RayTrainReportCallback was created outside of a Ray Train worker"):
        integration.RayTrainReportCallback()
    with pytest.raises(RuntimeError, match=r"^this process is not a Ray Train worker"):
        RayLightningEnvironment()
    with pytest.raises(ValueError, match=r"^on='validation_ends' must be one of 'validation_end'"):
        integration.TuneReportCheckpointCallback(on="validation_ends")
    with pytest.raises(RuntimeError, match=r"^TuneReportCheckpointCallback was used outside of"):
        make_trainer(callbacks=[integration.TuneReportCheckpointCallback()]).fit(Line(), loader())


@pytest.mark.parametrize("name", ["RayTrainReportCallback", "TuneReportCheckpointCallback"])
def test_without_ray_the_error_names_the_extra(name, monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{name} needs .* 'ray' and 'pyarrow', .* 'treadle\[ray\]'"):
        getattr(integration, name)()


def test_ray_is_imported_by_those_who_use_it():
    source = "import sys, treadle.integrations.ray as ours; ours.__all__; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
