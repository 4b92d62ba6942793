"""Accelerate's state objects: who this process is, and what an Accelerator knows, without a hidden singleton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..common.durations import parse_duration
from ..strategies import World, nearest
from ..strategies.current import connected, current_world
from .process import Process

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .loader import Loader


class PartialState(Process):
    """This process among the others, without models: for inference and scripts of all kinds.

    Any number of them may exist; they share torch's default process group. Made without arguments where one is up, it
    speaks of that one; else it connects the processes that a launcher started.

    Args:
        cpu: compute on the CPU.
        kwargs: ``backend`` (``"gloo"`` or ``"nccl"``) and ``timeout`` (a ``timedelta``, a dict of its
            arguments, or ``"DD:HH:MM:SS"``), to connect with.

    Raises:
        TypeError: for an argument that does not exist.
        ValueError: for a value that can not be honoured.
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        known = {name: kwargs.pop(name) for name in ("backend", "timeout") if name in kwargs}
        if kwargs:
            name = next(iter(kwargs))
            raise TypeError(
                f"{type(self).__name__}() has no argument {name!r}.{nearest(name, ('cpu', 'backend', 'timeout'))}"
            )
        if known.get("timeout") is not None:
            known["timeout"] = parse_duration("timeout", known["timeout"])
        if connected() and not cpu and not known:
            super().__init__(current_world())
        else:
            super().__init__(World.from_env("cpu" if cpu else "auto", spread=False, **known))

    @property
    def default_device(self) -> torch.device:
        """What this process computes on."""
        return self.device

    @property
    def initialized(self) -> bool:
        """True: it is complete when it is made."""
        return True

    def __repr__(self) -> str:
        lines = {
            "Distributed environment": f"{self.distributed_type}"
            + (f"  Backend: {self.backend}" * self.use_distributed),
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items()) + "\n"


class AcceleratorState(PartialState):
    """What ``accelerator.state`` is: a `PartialState` that knows the precision, and how the model is laid out.

    Args:
        mixed_precision: as the Accelerator's.
        cpu: compute on the CPU.
        kwargs: see `PartialState`.
    """

    strategy: Any = None

    def __init__(self, mixed_precision: Any = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu, **kwargs)
        self._mixed_precision = None if mixed_precision is None else str(mixed_precision)

    @classmethod
    def of(cls, accelerator: Accelerator) -> AcceleratorState:
        """The state of ``accelerator``."""
        state = cls.__new__(cls)
        Process.__init__(state, accelerator.world)
        state.strategy = accelerator.strategy
        state._mixed_precision = accelerator.mixed_precision
        return state

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``.

        Raises:
            ValueError: where it was made without; an Accelerator's own is no process-wide state.
        """
        if self._mixed_precision is None:
            raise ValueError(
                "AcceleratorState() was made without mixed_precision, and each Accelerator has its own: use "
                "accelerator.state.mixed_precision."
            )
        return self._mixed_precision

    def __repr__(self) -> str:
        said = "" if self._mixed_precision is None else f"\nMixed precision type: {self._mixed_precision}\n"
        return super().__repr__() + said


class GradientState:
    """What ``accelerator.gradient_state`` is: where the loop stands within its accumulation group and its loader.

    Args:
        accelerator: whose loop.
    """

    adjust_scheduler = True
    sync_with_dataloader = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its group."""
        return self._accelerator.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accelerator.gradient_accumulation_steps

    @property
    def active_dataloader(self) -> Loader | None:
        """The prepared loader whose batch is being worked on."""
        micro = self._accelerator.cursor.micro
        if micro is None:
            return None
        return next((loader for loader in self._accelerator.loaders if loader._micro is micro), None)

    @property
    def in_dataloader(self) -> bool:
        """Whether the loop is in a prepared loader."""
        return self._accelerator.cursor.micro is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether this is the loader's last batch. Of a stream without a length nobody knows it: False."""
        loader = self.active_dataloader
        return loader is not None and loader.length is not None and loader.batches >= loader.length

    @property
    def remainder(self) -> int:
        """In the last batch the samples that it holds over all processes, else -1. Nothing is ever to be cut off."""
        micro = self._accelerator.cursor.micro
        return micro.everyone if micro is not None and self.end_of_dataloader else -1

    def __repr__(self) -> str:
        names = ("sync_gradients", "num_steps", "end_of_dataloader", "remainder")
        return "\n".join(f"{name}: {getattr(self, name)}" for name in names) + "\n"
