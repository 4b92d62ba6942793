"""The digits of `digits.py` on a Ray cluster: one training on two workers, or a search for the learning rate.

    python examples/on_ray.py                            two workers of this machine
    python examples/on_ray.py --search                   four learning rates; bad ones are stopped early
    RAY_ADDRESS=head:6379 python examples/on_ray.py --workers 16 --gpu --storage /mnt/shared/runs

Install Ray with `pip install 'treadle[ray]'`. The task and its Trainer are those of one process; a callback reports to
Ray, and `ckpt_path="auto"` resumes from the last report when Ray restarts a worker.
"""

import argparse
import os
from typing import Any

import ray
import torch
from digits import DigitsTask, build_loaders
from ray import tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.schedulers import ASHAScheduler
from treadle.integrations import RayTrainReportCallback, TuneReportCheckpointCallback

import treadle as tl

BATCH = 64


class Digits(DigitsTask):
    """The task of `digits.py` with a learning rate to search for."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fit(task: Digits, epochs: int, report: tl.Callback) -> None:
    train, val, _ = build_loaders(BATCH)
    trainer = tl.Trainer(max_epochs=epochs, callbacks=[report], logger=False, enable_progress_bar=False)
    trainer.fit(task, train, val, ckpt_path="auto")


def train_worker(config: dict[str, Any]) -> None:
    """Train in one worker, in the process group that Ray has created."""
    tl.seed_everything(0)
    fit(Digits(), config["epochs"], RayTrainReportCallback())


def train(args: argparse.Namespace) -> None:
    result = TorchTrainer(
        train_worker,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name="digits",
            storage_path=os.path.abspath(args.storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.checkpoint is not None
    print(f"accuracy {result.metrics['val_acc']:.3f}, checkpoint {result.checkpoint.path}")


def trial(config: dict[str, Any]) -> None:
    """Train with one learning rate."""
    tl.seed_everything(0)
    fit(Digits(config["lr"]), config["epochs"], TuneReportCheckpointCallback(["val_loss", "val_acc"]))


def search(args: argparse.Namespace) -> None:
    results = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1, "gpu": int(args.gpu)}),
        param_space={"lr": tune.grid_search([3e-3, 1e-2, 1e-5, 1e-6]), "epochs": args.epochs},
        tune_config=tune.TuneConfig(
            metric="val_loss", mode="min", scheduler=ASHAScheduler(grace_period=1, max_t=args.epochs)
        ),
        run_config=tune.RunConfig(name="search", storage_path=os.path.abspath(args.storage)),
    ).fit()
    for result in results:
        reports = result.metrics["training_iteration"]
        print(f"lr {result.config['lr']:g}: {reports} epochs, accuracy {result.metrics['val_acc']:.3f}")
    print(f"best: lr {results.get_best_result().config['lr']:g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search for the learning rate instead")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker or trial")
    parser.add_argument("--storage", default="ray_results", help="a folder that all machines share")
    args = parser.parse_args(arguments)
    if not ray.is_initialized():
        ray.init()
    (search if args.search else train)(args)


if __name__ == "__main__":
    main()
