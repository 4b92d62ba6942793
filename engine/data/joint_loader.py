"""Prepared `CombinedLoader`."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from ...common.messages import format_count
from ...strategies import World
from ..rng import Draw, RandomStream, isolated_random_state, random_state, seed_from, seed_generators
from .combined_loader import CombinedLoader, compute_joint_length, read_rows
from .dataset_check import find_least
from .loader import Loader
from .micro_batches import Cursor, GroupPlanner, Micro
from .sampler_rng import read_states


class JointBatches:
    """Reader that combines the batches of prepared loaders, and forms accumulation groups with exact weights.

    Attributes:
        passes: The number of passes that each loader has completed in the epoch.
        micros: Metadata of batches that were yielded and that the loop has not processed yet.
    """

    def __init__(self, loaders: list[Loader], source: CombinedLoader, planner: GroupPlanner) -> None:
        self.loaders = loaders
        self.mode = source.mode
        self.form = source.in_form
        self.planner = planner
        self.passes = [0] * len(loaders)
        self.micros: deque[tuple[Micro, Draw | None, None]] = deque()

    def length(self, limit: int | None) -> int | None:
        """Return the number of batches in an epoch, at most ``limit``; None if unknown.

        In mode ``"min_size"``, the result is an upper bound if the length of a loader is unknown.
        """
        return find_least(compute_joint_length(self.mode, [loader.length for loader in self.loaders]), limit)

    def behind(self) -> int:
        """Return the number of batches of this epoch that precede the current positions of the loaders."""
        firsts = [loader for loader, ended in zip(self.loaders, self.passes, strict=True) if not ended]
        lengths = [loader.length for loader in firsts]
        ahead = [None if n is None else n - loader.batches for n, loader in zip(lengths, firsts, strict=True)]
        total, left = self.length(None), compute_joint_length(self.mode, ahead) if ahead else 0
        if total is None or left is None:
            return max((loader.batches for loader in firsts), default=0)
        return total - left

    @property
    def full(self) -> int:
        """Number of samples in a full batch over all processes: the loaders' sum, or in sequential mode the maximum."""
        return (max if self.mode == "sequential" else sum)(loader.total_batch_size for loader in self.loaders)

    @property
    def left_out(self) -> Counter[str]:
        """Numbers of samples and of batches that ``drop_last`` drops per pass over the loaders."""
        return sum((loader.left_out for loader in self.loaders), Counter())

    def batches(self, left: int | None) -> Iterator[Any]:
        """Yield at most ``left`` micro-batches, and add their metadata to ``micros``.

        A group is read before its first batch is yielded, because its weights depend on the whole group.
        """
        self.micros.clear()
        read = self._read()
        while left is None or left > 0:
            width = self.planner.accumulate() if left is None else min(left, self.planner.accumulate())
            group = list(itertools.islice(read, width))
            if not group:
                return
            planned = self.planner.plan([sizes for _, sizes in group])
            for micro, (batch, _) in zip(planned, group, strict=True):
                self.micros.append((micro, None, None))
                yield batch
            left = None if left is None else left - len(group)

    def _read(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield batches, each with its numbers of samples on this process and on all processes."""
        alone = self.planner.size == 1

        def start(number: int, together: bool) -> Iterator[Any]:
            # A plain loop over zip() starts all of them before it reads a batch.
            return self.loaders[number].begun() if together else iter(self.loaders[number])

        for batches, numbers in read_rows(self.mode, start, self.passes):
            micros = [self.loaders[number].micro for number in numbers]
            samples = sum(micro.samples for micro in micros)
            everyone = samples if alone else sum(micro.everyone for micro in micros)
            yield (batches[0] if self.mode == "sequential" else self.form(batches)), (samples, everyone)


class JointLoader(Loader):
    """`CombinedLoader` prepared for this process. Each of its dataloaders is sharded and resumed separately.

    Dataloaders that draw random numbers only at the beginning of an epoch share one random stream, as in a loop over
    ``zip``. A dataloader that draws during the epoch has a separate stream.

    Attributes:
        loaders: The prepared dataloaders.

    Raises:
        TypeError: If the `CombinedLoader` contains a prepared dataloader.
        ValueError: If one of the dataloaders cannot be combined or prepared.

    Example:
        >>> import treadle
        >>> from torch.utils.data import DataLoader
        >>> from treadle.engine import CombinedLoader
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> loader = accelerator.prepare(CombinedLoader([DataLoader(range(2)), DataLoader(range(4))]))
        >>> type(loader).__name__, len(loader), loader.mode
        ('JointLoader', 2, 'min_size')
    """

    _plan: JointBatches  # type: ignore[assignment]

    def _prepare(self, source: Any, world: World, shard: bool, accumulate: Callable[[], int], split: bool) -> None:
        if any(isinstance(dataloader, Loader) for dataloader in source.flattened):
            raise TypeError(
                "CombinedLoader contains a prepared dataloader. Combine the original DataLoaders, then prepare the "
                "CombinedLoader."
            )
        # As in evaluation, every process has a share of a last, short batch: a placeholder would be one part of a batch
        # whose other parts count.
        self.loaders = [
            Loader(
                dataloader,
                world=world,
                cursor=Cursor(),
                stream=self._stream,
                accumulate=lambda: 1,
                shard=shard,
                evaluation=True,
                split=split,
            )
            for dataloader in source.flattened
        ]
        self._loader_streams: dict[int, RandomStream] = {}
        for number, loader in enumerate(self.loaders):
            loader.limit = source.limit_of(number)
            if loader._plan.draws_later:
                self._refuse_shared_generators(loader)
        planner = GroupPlanner(world.rank, world.size, accumulate)
        self._reader = self._plan = JointBatches(self.loaders, source, planner)
        self._reads = [generator for loader in self.loaders for generator in loader._reads]

    @property
    def mode(self) -> str:
        """Mode of the `CombinedLoader`, such as ``"min_size"``."""
        return self._plan.mode

    def _refuse_shared_generators(self, loader: Loader) -> None:
        mine = set(map(id, loader._plan.draws.private))
        for other in self.loaders:
            if other is not loader and mine & set(map(id, other._plan.draws.private)):
                raise ValueError(
                    f"two combined dataloaders share a generator, from which the {type(loader.source).__name__} draws "
                    "during the epoch, so neither can be resumed. Give each dataloader a separate generator."
                )

    def _begin(self) -> Iterator[Any]:
        self._leave_epoch()
        self._position.begin({})  # the loaders store the states that their orders are drawn from
        for number, loader in enumerate(self.loaders):
            if loader._plan.draws_later and number not in self._loader_streams:
                self._loader_streams[number] = _derive_stream(self._stream, number)
                loader.draw_from(self._loader_streams[number])
        length = self.length
        return self._pass_over(self._plan.batches(None if length is None else max(0, length - self.batches)))

    def end_epoch(self) -> None:
        """End the epoch, even if it was left early. A full iteration calls this method."""
        if self._position.order is not None:
            self._plan.passes = [0] * len(self.loaders)
            for loader in self.loaders:
                loader.end_epoch()
        super().end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration over the dataloader.

        The number is also set for each combined dataloader.

        Args:
            epoch: The number of the epoch, from 0.
        """
        super().set_epoch(epoch)
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def keep_order(self) -> bool:
        """Use the same order in every epoch; see `Loader.keep_order`."""
        shuffled = [loader.keep_order() for loader in self.loaders]
        return any(shuffled)

    def close(self) -> None:
        """Shut down all workers of the combined dataloaders; see `Loader.close`."""
        for loader in self.loaders:
            loader.close()

    def agree(self, world: World) -> None:
        """Determine for each combined dataloader whether the ranks share its data; see `Loader.agree`.

        Args:
            world: The ranks that iterate over the dataloaders.
        """
        for loader in self.loaders:
            loader.agree(world)

    def state_dict(self) -> dict[str, Any]:
        """Return a state with each dataloader's position and the number of passes completed over it in this epoch.

        Raises:
            ValueError: If it is called inside a group of micro-batches, because accumulated gradients are not saved.
        """
        self._refuse_inside_group()
        return {
            "mode": self._plan.mode,
            "epoch": self.epoch,
            "samples": self.samples,
            "batches": self.batches,
            "running": self._position.order is not None,
            "passes": list(self._plan.passes),
            "loaders": [loader.state_dict() for loader in self.loaders],
            "streams": {str(number): stream.get_state() for number, stream in self._loader_streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state returned by `state_dict`. The world size may have changed.

        Args:
            state: A state returned by `state_dict`.

        Raises:
            ValueError: If this is a training dataloader and the state does not fit it.
        """
        if self.evaluation and self.describe_difference(state):
            self.set_epoch(state["epoch"])
            return
        self.check(state)
        plan = self._plan
        widths = [saved["width"] for saved in state["loaders"]]
        for loader, saved in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(saved)
            if not self.evaluation:  # the combined loaders themselves count as those of an evaluation
                loader.compare_epoch(saved)
        self._loader_streams = {int(number): RandomStream(stream) for number, stream in state["streams"].items()}
        for number, stream in self._loader_streams.items():
            self.loaders[number].draw_from(stream)
        self._position.load_state_dict({**state, "order": {} if state["running"] else None, "started": False})
        plan.passes = list(state["passes"])
        if widths != [loader._plan.full for loader in self.loaders]:
            self._position.batches = plan.behind()  # with another number of processes, each has fewer or more batches
        self._last = None

    def reading_state(self) -> dict[str, Any]:
        """Return the state of this rank alone; see `Loader.reading_state`."""
        return {**super().reading_state(), "loaders": [loader.reading_state() for loader in self.loaders]}

    def load_reading_state(self, state: dict[str, Any] | list[Any]) -> None:
        """Restore the state of this rank; see `Loader.load_reading_state`.

        Args:
            state: A state returned by `reading_state`.
        """
        super().load_reading_state(state)
        within = state["loaders"] if isinstance(state, dict) else []
        for loader, loader_state in zip(self.loaders, within, strict=False):
            loader.load_reading_state(
                {**loader_state, "generators": read_states(loader._reads)}
            )  # they are already restored

    def check(self, state: dict[str, Any]) -> None:
        """Check that a saved state fits the dataloaders.

        Args:
            state: A state returned by `state_dict`.

        Raises:
            ValueError: If the state does not fit.
        """
        if text := self.describe_difference(state):
            raise ValueError(f"{text}. Pass the same dataloaders, or load only the weights with treadle.load_weights.")

    def describe_difference(self, state: dict[str, Any]) -> str:
        """Return a description of the first mismatch between a saved state and the dataloaders; empty if none."""
        count, mode = len(self.loaders), self._plan.mode
        saved_count = len(state["loaders"]) if "loaders" in state else 1
        if saved_count != count or "loaders" not in state:
            saved_loaders = format_count(saved_count, "training dataloader")
            return f"the checkpoint was saved with {saved_loaders}, but this run combines {count}"
        if state["mode"] != mode:
            return (
                f"the checkpoint was saved with CombinedLoader(mode={state['mode']!r}), but this run uses mode={mode!r}"
            )
        pairs = zip(self.loaders, state["loaders"], strict=True)
        return next(filter(None, (loader.describe_difference(saved) for loader, saved in pairs)), "")


def _derive_stream(stream: RandomStream, number: int) -> RandomStream:
    with isolated_random_state():
        seed_generators(seed_from(stream.get_state(), f"loader {number}") % 2**32)
        return RandomStream(random_state())
