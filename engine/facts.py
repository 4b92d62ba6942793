"""What scripts read off an Accelerator, under Accelerate's names; and why some of those names are not there."""

from __future__ import annotations

from typing import Any

from ..strategies import Strategy
from .configuration import DataLoaderConfiguration, ProjectConfiguration
from .process_state import AcceleratorState, GradientState, Process

_NOT_HERE = {
    "lomo_backward": "LOMO steps inside backward; use any optimizer whose step comes after it.",
    "maybe_context_parallel": "a sequence is not split over processes here.",
    "deepspeed_ulysses_dl_adapter": "a sequence is not split over processes here.",
    "fp8_backend": "float8 is not computed here; mixed_precision='bf16' is.",
    "pipeline_parallel_rank": "there is no pipeline parallelism.",
    "context_parallel_rank": "a sequence is not split over processes here.",
    "megatron_lm_plugin": "Megatron-LM is not used here.",
    "build_parallelism_config": "give Accelerator(parallelism_config=...) itself.",
}


class Facts(Process):
    """The part of an `Accelerator` that answers what it was configured with.

    Attributes:
        deepspeed_plugin: None; scripts ask for it before they do something else.
    """

    strategy: Strategy
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    mixed_precision: str
    fsdp_plugin: Any
    deepspeed_plugin = None

    @property
    def state(self) -> AcceleratorState:
        """Who this process is among the others, and in which precision it computes."""
        state = AcceleratorState.of(self)  # type: ignore[arg-type]
        state.deepspeed_plugin, state.fsdp_plugin = None, self.fsdp_plugin  # type: ignore[attr-defined]
        return state

    @property
    def gradient_state(self) -> GradientState:
        """Where the loop is in its group of micro-batches."""
        return GradientState(self)  # type: ignore[arg-type]

    @property
    def project_dir(self) -> Any:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Where trackers keep theirs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that names itself."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """Whether ``batch_size`` is that of the global batch."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Never true: each process reads its own part."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As it was given; all processes see equally many batches either way."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch follows from a seed and the epoch's number alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As it was given; pinned batches are copied while the device computes either way."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As it was given; every prepared loader has a state either way."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def native_amp(self) -> bool:
        """Whether prepared models compute in a smaller number format."""
        return self.mixed_precision != "no"

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process."""
        return self.world.size > 1

    @property
    def is_fsdp2(self) -> bool:
        """Whether each process keeps only a part of the model."""
        return self.strategy.sharded

    @property
    def torch_device_mesh(self) -> Any:
        """The grid of processes that the model is sharded over, or None."""
        return getattr(self.strategy, "device_mesh", None)

    @property
    def data_parallel_rank(self) -> int:
        """This process among those that the data is shared out to."""
        return self.data_world.rank

    def __getattr__(self, name: str) -> Any:
        reason = _NOT_HERE.get(name)
        raise AttributeError(f"Accelerator has no {name!r}{'' if reason is None else ': ' + reason}")

    def __repr__(self) -> str:
        return f"Accelerator:\n{self.state!r}"
