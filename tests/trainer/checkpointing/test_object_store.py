"""Runs whose folder is a URL: training, resuming, evaluation, commands; on an S3 server with two ranks."""

import io
import os
import uuid
import warnings

import pytest
import torch
from support import checkpoint_dicts
from support.checkpoint_dicts import are_equal, loader
from support.object_store import S3Server, environment
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import ModelCheckpoint, PredictionWriter, read_predictions
from treadle.cli.entry_point import main
from treadle.common.remote_path import RemotePath
from treadle.engine.checkpoint.store import CheckpointStore
from treadle.loggers import CSVLogger, TensorBoardLogger

import treadle
from treadle.runs import RunFolder


@pytest.fixture
def root():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def s3():
    server = S3Server()
    server.make_bucket("bucket")
    yield environment(server.url)
    server.close()


class Task(checkpoint_dicts.Task):
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


def validation():
    return DataLoader(loader().dataset, batch_size=4)


def fit(root, epochs, ckpt_path=None, checkpoint=None, **flags):
    treadle.seed_everything(3)
    defaults = {"monitor": "val", "save_top_k": 2, "save_last": True, "every_n_train_steps": 4}
    flags = {"default_root_dir": root, "log_every_n_steps": 1, "enable_checkpointing": None, **flags}
    trainer = make_trainer(max_epochs=epochs, callbacks=ModelCheckpoint(**defaults | (checkpoint or {})), **flags)
    task = Task()
    trainer.fit(task, loader(), validation(), ckpt_path=ckpt_path)
    return trainer, task


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "beside"), [("auto", False), ("last", True), pytest.param("path", False, marks=pytest.mark.exhaustive)]
)
def test_a_run_at_a_url_resumes_bit_for_bit(root, tmp_path, word, beside):
    saving = {"async_save": beside}
    first, _ = fit(f"{root}/run", 1, checkpoint=saving)
    path = first.checkpoint_callback.last_model_path
    assert path.startswith(f"{root}/run/checkpoints/last")
    resumed, task = fit(f"{root}/run", 3, path if word == "path" else word, saving)
    _, whole = fit(tmp_path, 3)
    assert str(resumed.ckpt_path) == path
    assert are_equal(task, whole)
    assert not os.path.exists("memory:")


def test_the_best_are_kept_and_the_others_deleted(root):
    trainer, _ = fit(f"{root}/run", 3, checkpoint={"save_last": False, "monitor": "loss"})
    kept = {str(path) for path in CheckpointStore(f"{root}/run/checkpoints").find()}
    assert kept == set(trainer.checkpoint_callback.best_k_models)
    assert len(kept) == 2
    trainer.validate(Task(), validation(), ckpt_path="best", verbose=False)
    assert str(trainer.ckpt_path) == trainer.checkpoint_callback.best_model_path


def test_weights_come_from_a_url_and_are_exported_to_one(root, tmp_path):
    trainer, task = fit(f"{root}/run", 1)
    path = trainer.checkpoint_callback.last_model_path
    trainer.save_checkpoint(f"{root}/mine", weights_only=True)
    for checkpoint in (path, f"{root}/mine"):
        assert are_equal(Task.load_from_checkpoint(checkpoint), task)
    targets = (str(tmp_path / "model"), f"{root}/model", f"{root}/one.safetensors")
    for target in targets:
        assert main(["export", path, target, "--max-shard-size", "80"]) == 0
    for source in (path, *targets):
        model = Task()
        treadle.load_weights(model, source)
        assert are_equal(model, task)
    assert "model.safetensors.index.json" in RemotePath(f"{root}/model").files()
    assert main(["export", path, f"{root}/model"]) == 0
    assert [*RemotePath(f"{root}/model").files()] == ["model.safetensors"]  # in the place of the shards


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_logs_continue_where_they_are(root, kind):
    logger = kind(f"{root}/logs", name="run", version=0)
    fit(f"{root}/run", 1, logger=logger)
    files = RemotePath(f"{root}/logs/run/version_0").files()
    if kind is CSVLogger:
        rows = (RemotePath(f"{root}/logs/run/version_0") / "metrics.csv").read_bytes().decode().splitlines()
        assert len(rows) >= 7
    else:
        assert any(name.startswith("events.out.tfevents") for name in files)
    assert "report.html" in files


def test_predictions_are_written_to_a_url(root):
    writer = PredictionWriter(f"{root}/predictions")
    trainer = treadle.Trainer(callbacks=[writer], logger=False, accelerator="cpu", enable_progress_bar=False)
    task = Task()
    trainer.predict(task, validation())
    task.eval()
    read = list(read_predictions(f"{root}/predictions"))
    with torch.no_grad():
        expected = [task.net(batch[0]) for batch in validation()]
    assert all(map(torch.equal, read, expected))


def test_a_run_folder_at_a_url_is_locked_listed_and_shown(root, capsys):
    settings = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
    with RunFolder.create(f"{root}/runs", "baseline", settings) as folder:
        trainer = treadle.Trainer(**folder.flags(settings))
        trainer.fit(Task(), loader(), validation())
        with pytest.raises(ValueError, match="is in use by process"):
            RunFolder.open(folder.path)
    assert str(folder.path) == f"{root}/runs/baseline/1"
    with RunFolder.create(f"{root}/runs", "baseline", settings) as second:
        assert str(second.path) == f"{root}/runs/baseline/2"
    assert main(["runs", f"{root}/runs"]) == 0
    assert "baseline/1  finished" in capsys.readouterr().out
    assert main(["runs", "show", f"{root}/runs/baseline/1", "--ascii"]) == 0
    assert "val" in capsys.readouterr().out
    with RunFolder.open(f"{root}/runs/baseline/1") as folder:
        trainer = treadle.Trainer(**folder.flags({**settings, "max_epochs": 2}))
        trainer.fit(Task(), loader(), validation(), ckpt_path="auto")
        assert trainer.global_step == 16


def test_an_own_loop_writes_its_state_weights_and_data_to_a_url(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = treadle.Accelerator(cpu=True, project_dir=f"{root}/project")
    model = accelerator.prepare(nn.Linear(3, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.save_state(f"{root}/state")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    accelerator.load_state(f"{root}/state")
    assert all(map(torch.equal, model.parameters(), before))
    accelerator.save_model(model, f"{root}/weights")
    loaded = nn.Linear(3, 1)
    treadle.load_weights(loaded, f"{root}/weights")
    assert are_equal(loaded, model)
    accelerator.save({"a": torch.ones(2)}, f"{root}/file.pt")
    data = torch.load(io.BytesIO(RemotePath(f"{root}/file.pt").read_bytes()), weights_only=True)
    assert torch.equal(data["a"], torch.ones(2))
    Task().to_safetensors(f"{root}/task.safetensors")
    assert RemotePath(f"{root}/task.safetensors").is_file()
    assert os.listdir(tmp_path) == []


# -- two ranks and a server ------------------------------------------------------------------------------------------


def train_on_ranks(root, strategy, epochs, ckpt_path, async_save):
    saving = {"async_save": async_save, "every_n_train_steps": 1}
    with warnings.catch_warnings(action="ignore"):
        trainer, task = fit(root, epochs, ckpt_path, saving, strategy=strategy, logger=True, devices=2)
    weights = trainer.accelerator.get_state_dict(task)
    return weights if trainer.is_global_zero else None, str(trainer.ckpt_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "async_save"), [("ddp", True), ("fsdp", False)])
def test_two_ranks_save_and_resume_on_s3(s3, tmp_path, strategy, async_save):
    root = f"s3://bucket/{strategy}"
    run(train_on_ranks, 2, root, strategy, 1, None, async_save, env=s3)
    (resumed, path), (_, path_of_rank_1) = run(train_on_ranks, 2, root, strategy, 2, "last", async_save, env=s3)
    whole = run(train_on_ranks, 2, str(tmp_path), strategy, 2, None, False, env=s3)[0][0]
    assert path == path_of_rank_1
    assert path.startswith(f"{root}/treadle_logs/version_0/checkpoints/last")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
