"""`FSDP` with the arguments of Lightning's ``FSDPStrategy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ...common.messages import name_type, nearest
from ...common.validation import choose
from ..distributed import Layout, World
from ..precision import Precision
from ..wrap_policy import Policy
from .fsdp import FSDP

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Options of torch's first FSDP and of ModelParallelStrategy that change the order of the communication or the form of
# what is saved, and not the results.
_WITHOUT_EFFECT = {
    *("backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"),
    "save_distributed_checkpoint",
}


class _AnyFSDP(type):
    """Metaclass that lets ``isinstance(trainer.strategy, FSDPStrategy)`` accept each `FSDP`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FSDP) if cls is FSDPStrategy else super().__instancecheck__(instance)


class FSDPStrategy(FSDP, metaclass=_AnyFSDP):
    """`FSDP` that also accepts the arguments of Lightning's strategy with this name.

    Args:
        auto_wrap_policy: See `FSDP`. Default: None, which means ``"auto"``.
        activation_checkpointing: Former name of ``activation_checkpointing_policy``: a module class or several.
        activation_checkpointing_policy: See `FSDP`.
        sharding_strategy: ``"FULL_SHARD"`` (default), ``"SHARD_GRAD_OP"``, which keeps gathered parameters for the
            backward pass, ``"HYBRID_SHARD"`` or ``"HYBRID_SHARD_ZERO2"``, which do the same with replicas (one for each
            machine, unless their number is set), or a member of torch's ``ShardingStrategy``.
        device_mesh: Numbers of replicas and of processes over which each is sharded, for hybrid sharding.
        cpu_offload: Keep the shards in host memory: a bool, or torch's ``CPUOffload``.
        mixed_precision: torch's ``MixedPrecision`` or ``MixedPrecisionPolicy``.
        state_dict_type: ``"full"`` or ``"sharded"``. It has no effect, because any strategy can load a checkpoint.
        kwargs: ``accelerator``, ``cluster_environment``, ``checkpoint_io`` and ``precision_plugin``, which act like the
            Trainer's ``accelerator`` and ``plugins``, and further arguments of `FSDP`. Options of torch's first FSDP
            that do not change results have no effect.

    Raises:
        TypeError, ValueError: If an argument is invalid or not supported, or if arguments contradict each other.

    Examples:
        >>> from treadle.strategies import FSDPStrategy
        >>> FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", limit_all_gathers=True).reshard_after_forward
        False
    """

    def __init__(
        self,
        *,
        auto_wrap_policy: Policy | None = None,
        activation_checkpointing: type | Sequence[type] | None = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        state_dict_type: str = "full",
        **kwargs: Any,
    ) -> None:
        options = {name: value for name, value in self.take_flags(kwargs).items() if name not in _WITHOUT_EFFECT}
        known = list(FSDP.__init__.__kwdefaults__ or ())
        for name in options:
            if name not in known:
                near = nearest(name, [*known, *(FSDPStrategy.__init__.__kwdefaults__ or ())])
                raise TypeError(f"FSDPStrategy() has no argument {name!r}.{near} Correct or remove it.")
        choose("state_dict_type", state_dict_type, ("full", "sharded"))
        sharding = choose_sharding("sharding_strategy", sharding_strategy) or "FULL_SHARD"
        if sharding == "NO_SHARD":
            raise ValueError("sharding_strategy='NO_SHARD' keeps a replica on each process. Use strategy='ddp'.")
        if activation_checkpointing is not None:
            if activation_checkpointing_policy is not None:
                raise ValueError(
                    "activation_checkpointing is a former name. Set activation_checkpointing_policy alone."
                )
            classes = activation_checkpointing
            activation_checkpointing_policy = {classes} if isinstance(classes, type) else set(classes)
        if sharding.endswith(("GRAD_OP", "ZERO2")):
            options.setdefault("reshard_after_forward", False)
        if device_mesh is not None:
            sizes = device_mesh.mesh.shape if isinstance(device_mesh, DeviceMesh) else device_mesh
            replicas, shards = sizes if len(sizes) == 2 else (1, *sizes)
            options |= {"data_parallel_replicate": replicas, "data_parallel_size": replicas * shards}
        self._replicates = sharding.startswith("HYBRID") and "data_parallel_replicate" not in options
        super().__init__(
            auto_wrap_policy="auto" if auto_wrap_policy is None else auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            cpu_offload=is_offload(cpu_offload),
            mixed_precision=_convert_mixed_precision(mixed_precision),
            **options,
        )

    def attach(self, world: World, precision: Precision) -> None:
        """See `Strategy.attach`."""
        if self._replicates:
            self.layout = Layout(self.layout.data, world.size // world.local_size, self.layout.tensor)
        super().attach(world, precision)


def is_offload(value: Any) -> bool:
    """Return whether a value of ``cpu_offload`` enables offloading. torch's ``OffloadPolicy`` does not."""
    value = getattr(value, "offload_params", value)
    return bool(value) if isinstance(value, int | None) else type(value).__name__ != "OffloadPolicy"


def choose_sharding(argument: str, value: Any) -> str | None:
    """Return the name, in capitals, of a sharding strategy: a name, a number, a member of torch's enum, or None."""
    if value is None:
        return None
    text = str(getattr(value, "name", value)).upper().lstrip("_")
    return choose(argument, dict(zip("12345", _SHARDING, strict=True)).get(text, text), _SHARDING)


def _convert_mixed_precision(value: Any) -> Any:
    """Return torch's ``MixedPrecisionPolicy`` for it, for FSDP1's ``MixedPrecision``, or None."""
    if value is None or (hasattr(value, "cast_forward_inputs") and hasattr(value, "output_dtype")):
        return value
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if hasattr(value, "param_dtype") and hasattr(value, "reduce_dtype"):  # it is FSDP1's
        return MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=value.reduce_dtype)
    raise TypeError(
        f"the sharding's mixed precision is {value!r}, {name_type(value)}, but must be a "
        "torch.distributed.fsdp.MixedPrecisionPolicy."
    )
