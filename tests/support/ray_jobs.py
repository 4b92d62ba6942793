"""Jobs of a Ray cluster on loopback, for the tests of `treadle.integrations.ray`; a program, as each needs a cluster.

    python ray_jobs.py FOLDER JOB ...

Each job writes what was seen into FOLDER.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle

SAMPLES, BATCH, EPOCHS = 96, 8, 3


class Network(treadle.TaskModule):
    """Small, with dropout and a schedule, so that a resume has states of all kinds to restore."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Note(treadle.Callback):
    """Writes each step's loss, and kills a rank once.

    Args:
        folder: for the notes.
        kill: the rank and the step at which it is killed in the first attempt.
    """

    def __init__(self, folder, kill=None):
        self.folder, self.kill = Path(folder), kill

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with (self.folder / f"losses-{trainer.global_rank}").open("a") as file:
            print(trainer.global_step, float(outputs["loss"]).hex(), file=file)
        if (trainer.global_rank, trainer.global_step) == self.kill:
            with contextlib.suppress(FileExistsError):
                (self.folder / "killed").mkdir()
                await_commit()
                os.kill(os.getpid(), signal.SIGKILL)


def await_commit():
    """Wait until Ray has committed what was reported: a kill before that rightly starts the run from its beginning."""
    from ray.train import CheckpointConsistencyMode, get_all_reported_checkpoints

    assert get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)


def loaders(batch=BATCH):
    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(data), batch, shuffle=True), DataLoader(TensorDataset(data[:10]), 4)


QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


def fit(folder, callbacks, **flags):
    """Train, write the weights, and return the Trainer."""
    treadle.seed_everything(3)
    task = Network()
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=EPOCHS, callbacks=callbacks, **QUIET, **flags)
    trainer.fit(task, *loaders(), ckpt_path="auto")
    (Path(folder) / f"weights-{trainer.global_rank}").write_text(json.dumps(weights_of(task)))
    return trainer


def weights_of(task):
    return {name: value.flatten().tolist() for name, value in task.state_dict().items()}


def refusal(devices):
    """What is said to a worker that asks for devices of its own."""
    try:
        treadle.Trainer(devices=devices, accelerator="cpu", logger=False)
    except ValueError as error:
        return str(error)
    return ""


def without_ray(folder):
    """The same training in the ranks of a test: what the others are compared with."""
    fit(folder, [Note(folder), treadle.callbacks.ModelCheckpoint(Path(folder) / "checkpoints")])


# -- Ray Train -----------------------------------------------------------------------------------------------------


def train_worker(config):
    """What each worker of `train` does."""
    import threading

    import ray.train
    import torch.distributed as dist
    from treadle.compat.ray import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from treadle.integrations.ray import RayTrainReportCallback

    folder, group = Path(config["folder"]), dist.group.WORLD
    refused = refusal(3)
    prepare_trainer(
        treadle.Trainer(accelerator="cpu", logger=False, strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()])
    )
    if config["copied"]:
        RayTrainReportCallback._shared_root = None
    report = RayTrainReportCallback(every_n_train_steps=4)
    trainer = fit(folder, [Note(folder, config["kill"]), report], enable_checkpointing=False)  # as Ray's documents do
    context = ray.train.get_context()
    facts = {
        "place": (trainer.global_rank, trainer.world_size, trainer.local_rank),
        "by_ray": (context.get_world_rank(), context.get_world_size(), context.get_local_rank()),
        "same_group": dist.group.WORLD is group and group is not None,
        "timeout": trainer.accelerator.world.timeout.total_seconds(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "started": [file.read_text() for file in Path("/proc/self/task").glob("*/children") if file.read_text()],
        "refused": refused,
    }
    (folder / f"facts-{trainer.global_rank}").write_text(json.dumps(facts))


def train(folder, rank, copied=False, storage=None):
    """Train with two workers, of which one is killed, and restarted by Ray.

    Args:
        folder: for the notes.
        rank: which one is killed.
        copied: treat the storage as one that Treadle cannot write to.
        storage: a URL; None: a folder.
    """
    from pyarrow.fs import FileSelector, FileType
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    result = TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(folder), "kill": (rank, 11), "copied": copied},
        torch_config=TorchConfig(timeout_s=300),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=storage or str(folder / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
        ),
    ).fit()
    checkpoints = [str(checkpoint.path) for checkpoint, _ in result.best_checkpoints]
    entries = result.filesystem.get_file_info(FileSelector(result.path))
    listed = sorted(entry.base_name for entry in entries if entry.type is FileType.Directory)
    with result.checkpoint.as_directory() as copied:
        weights = weights_of(Network.load_from_checkpoint(Path(copied) / "checkpoint.ckpt"))
    found = {"metrics": result.metrics, "checkpoints": checkpoints, "listed": listed, "weights": weights}
    (folder / "result").write_text(json.dumps(found))


class Hang(treadle.Callback):
    """Rank 1 makes no progress after its third step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.global_rank, trainer.global_step) == (1, 3):
            time.sleep(600)


def hang_worker(config):
    """What each worker of `hang` does."""
    from treadle.integrations.ray import RayTrainReportCallback

    fit(config["folder"], [Hang(), RayTrainReportCallback()], timeout={"seconds": 4})


def hang(folder):
    """Train with two workers, of which one hangs."""
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    try:
        TorchTrainer(
            hang_worker,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="hang", storage_path=str(folder / "storage")),
        ).fit()
    except TrainingFailedError as error:
        (folder / "failed").write_text(type(error).__name__)


# -- Ray Tune ------------------------------------------------------------------------------------------------------


def tune(trial, folder, name, rates, scheduler, stop=None, **config):
    """Run a trial with each of the learning rates."""
    from ray import tune

    return tune.Tuner(
        trial,
        param_space={"lr": tune.grid_search(rates), "folder": str(folder)},
        tune_config=tune.TuneConfig(mode="min", scheduler=scheduler, **config),
        run_config=tune.RunConfig(name=name, storage_path=str(folder / "storage"), verbose=0, stop=stop),
    ).fit()


def trial(config):
    """Train with a learning rate; note what was done."""
    from treadle.integrations.ray import TuneReportCheckpointCallback

    folder = Path(config["folder"]) / f"trial-{config['lr']}"
    folder.mkdir(exist_ok=True)
    (folder / "refused").write_text(refusal(2))
    treadle.seed_everything(3)
    task = Network(config["lr"])
    report = TuneReportCheckpointCallback({"loss": "val_loss", "steps": "step"}, filename="run.ckpt")
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=4, callbacks=[Note(folder), report], **QUIET)
    trainer.fit(task, *loaders(16), ckpt_path="auto", schedule="script")


def search(folder):
    """Three trials one after the other, of which the last two are bad."""
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(grace_period=1, max_t=4, reduction_factor=2)
    one_by_one = {"max_concurrent_trials": 1, "reuse_actors": True}
    results = tune(trial, folder, "search", [0.05, 1e-6, 2e-6], scheduler, metric="loss", **one_by_one)
    best = results.get_best_result()
    found = {
        "errors": [str(error) for error in results.errors],
        "reports": {str(one.config["lr"]): one.metrics["training_iteration"] for one in results},
        "best": [best.config["lr"], best.metrics["loss"], best.metrics["steps"], best.checkpoint.path],
    }
    (folder / "search").write_text(json.dumps(found))


def perturbed(config):
    """A trial whose learning rate is multiplied whenever it takes another one's weights."""
    from treadle.integrations.ray import TuneReportCheckpointCallback

    treadle.seed_everything(3)
    report = TuneReportCheckpointCallback(on="train_epoch_end")
    task = Network(config["lr"])
    note = Path(config["folder"]) / f"perturbed-{os.getpid()}"
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=6, callbacks=[report, Rates(note)], **QUIET)
    trainer.fit(task, *loaders(16), ckpt_path="auto", schedule="script")


class Rates(treadle.Callback):
    """Notes with which learning rate, and after which step, a run begins."""

    def __init__(self, file):
        self.file = file

    def on_train_start(self, trainer, pl_module):
        with self.file.open("a") as file:
            print(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], pl_module.lr, file=file)


def population(folder):
    """Two trials, of which the worse one continues from the better one's checkpoint."""
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": lambda: 0.05},
        synch=True,
    )
    stop = {"training_iteration": 3}
    results = tune(perturbed, folder, "population", [0.05, 1e-7], scheduler, stop, metric="val_loss")
    reports = [[one.metrics["step"], one.metrics["val_loss"], one.config["lr"]] for one in results]
    text = json.dumps({"errors": [str(error) for error in results.errors], "reports": reports})
    (folder / "population").write_text(text)


def example(folder, *arguments):
    """What `examples/on_ray.py` prints."""
    import on_ray

    with (folder / "example").open("a") as file, contextlib.redirect_stdout(file):
        on_ray.main(["--storage", str(folder / "storage"), *arguments])


def main(folder, jobs):
    import ray

    # Ray's sockets have long names of their own.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=True,
            _node_ip_address="127.0.0.1",
            _temp_dir=place,
        )
        for job in jobs:
            eval(job, globals() | {"folder": folder})
        ray.shutdown()


ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # Ray listens on loopback alone, which it does by itself on other systems than Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
