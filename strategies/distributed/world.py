"""`World`: the rank and device of this process, the world size, and the collectives."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...common.messages import describe_error, format_count
from ...common.validation import check_int, choose
from . import process_group
from .launch_environment import read_debug_interval
from .tracebacks import PeerFailed
from .training_clock import progress
from .waiting_call import check_marks, mark_call, mark_exchange

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# Types that gloo and NCCL support; tensors of other types, such as int16 or float8, are sent as bytes.
_CARRIED = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}

_TIMEOUT = timedelta(minutes=30)

REPLICATE, SHARD, TENSOR = "data_replicate", "data_parallel", "tensor_parallel"


class World:
    """Processes of a run, as seen from one of them. With a world size of one, collectives return immediately.

    Args:
        rank: Rank of this process, starting at 0. Default: 0.
        size: Number of processes. Default: 1.
        local_rank: Rank of this process on its machine. Default: 0.
        local_size: Number of processes on this machine. Default: 1.
        node_rank: Index of this machine. Default: 0.
        device: Device of this process. Default: the CPU.
        timeout: Maximum time that a collective waits. Default: the timeout of an existing process group, or 30
            minutes if there is none.
        group: Torch process group of these processes. If it is set, ``rank`` and ``size`` refer to this group. Default:
            the group of all processes.
        address: Host and port on which rank 0 listens. Default: MASTER_ADDR and MASTER_PORT.
        run_id: Identifier that distinguishes runs that use the same address. Default: ``""``.
        backend: Torch communication backend, such as ``"gloo"``. Default: gloo for host memory and NCCL for GPUs.

    Raises:
        ValueError: If an argument is invalid or contradicts an existing process group, or if the processes run
            different versions of torch or Treadle.
        RuntimeError: If the other processes do not connect within the timeout.

    Examples:
        >>> import torch
        >>> from treadle.strategies import World
        >>> world = World()
        >>> world.is_main, world.gather_objects("text"), world.all_reduce(torch.ones(2), "mean")
        (True, ['text'], tensor([1., 1.]))
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        node_rank: int = 0,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        group: dist.ProcessGroup | None = None,
        address: tuple[str, int] | None = None,
        run_id: str = "",
        backend: str | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.node_rank = node_rank
        self.device = device or torch.device("cpu")
        existing = process_group.existing_timeout(self.device) if timeout is None and size > 1 else None
        self.timeout = timeout or existing or _TIMEOUT
        self.group = group
        self._background: World | None = None
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self.debug_interval = read_debug_interval()  # None if debugging is disabled
        self._counts = size > 1 and group is None
        self._comparison_group = group
        self._carried_devices = {"cpu", self.device.type}
        if group is not None:
            self._note_carried_devices()
            return
        from ...common.rank_zero import rank_zero_only  # here, as its package takes time to import

        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        if self.device.type == "cuda":
            process_group.let_segments_grow()
            torch.cuda.set_device(self.device)
        if size > 1:
            process_group.connect(self.device, rank, size, self.timeout, address, run_id, backend)
            if timeout is not None:
                process_group.set_timeout(timeout)
            self._note_carried_devices()
            if dist.get_backend() != "fake":  # the group of a plan has no other processes
                process_group.make_communicators(self.device)
                if self.debug_interval is not None:
                    self._comparison_group = process_group.comparison_group(self.timeout)

    def _note_carried_devices(self) -> None:
        """Record the device types that the group supports, because it may support only GPUs."""
        if self.device.type != "cpu":
            parts = dist.get_backend_config(self.group).split(",")
            self._carried_devices = {part.partition(":")[0] for part in parts}

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy on this process's device if the group does not support the tensor's device."""
        return tensor if tensor.device.type in self._carried_devices else tensor.to(self.device, copy=True)

    def form_group(self) -> None:
        """Create torch's process group, which a world of one has only after this call."""
        process_group.connect(self.device, self.rank, self.size, self.timeout)

    def mesh(self, **dimensions: int) -> DeviceMesh:
        """Return a mesh of the processes, with the ranks in row-major order.

        Args:
            dimensions: Size of each dimension, by name: ``mesh(replicate=2, shard=4)``. The product of the sizes must
                be the world size.

        Raises:
            ValueError: If the product is not the world size.
        """
        if math.prod(dimensions.values()) != self.size:
            grid = " x ".join(f"{name}={size}" for name, size in dimensions.items())
            count = math.prod(dimensions.values())
            processes = format_count(count, "process")
            raise ValueError(
                f"a mesh of {grid} needs {processes}, but the world size is {self.size}. Start {processes}, or choose "
                f"dimensions whose product is {self.size}."
            )
        key = tuple(dimensions.items())
        if key not in self._meshes:
            self.form_group()
            self._compare(" ".join(("mesh", *(f"{name}={size}" for name, size in dimensions.items()))))
            shape, names = tuple(dimensions.values()), tuple(dimensions)
            self._meshes[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[key]

    def part(self, mesh: DeviceMesh) -> World:
        """Return the processes of a one-dimensional mesh as a separate world.

        Args:
            mesh: One-dimensional mesh that includes this process.
        """
        return self._derive(rank=mesh.get_local_rank(), size=mesh.size(), group=mesh.get_group())

    def background_world(self) -> World:
        """Return a world of the same processes, for a background thread.

        The new world communicates on the CPU, through a separate gloo group. Must be called on all ranks. With a
        world size of one, the result is this world.
        """
        if self.size == 1:
            return self
        if self._background is None:
            group = self._take_spare_line() if self.group is None else None
            if group is None:
                ranks = None if self.group is None else dist.get_process_group_ranks(self.group)
                group = dist.new_group(ranks, self.timeout, "gloo")
            self._background = self._derive(rank=self.rank, size=self.size, group=group, device=torch.device("cpu"))
        return self._background

    def release_background_world(self) -> None:
        """Release the group of `background_world`, so that a later World with the same timeout can reuse it.

        The group must no longer be in use.
        """
        if self._background is not None and self._background.group is not None and self.group is None:
            process_group.spare_lines.append((self.timeout, self._background.group))
        self._background = None

    def _take_spare_line(self) -> dist.ProcessGroup | None:
        """Return a group that an earlier World has released on all ranks, or None if there is none."""
        name = ""
        lines = process_group.spare_lines
        if lines and lines[-1][0] == self.timeout:
            name = lines[-1][1].group_name  # torch counts the groups, so the name is the same on all ranks
        # Requested even if this rank has none, because another may have one after a stage that failed on this rank
        # alone.
        if self.gather_objects(name) != [name] * self.size or not name:
            return None
        return lines.pop()[1]

    def forget_parts(self) -> None:
        """Discard the meshes and the group of `background_world` before the process group is replaced."""
        self._background = None
        self._meshes.clear()

    @property
    def is_main(self) -> bool:
        """True on rank zero."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        if self.size > 1:
            self._enter("barrier")
            dist.barrier(self.group)

    def advance(self) -> None:
        """Record that this process is entering a training step or a collective."""
        if self._counts:
            progress.entered += 1

    def _enter(self, operation: str, tensor: torch.Tensor | None = None) -> None:
        self.advance()
        self._compare(operation, tensor)

    def _compare(self, operation: str, tensor: torch.Tensor | None = None) -> None:
        """In debug mode, check that all processes are about to make the same call, with the same form of tensor."""
        # Not by TORCH_DISTRIBUTED_DEBUG=DETAIL: with torch 2.13, DDP over gloo then ends in SIGSEGV where it wraps a
        # model, and the error for a barrier and a broadcast says that the other rank runs GATHER or REDUCE. It does not
        # name the lines of the script either.
        if self.debug_interval is not None and self.size > 1:
            if tensor is not None:
                operation += f" of {str(tensor.dtype)[6:]} {list(tensor.shape)} on {tensor.device.type}"
            entries: list[Any] = [None] * self.size
            dist.all_gather_object(entries, mark_call(operation), self._comparison_group)
            check_marks({self._get_global_rank(rank): mark for rank, mark in enumerate(entries)})

    def claim(self, name: str) -> bool:
        """Return whether this process is the first to claim a name. With a world size of one, the result is True.

        This method need not be called on all ranks.

        Args:
            name: Name that only one process can claim.
        """
        if self.size == 1:
            return True
        store = dist.PrefixStore("treadle claims", dist.distributed_c10d._get_default_store())
        try:
            return bool(store.add(name, 1) == 1)
        except RuntimeError:  # the process that held the store has ended, so it called this earlier
            return False

    def meet(self, call: str, is_passed: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every process has entered ``call``, and return whether they have.

        Does nothing in a world that was created with a ``group``.

        Args:
            call: Name of the call, for error messages. It must be the same on all processes.
            is_passed: Function that is called while this process waits. If it returns True, the result is False.

        Raises:
            RuntimeError: If another process does not enter the call within the timeout. If it can no longer enter the
                call, the watchdog ends the run earlier.
        """
        if self.size > 1 and self.group is None:
            self._compare("meet")
            return self._await_arrivals(call, is_passed)
        return True

    def _await_arrivals(self, call: str, is_passed: Callable[[], bool]) -> bool:
        """Wait in the group's store, because a collective might match another one in which a rank waits.

        The store is polled, because its own wait delays signal handlers.
        """
        # Private, but present in torch from 1.x to 2.13: the store that the group was created with.
        store = dist.distributed_c10d._get_default_store()
        arrived, seconds = f"treadle meetings/{call} {process_group.meetings[call]}", self.timeout.total_seconds()
        deadline, pause = time.monotonic() + seconds, 0.0005
        count = store.add(arrived, 1)
        try:
            while count < self.size:
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        f"{call} needs all processes, but only {count} of {self.size} called it within {seconds:g} s. "
                        "Call it on every rank, not under `if trainer.is_global_zero:` or `if "
                        "accelerator.is_main_process:`. Each file is still written only once."
                    )
                if is_passed():
                    store.add(arrived, -1)
                    return False
                time.sleep(pause)
                pause = min(1.5 * pause, 0.05 + self.size / 5000)
                count = store.add(arrived, 0)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store may have ended with its process
                store.add(arrived, -1)  # the next call may be one that all ranks make
            raise
        process_group.meetings[call] += 1
        progress.note_meeting()
        return True

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """Reduce ``tensor`` over all processes, in place.

        Args:
            tensor: A tensor with the same shape on every process.
            operation: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. The mean of integers is rounded down. Default:
                ``"sum"``.

        Returns:
            ``tensor`` itself.

        Raises:
            ValueError, RuntimeError: If the operation is unknown. With several processes, also if the operation does
                not support the dtype.
        """
        op = _OPERATIONS[choose("operation", operation, _OPERATIONS)]
        if self.size > 1:
            self._enter(f"all_reduce {operation}", tensor)
            placed = self._place(tensor)
            dist.all_reduce(placed, op, self.group)
            if placed is not tensor:
                tensor.copy_(placed)
            if operation == "mean":
                exact = tensor.is_floating_point() or tensor.is_complex()
                tensor.div_(self.size) if exact else tensor.floor_divide_(self.size)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start summing ``tensor`` over all processes, in place.

        Args:
            tensor: A tensor with the same shape on every process.

        Returns:
            Torch's ``Work`` handle to wait on before the tensor is read, or None if the sum is already complete.
        """
        if self.size == 1:
            return None
        if tensor.device.type not in self._carried_devices:
            self.all_reduce(tensor)
            return None
        self._enter("start_all_reduce", tensor)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all processes, in rank order.

        Args:
            tensor: A tensor with the same shape on every process.
        """
        if self.size == 1:
            return [tensor]
        carried = _as_carried(self._place(tensor))
        parts = [torch.empty_like(carried) for _ in range(self.size)]
        self._enter("all_gather", tensor)
        dist.all_gather(parts, carried, self.group)
        return [part.view(tensor.dtype).reshape(tensor.shape).to(tensor.device) for part in parts]

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes of ``tensor[rank]``, where ``rank`` is that of this process.

        Args:
            tensor: A tensor with the same shape on every process. The size of its first dimension is the world size.
        """
        if self.size == 1:
            return tensor[0]
        self._enter("reduce_scatter", tensor)
        placed = self._place(tensor)
        summed = torch.empty_like(placed[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(summed.reshape(-1), placed.contiguous().reshape(-1), group=self.group)
        return summed.to(tensor.device)

    def of_group(self, group: dist.ProcessGroup) -> World:
        """Return the processes of a user-defined process group as a separate world.

        Args:
            group: Torch process group that includes this process.

        Raises:
            ValueError: If this process is not in the group.
        """
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"rank {self.rank} is not in the given process group. Make this call only on the ranks of the group."
            )
        return self._derive(rank=rank, size=dist.get_world_size(group), group=group)

    def _derive(self, **place: Any) -> World:
        """Return a world of other processes, or with another group, at this process's place on its machine."""
        inherited = ("local_rank", "local_size", "node_rank", "device", "timeout")
        return World(**{name: getattr(self, name) for name in inherited} | place)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all processes, in rank order, on every process.

        Args:
            value: Any object that can be pickled.

        Raises:
            DistributedOperationException: If the processes exchange objects in calls that do not match.
        """
        if self.size == 1:
            return [value]
        entries: list[Any] = [None] * self.size
        self._enter("gather_objects")
        dist.all_gather_object(entries, (mark_exchange(), self._wrap(value)), self.group)
        check_marks({self._get_global_rank(rank): mark for rank, (mark, _) in enumerate(entries)})
        return [_unwrap(value) for _, value in entries]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of process ``source`` on every process.

        Args:
            value: Any object that can be pickled.
            source: The rank whose value is returned. Default: 0.

        Raises:
            DistributedOperationException: If this process and ``source`` exchange objects in calls that do not match.
        """
        if self.size == 1:
            return value
        mark = mark_exchange()
        box = [(mark, self._wrap(value))]
        self._enter(f"broadcast from {source}")
        sender = self._get_global_rank(source)
        dist.broadcast_object_list(box, sender, self.group)
        if self.rank != source:
            check_marks({sender: box[0][0], self._get_global_rank(self.rank): mark})
        return _unwrap(box[0][1])

    def _wrap(self, value: Any) -> Any:
        return value if self.device.type == "cpu" else _ForAnyDevice(value)

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy the tensor of process ``source`` into ``tensor`` on every process.

        Args:
            tensor: A tensor with the same shape on every process.
            source: The rank whose tensor is copied. Default: 0.

        Returns:
            ``tensor`` itself.
        """
        if self.size > 1:
            placed = self._place(tensor)
            carried = placed if tensor.dtype in _CARRIED else _as_carried(placed)
            self._enter(f"broadcast_tensor from {source}", tensor)
            dist.broadcast(carried, self._get_global_rank(source), self.group)
            if carried is not tensor:
                tensor.copy_(carried.view(tensor.dtype).reshape(tensor.shape))
        return tensor

    def _get_global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on at least one process. Must be called on all ranks.

        Args:
            flag: The flag of this process.
        """
        if self.size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(int(flag), device="cpu"), "max").item())

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on every process. Must be called on all ranks.

        Args:
            flag: The flag of this process.
        """
        return not self.any(not flag)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Return a context that makes a block succeed or fail on all processes together.

        Every process must run the block. If the block fails on a process, all processes raise an error; see
        `raise_together`. A KeyboardInterrupt is raised immediately, and only on the process that it interrupts.
        """
        error: BaseException | None = None
        try:
            yield
        except (Exception, SystemExit) as caught:
            error = caught
        self.raise_together(error)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise an error on every process if any of them failed. A failed process raises its own error.

        Args:
            error: The error of this process, or None.

        Raises:
            PeerFailed: On the processes that did not fail, unless SystemExit is raised.
            SystemExit: On the processes that did not fail, if the lowest failed rank exited with a numeric status.
        """
        if self.size > 1:
            words = None if error is None else describe_error(error)
            status = (error.code or 0) if isinstance(error, SystemExit) else None  # sys.exit() equals sys.exit(0)
            try:
                errors = self.gather_objects(None if words is None else (words, status))
            except Exception:
                if error is None:
                    raise
                raise error from None  # the others have ended; that must not hide why this rank leaves
            failed = [(rank, *failure) for rank, failure in enumerate(errors) if failure is not None]
            if failed and error is None:
                if isinstance(failed[0][2], int):
                    raise SystemExit(failed[0][2])
                raise PeerFailed(f"rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error


@dataclass(frozen=True)
class Layout:
    """Sizes of a mesh of processes.

    Args:
        data: Number of processes over which the data is sharded; ``"auto"`` means the world size divided by ``tensor``.
        replicate: Number of replicas.
        tensor: Number of processes that share the work on one sample.
    """

    data: int | str = "auto"
    replicate: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        flags = {"data_parallel_replicate": self.replicate, "tensor_parallel_size": self.tensor}
        if self.data != "auto":
            flags["data_parallel_size"] = self.data  # type: ignore[assignment]
        for flag, value in flags.items():
            check_int(flag, value, 1)

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the sizes of the mesh by dimension. Dimensions of size 1, except ``"data_parallel"``, are omitted."""
        data, left = divmod(world_size, self.tensor)
        if left:
            raise ValueError(
                f"tensor_parallel_size={self.tensor} must divide the world size, {world_size}. Change "
                "tensor_parallel_size or the number of processes."
            )
        if self.data not in ("auto", data):
            raise ValueError(
                f"data_parallel_size={self.data} times tensor_parallel_size={self.tensor} must be the world size, "
                f"{world_size}. Use data_parallel_size='auto'."
            )
        shard, left = divmod(data, self.replicate)
        if left:
            divisor = "" if self.tensor == 1 else f" divided by tensor_parallel_size={self.tensor}"
            raise ValueError(
                f"data_parallel_replicate={self.replicate} must divide {data}, the world size{divisor}. Change "
                "data_parallel_replicate or the number of processes."
            )
        sizes = {REPLICATE: self.replicate, SHARD: shard, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if name == SHARD or size > 1}

    def mesh(self, world: World) -> DeviceMesh:
        """Return the mesh of all processes."""
        return world.mesh(**self.sizes(world.size))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the submesh over which this process's parameters are sharded and replicated."""
        if self.tensor == 1:
            return mesh
        return mesh[REPLICATE, SHARD] if self.replicate > 1 else mesh[SHARD]

    def data_world(self, world: World) -> World:
        """Return the `World` over which the data is sharded: this process and one process for each other share."""
        if self.tensor == 1:
            return world
        return world.part(world.mesh(data=world.size // self.tensor, tensor=self.tensor)["data"])


class _ForAnyDevice:
    """Object that is sent between processes; its tensors arrive on the device of the receiving process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(self.value, buffer)
        return _load_here, (buffer.getvalue(),)


def _load_here(data: bytes) -> _ForAnyDevice:
    def place(storage: Any, location: str) -> Any:
        return torch.serialization.default_restore_location(storage, _location_here(location))

    return _ForAnyDevice(torch.load(io.BytesIO(data), map_location=place, weights_only=False))


def _location_here(location: str) -> str:
    """Return this process's device for the sender's ``location``, such as "cuda:3"."""
    kind = location.partition(":")[0]
    return location if kind in ("cpu", "meta") else f"{kind}:{torch.get_device_module(kind).current_device()}"


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, _ForAnyDevice) else value


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that collectives support. Unsupported dtypes are flattened and viewed as uint8."""
    return tensor.contiguous() if tensor.dtype in _CARRIED else tensor.contiguous().reshape(-1).view(torch.uint8)
