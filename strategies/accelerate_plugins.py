"""Accelerate's classes for replicated and sharded models, and their conversion to strategies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh

from ..common.messages import format_count
from ..common.validation import check_int, check_optional_type, choose
from . import ddp

if TYPE_CHECKING:
    from .distributed import World
    from .strategy import Strategy


class DDPCommunicationHookType(StrEnum):
    """Compression method for the gradients that processes exchange.

    Examples:
        >>> import treadle
        >>> treadle.DistributedDataParallelKwargs(comm_hook=treadle.DDPCommunicationHookType.BF16).comm_hook
        <DDPCommunicationHookType.BF16: 'bf16'>
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs:
    """Accelerate's settings for replicated models, converted to a `DDP` strategy. They do not apply to sharded models.

    Args:
        dim: Must be 0; torch no longer uses it.
        broadcast_buffers: Broadcast rank zero's buffers to every process before forward passes.
        bucket_cap_mb: Size in MiB of the buffers in which gradients are sent.
        find_unused_parameters: Permit parameters that are not used in a step.
        check_reduction: Must be False; torch no longer uses it.
        gradient_as_bucket_view: Store gradients in the buffers in which they are sent.
        static_graph: Assume that every step computes the same graph.
        comm_hook: Compression of gradients: ``"no"``, ``"fp16"``, ``"bf16"``, ``"power_sgd"``, the corresponding
            `DDPCommunicationHookType`, or a function for torch's ``register_comm_hook``. ``"batched_power_sgd"`` is not
            supported.
        comm_wrapper: Wrapper of ``comm_hook``: ``"fp16"`` or ``"bf16"``, which casts gradients to this dtype before the
            hook runs; a function that receives the hook and returns a new one; or ``"no"``.
        comm_state_option: Arguments of torch's ``PowerSGDState``, or the first argument of a function passed as
            ``comm_hook``.

    Examples:
        >>> import treadle
        >>> handler = treadle.DistributedDataParallelKwargs(find_unused_parameters=True)
        >>> treadle.Accelerator(cpu=True, strategy="ddp", kwargs_handlers=[handler]).strategy.name
        'ddp'
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def strategy(self) -> ddp.DDP:
        """Return the `DDP` strategy with these settings.

        Raises:
            TypeError, ValueError: If a setting is not supported.
        """
        for name, default in (("dim", 0), ("check_reduction", False)):
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} no longer has an effect in torch. Remove it.")
        return ddp.DDP(
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            broadcast_buffers=self.broadcast_buffers,
            comm_hook=getattr(self.comm_hook, "value", self.comm_hook),
            comm_wrapper=getattr(self.comm_wrapper, "value", self.comm_wrapper),
            comm_state=self.comm_state_option or None,
        )


# The name for callers in higher layers, which do not depend on the strategy.
ReplicaKwargs = DistributedDataParallelKwargs


_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Dimensions of a device mesh, in its order."""


def _is_enabled(dimension: str) -> property:
    return property(lambda self: getattr(self, f"{dimension}_size") > 1)


def _active(*dimensions: str) -> property:
    return property(lambda self: [name for name in dimensions if getattr(self, f"{name}_size") > 1])


@dataclass
class ParallelismConfig:
    """Numbers of replicas, shards and tensor parallel ranks. Their product must equal the world size.

    A size that is not set is read from an environment variable of Accelerate, such as
    ``PARALLELISM_CONFIG_DP_SHARD_SIZE``, and is otherwise 1.

    Args:
        dp_replicate_size: Number of replicas.
        dp_shard_size: Number of shards of each replica.
        tp_size: Number of ranks that process one sample together.
        cp_size: Must be 1.
        cp_backend: Must be ``"torch"`` or None; it has no effect.
        sp_size: Must be 1.
        sp_backend: Must be ``"deepspeed"`` or None; it has no effect.
        tp_handler: Must be None.
        cp_handler: Must be None.
        sp_handler: Must be None.

    Raises:
        ValueError: If an argument has an invalid or unsupported value.

    Examples:
        >>> import treadle
        >>> treadle.ParallelismConfig(dp_replicate_size=2, dp_shard_size=4).total_size
        8
    """

    dp_replicate_size: int = None  # type: ignore[assignment]
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: Any = None
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: Any = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    dp_replicate_enabled, dp_shard_enabled, cp_enabled, sp_enabled, tp_enabled = map(_is_enabled, _DIMENSIONS)
    active_mesh_dims = _active(*_DIMENSIONS)
    dp_dim_names = dp_cp_dim_names = _active("dp_replicate", "dp_shard")
    dp_shard_cp_dim_names, non_dp_dim_names = _active("dp_shard"), _active("tp")

    def __post_init__(self) -> None:
        for name in (f"{dimension}_size" for dimension in _DIMENSIONS):
            if getattr(self, name) is None:
                text = os.environ.get(variable := f"PARALLELISM_CONFIG_{name.upper()}", "1")
                if not text.isdigit():
                    raise ValueError(f"{variable}={text} must be an integer of at least 1. Correct or unset it.")
                setattr(self, name, int(text))
            check_int(name, getattr(self, name), 1)
        for name in ("cp_size", "sp_size"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be 1, because Treadle does not split a sequence over "
                    "processes. Use dp_shard_size and tp_size, which split the model."
                )
        self.device_mesh: device_mesh.DeviceMesh | None = None
        self.cp_backend, self.sp_backend = self.cp_backend or "torch", self.sp_backend or "deepspeed"
        handlers = dict.fromkeys(("tp_handler", "cp_handler", "sp_handler"))
        for name, accepted in {**handlers, "cp_backend": "torch", "sp_backend": "deepspeed"}.items():
            if getattr(self, name) != accepted:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported, because dp_replicate_size, dp_shard_size and "
                    f"tp_size fully describe the layout. Remove {name}."
                )

    @property
    def total_size(self) -> int:
        """Number of processes that the layout needs."""
        return self.data_parallel_size * self.tp_size

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that receive different batches."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that share a batch."""
        return self.tp_size

    def build_device_mesh(self, device_type: str) -> device_mesh.DeviceMesh | None:
        """Return a new device mesh of the active dimensions; None if no dimension is active.

        The mesh also has the flattened dimensions ``"dp"``, ``"dp_shard_cp"`` and ``"dp_cp"``. All ranks must call
        this method.

        Args:
            device_type: Torch's name for the kind of device, such as ``"cuda"``.
        """
        names = self.active_mesh_dims
        if not names:
            return None
        shape = tuple(getattr(self, f"{name}_size") for name in names)
        mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                mesh[tuple(parts)]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> device_mesh.DeviceMesh | None:
        """Return the device mesh that the first call has built.

        Args:
            device_type: As in `build_device_mesh`. It is required in the first call.

        Raises:
            ValueError: If ``device_type`` is missing, or is not that of the existing mesh.
        """
        mesh = self.device_mesh
        if mesh is None:
            if device_type is None:
                raise ValueError("device_type=None, but no device mesh exists yet. Pass the kind of device: 'cuda'.")
            self.device_mesh = mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, mesh.device_type):
            raise ValueError(
                f"device_type={device_type!r} must be {mesh.device_type!r}, because the device mesh has been built for "
                "it. Use build_device_mesh for another mesh."
            )
        return mesh

    def check(self, world: World) -> None:
        """Check that the layout fits the world size.

        Args:
            world: Processes of the run.

        Raises:
            ValueError: If the layout needs a different number of processes.
        """
        if self.total_size != world.size:
            raise ValueError(
                f"parallelism_config needs a world size of {self.total_size} (dp_replicate_size="
                f"{self.dp_replicate_size} x dp_shard_size={self.dp_shard_size} x tp_size={self.tp_size}), but the "
                f"world size is {world.size}. Change the sizes, or start "
                f"{format_count(self.total_size, 'process')}."
            )

    @property
    def shards(self) -> bool:
        """True if the layout shards the model or uses tensor parallelism; False if it only replicates the model."""
        return self.dp_shard_size > 1 or self.tp_size > 1


_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
# Settings with another value than these would change results, or need more memory than was asked for.
_ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "fsdp_version": (1, 2),
    "activation_checkpointing_offload": (None, False),
    "ignored_modules": (None,),
    "param_init_fn": (None,),
}
# Fields for which ``accelerate launch`` sets a variable with another name, after ``FSDP_``.
_VARIABLES = {"cpu_offload": "OFFLOAD_PARAMS", "transformer_cls_names_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}


def _read_variable(name: str) -> Any:
    """Return the value of a variable: a bool, an int, a string, or None if it is not set."""
    text = os.environ.get(name, "")
    return {"": None, "true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


@dataclass
class FullyShardedDataParallelPlugin:
    """Accelerate's settings for sharded models. Sharding always uses FSDP2.

    A setting that is None is read from the variable that ``accelerate launch`` sets, such as ``FSDP_OFFLOAD_PARAMS``.

    Args:
        fsdp_version: 1 (default) or 2. It selects the default of ``state_dict_type`` only.
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"``, ``"NO_SHARD"`` (replicas), ``"HYBRID_SHARD"`` or
            ``"HYBRID_SHARD_ZERO2"`` (both shard within each machine), their number (1 to 5), or a member of torch's
            ``ShardingStrategy``. Default: ``"FULL_SHARD"``.
        reshard_after_forward: A bool or a number, as in `FSDP`, or any name that ``sharding_strategy`` accepts.
            Default: False for ``"SHARD_GRAD_OP"`` and ``"HYBRID_SHARD_ZERO2"``, otherwise True.
        backward_prefetch: It has no effect.
        mixed_precision_policy: Torch's ``MixedPrecisionPolicy`` (or FSDP1's ``MixedPrecision``).
        auto_wrap_policy: ``"transformer_based_wrap"``, ``"size_based_wrap"``, ``"no_wrap"``, or any non-string
            policy that `FSDP` accepts. Default: None, which uses ``transformer_cls_names_to_wrap`` if it is set,
            otherwise ``min_num_params`` if it is set, and otherwise wraps the repeated blocks.
        cpu_offload: Keep shards in host memory: a bool, or torch's ``CPUOffload`` or ``CPUOffloadPolicy``.
        ignored_modules: Must be None.
        state_dict_type: ``"FULL_STATE_DICT"``, ``"SHARDED_STATE_DICT"``, ``"LOCAL_STATE_DICT"``, or a member of torch's
            ``StateDictType``: the form of what Accelerate's ``save_fsdp_model`` and transformers' ``Trainer`` write.
            Any strategy can load what `Accelerator` saves. Default: the first, or the second for version 2.
        state_dict_config: It has no effect.
        optim_state_dict_config: It has no effect.
        limit_all_gathers: It has no effect.
        use_orig_params: It has no effect.
        param_init_fn: Must be None.
        sync_module_states: It has no effect: rank zero's weights are always sent to the other ranks.
        forward_prefetch: It has no effect.
        activation_checkpointing: Recompute the activations of each wrapped module in the backward pass.
        activation_checkpointing_offload: Must be False or None.
        cpu_ram_efficient_loading: Let transformers' ``from_pretrained`` read weights on rank zero only.
        transformer_cls_names_to_wrap: Classes whose modules are each wrapped as one unit: a list of classes or their
            names, or a string of names separated by commas.
        min_num_params: Minimum number of parameters for a module to be wrapped as one unit.

    Raises:
        ValueError, TypeError: If a value is not supported, or if values contradict each other.

    Examples:
        >>> import treadle
        >>> plugin = treadle.FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap="Block,Head")
        >>> sorted(plugin.strategy().auto_wrap_policy)
        ['Block', 'Head']
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self.fsdp_version = self.fsdp_version or _read_variable("FSDP_VERSION") or 1
        unread = "sharding_strategy" if self.fsdp_version == 2 else "reshard_after_forward"
        for name, value in vars(self).items():
            if value is None and name != unread:
                setattr(self, name, _read_variable(f"FSDP_{_VARIABLES.get(name, name.upper())}"))
        for name, accepted in _ACCEPTED_VALUES.items():
            if (value := getattr(self, name)) not in accepted:
                raise ValueError(f"{name}={value!r} is not supported. Remove it.")
        self.set_state_dict_type()
        if self.cpu_ram_efficient_loading:  # read by transformers
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        from .fsdp import choose_sharding

        sharding = choose_sharding("sharding_strategy", self.sharding_strategy)
        if isinstance(self.reshard_after_forward, str | Enum):
            also = choose_sharding("reshard_after_forward", self.reshard_after_forward)
            if sharding not in (None, also):
                raise ValueError(
                    f"reshard_after_forward={self.reshard_after_forward!r} contradicts "
                    f"sharding_strategy={self.sharding_strategy!r}. Set only one of them."
                )
            sharding, self.reshard_after_forward = also, None
        self._sharding = sharding or "FULL_SHARD"
        self._wrap = self._build_wrap_policy()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the form of what ``save_fsdp_model`` and transformers' ``Trainer`` write; see the class.

        Args:
            state_dict_type: The form. Default: the current one, or that of the version.

        Raises:
            ValueError: If there is no such form.
        """
        from torch.distributed.fsdp import StateDictType

        kind = self.state_dict_type if state_dict_type is None else state_dict_type
        kind = kind or ("SHARDED_STATE_DICT" if self.fsdp_version == 2 else "FULL_STATE_DICT")
        name = str(getattr(kind, "name", kind)).upper()
        self.state_dict_type = StateDictType[choose("state_dict_type", name, StateDictType.__members__)]

    def _build_wrap_policy(self) -> Any:
        policy = self.auto_wrap_policy
        if isinstance(policy, str):
            policy = choose("auto_wrap_policy", policy.lower(), _POLICIES)
        elif policy is not None:
            return policy  # torch's own policies are also accepted
        names = self.transformer_cls_names_to_wrap
        if policy in (None, "transformer_based_wrap") and names:
            listed = names.split(",") if isinstance(names, str) else names
            if not isinstance(listed, Iterable) or not all(isinstance(name, str | type) for name in listed):
                raise TypeError(
                    f"transformer_cls_names_to_wrap={names!r} must be a list of class names, or a string of class "
                    "names separated by commas."
                )
            return frozenset(name.strip() if isinstance(name, str) else name for name in listed)
        if policy in (None, "size_based_wrap") and self.min_num_params:
            return self.min_num_params
        if policy == "size_based_wrap":
            raise ValueError("auto_wrap_policy='size_based_wrap' needs min_num_params. Set min_num_params, too.")
        return (lambda _: False) if policy == "no_wrap" else "auto"

    def strategy(self, parallelism: ParallelismConfig | None = None) -> Strategy:
        """Return an `FSDP` strategy with these settings, or a plain `DDP` strategy for ``"NO_SHARD"``.

        Args:
            parallelism: Numbers of replicas, shards and tensor parallel ranks. Default: one replica, or one per machine
                for the ``HYBRID`` sharding strategies.

        Raises:
            ValueError, TypeError: If a setting is not supported.
        """
        if self._sharding == "NO_SHARD":
            self._check_replicas(parallelism)
            return ddp.DDP()
        from .fsdp import FSDPStrategy

        options = {} if self.reshard_after_forward is None else {"reshard_after_forward": self.reshard_after_forward}
        if parallelism is not None:
            options |= {
                "data_parallel_replicate": parallelism.dp_replicate_size,
                "tensor_parallel_size": parallelism.tp_size,
            }
        return FSDPStrategy(
            auto_wrap_policy=self._wrap,
            activation_checkpointing_policy=True if self.activation_checkpointing else None,
            sharding_strategy=self._sharding,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_policy,
            **options,
        )

    def _check_replicas(self, parallelism: ParallelismConfig | None) -> None:
        """Check that nothing is set that replicas do not have, for ``"NO_SHARD"``."""
        if parallelism is not None and parallelism.shards:
            raise ValueError(
                "sharding_strategy='NO_SHARD' contradicts parallelism_config with "
                f"dp_shard_size={parallelism.dp_shard_size} and tp_size={parallelism.tp_size}. Set "
                "sharding_strategy='FULL_SHARD', or set both sizes to 1."
            )
        from .fsdp import is_offload

        for name, is_set in {
            "cpu_offload": is_offload(self.cpu_offload),
            "activation_checkpointing": bool(self.activation_checkpointing),
            "mixed_precision_policy": self.mixed_precision_policy is not None,
        }.items():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with sharding_strategy='NO_SHARD', which keeps a "
                    f"replica on each process. Remove {name}, or set sharding_strategy='FULL_SHARD'."
                )


def choose_strategy(
    strategy: str | Strategy,
    world: World,
    plugin: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    replicas: DistributedDataParallelKwargs | None = None,
    launched: bool = True,
) -> tuple[Strategy, FullyShardedDataParallelPlugin | None, ParallelismConfig | None]:
    """Return the strategy that the arguments describe, and the two plugins, which ``accelerate launch`` may have set.

    Args:
        strategy: Registry name, such as ``"auto"``, or a `Strategy`.
        world: Processes of the run.
        plugin: Accelerate's settings for sharded models.
        parallelism: The numbers of replicas, shards and tensor parallel ranks.
        replicas: Accelerate's settings for replicated models.
        launched: Whether to read the variables of ``accelerate launch``.

    Raises:
        ValueError, TypeError: If an argument is invalid, or contradicts another argument or the world size.
    """
    check_optional_type("fsdp_plugin", plugin, FullyShardedDataParallelPlugin)
    check_optional_type("parallelism_config", parallelism, ParallelismConfig)
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if launched and _read_variable(f"ACCELERATE_USE_{name}") is True:
            raise ValueError(f"ACCELERATE_USE_{name}=true is not supported. For a sharded model, use strategy='fsdp'.")
    if launched and world.size > 1 and strategy == "auto":
        if plugin is None and _read_variable("ACCELERATE_USE_FSDP"):
            plugin = FullyShardedDataParallelPlugin()
        if parallelism is None and _read_variable("ACCELERATE_USE_PARALLELISM_CONFIG"):
            parallelism = ParallelismConfig()
    if parallelism is not None:
        parallelism.check(world)
    layouts = {
        "fsdp_plugin": plugin,
        "parallelism_config": parallelism if parallelism and parallelism.shards else None,
        "DistributedDataParallelKwargs": None if strategy == "ddp" else replicas,
    }
    for name, value in layouts.items():
        if value is not None and strategy != "auto":
            raise ValueError(f"strategy and {name} each configure the layout of the model. Pass only one of them.")
    from .registry import resolve_strategy

    if plugin is not None:
        chosen = plugin.strategy(parallelism)
    elif layouts["parallelism_config"] is not None:
        chosen = FullyShardedDataParallelPlugin().strategy(parallelism)
    elif replicas is not None and (world.size > 1 or strategy == "ddp"):  # transformers passes them for one process too
        chosen = replicas.strategy()
    else:
        chosen = resolve_strategy(strategy, world)
    return chosen, plugin, parallelism
