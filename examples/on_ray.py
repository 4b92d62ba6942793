"""The digits of `digits.py` on a Ray cluster: one training on two workers, or a search for the learning rate.

    python examples/on_ray.py                            two workers of this machine
    python examples/on_ray.py --search                   four learning rates; bad ones are stopped early
    RAY_ADDRESS=head:6379 python examples/on_ray.py --storage /mnt/shared/runs

Needs `pip install 'treadle[ray]'`. When Ray restarts a worker, `ckpt_path="auto"` resumes from the last report.
"""

import argparse
import os

from digits import DigitsTask, build_loaders
from ray import train, tune
from ray.train.torch import TorchTrainer
from ray.tune.schedulers import ASHAScheduler
from treadle.integrations import RayTrainReportCallback, TuneReportCheckpointCallback

import treadle as tl


def fit(config: dict[str, float]) -> None:
    """Train in a worker of Ray Train, in the process group that Ray has created, or in a trial of Ray Tune."""
    tl.seed_everything(0)
    report = RayTrainReportCallback() if "lr" not in config else TuneReportCheckpointCallback(["val_loss", "val_acc"])
    trainer = tl.Trainer(max_epochs=10, callbacks=[report], logger=False, enable_progress_bar=False)
    train_loader, val_loader, _ = build_loaders(64)
    trainer.fit(DigitsTask(config.get("lr", 3e-3)), train_loader, val_loader, ckpt_path="auto")


def train_on_workers(storage: str) -> None:
    run = train.RunConfig(name="digits", storage_path=storage, failure_config=train.FailureConfig(max_failures=3))
    workers = train.ScalingConfig(num_workers=2)  # use_gpu=True for a GPU each
    result = TorchTrainer(fit, train_loop_config={}, scaling_config=workers, run_config=run).fit()
    print(f"accuracy {result.metrics['val_acc']:.3f}, checkpoint {result.checkpoint.path}")


def search(storage: str) -> None:
    results = tune.Tuner(
        tune.with_resources(fit, {"cpu": 1}),
        param_space={"lr": tune.grid_search([3e-3, 1e-2, 1e-5, 1e-6])},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=ASHAScheduler(grace_period=1, max_t=10)),
        run_config=tune.RunConfig(name="search", storage_path=storage),
    ).fit()
    for result in results:
        epochs = result.metrics["training_iteration"]
        print(f"lr {result.config['lr']:g}: {epochs} epochs, accuracy {result.metrics['val_acc']:.3f}")
    print(f"best: lr {results.get_best_result().config['lr']:g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search for the learning rate instead")
    parser.add_argument("--storage", default="ray_results", help="a folder that all machines share")
    args = parser.parse_args(arguments)
    (search if args.search else train_on_workers)(os.path.abspath(args.storage))


if __name__ == "__main__":
    main()
