"""Names of ``ray.train.lightning`` and of ``ray.tune.integration.pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..integrations.ray import RayTrainReportCallback, TuneReportCheckpointCallback
from ..strategies import DDP as RayDDPStrategy
from ..strategies import FSDP as RayFSDPStrategy
from ..strategies import LaunchEnvironment
from ..trainer import Trainer

__all__ = [
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "TuneReportCallback",
    "TuneReportCheckpointCallback",
    "prepare_trainer",
]


def RayLightningEnvironment() -> LaunchEnvironment:
    """Return the ranks that Ray assigned to this process, for a Trainer's ``plugins``. The Trainer does not need it.

    Raises:
        RuntimeError: If this is not a Ray Train worker.
    """
    launched = LaunchEnvironment.read()
    if launched is None or launched.launcher != "ray":
        raise RuntimeError(
            "this process is not a Ray Train worker. Create the Trainer in the function passed to "
            "ray.train.torch.TorchTrainer, or remove RayLightningEnvironment() and prepare_trainer()."
        )
    return launched


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Return the Trainer after checking that its rank and world size are those that Ray assigned.

    Raises:
        RuntimeError: If they differ, or this is not a Ray Train worker.
    """
    launched = RayLightningEnvironment()
    if (trainer.global_rank, trainer.world_size) != (launched.rank, launched.world_size):
        raise RuntimeError(
            f"the Trainer runs as rank {trainer.global_rank} of {trainer.world_size}, but Ray has started this worker "
            f"as rank {launched.rank} of {launched.world_size}. Remove the Trainer's arguments devices and num_nodes."
        )
    return trainer


class TuneReportCallback(TuneReportCheckpointCallback):
    """`TuneReportCheckpointCallback` that saves no checkpoints."""

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        on: str | Sequence[str] = "validation_end",
    ) -> None:
        super().__init__(metrics, save_checkpoints=False, on=on)
