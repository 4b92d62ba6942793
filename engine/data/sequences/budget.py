"""Batches of samples of different lengths, each as large as a budget of tokens or of another cost allows."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from ....common.messages import format_count
from ....common.validation import check_bool, check_int, check_positive, choose

Cost = Callable[[np.ndarray], float]

_COSTS: dict[str, Cost] = {"padded": lambda lengths: len(lengths) * lengths.max(), "sum": lambda lengths: lengths.sum()}


class OverBudgetError(ValueError):
    """Error about a sample whose cost alone exceeds the budget.

    Attributes:
        budget: The smallest budget that fits each sample.
    """

    budget: float = 0.0


class BudgetBatchSampler(Sampler[list[int]]):
    """Batch sampler whose batches have as many samples as a budget allows.

    Samples of similar length are batched together: in each epoch, they are shuffled, sorted into ``buckets`` by length,
    and cut into batches in this order; then the batches are shuffled. The order depends only on ``seed`` and the epoch.

    Treadle interprets the batches as global batches: each is split over the ranks at similar cost. A run therefore
    takes the same optimizer steps with any world size. If a batch has fewer samples than there are ranks, the other
    ranks take part with weight 0.

    Args:
        lengths: Length of each sample of the dataset, for example in tokens.
        budget: Maximum cost of a batch over all ranks.
        cost: Cost of a batch. ``"padded"`` is the number of samples times the largest length, which is the size of a
            padded batch. ``"sum"`` is the sum of the lengths. A function receives an array with the lengths of the
            samples and returns the cost, which must not decrease if a sample is added. Default: ``"padded"``.
        buckets: Number of buckets, with the same number of samples in each. With more buckets, lengths in a batch are
            more similar, and the composition of the batches is less random. Default: 32.
        shuffle: Whether to shuffle. If False, batches are ordered by length. Default: True.
        drop_last: Whether to drop the last batch to be composed if it has space for another sample as short as its
            shortest. Default: False.
        oversized: ``"raise"`` raises an error for a sample whose cost exceeds the budget. ``"alone"`` puts it into a
            batch of its own. Default: ``"raise"``.
        seed: Seed of the order. Default: 0.

    Attributes:
        budget: The maximum cost.
        num_samples: Number of samples of the dataset.
        largest: The largest cost of a single sample.
        total: The budget that a single batch of all samples would need.

    Raises:
        ValueError: If a sample's cost exceeds the budget, or an argument is invalid.

    Examples:
        >>> from treadle.data import BudgetBatchSampler
        >>> sampler = BudgetBatchSampler([5, 2, 3, 9, 2, 4], budget=10, shuffle=False)
        >>> list(sampler)
        [[1, 4, 2], [5, 0], [3]]
        >>> sampler.split_batch([1, 4, 2], 2)
        [[2], [1, 4]]
    """

    def __init__(
        self,
        lengths: Any,
        budget: float,
        *,
        cost: Literal["padded", "sum"] | Cost = "padded",
        buckets: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        oversized: str = "raise",
        seed: int = 0,
    ) -> None:
        numbers = np.asarray(lengths)
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iuf" or not (numbers >= 0).all():
            raise ValueError(
                f"lengths={lengths!r:.100} must hold one number of at least 0 for each sample of the dataset."
            )
        self._lengths = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)  # products may be large
        self.num_samples = len(numbers)
        self.budget = check_positive("budget", budget)
        self._cost = cost if callable(cost) else _COSTS[choose("cost", cost, _COSTS)]
        self.shuffle = check_bool("shuffle", shuffle)
        self.drop_last = check_bool("drop_last", drop_last)
        self.seed = check_int("seed", seed, 0)
        self.epoch = 0
        distinct, kinds = np.unique(self._lengths, return_inverse=True)
        self._costs = np.array([float(self._cost(distinct[at : at + 1])) for at in range(len(distinct))])[kinds]
        if not (self._costs >= 0).all():  # also NaN
            worst = int(np.argmin(self._costs >= 0))
            raise ValueError(
                f"cost returned {self._costs[worst]:g} for sample {worst} of length {self._lengths[worst]}. It must "
                "return a number of at least 0."
            )
        self.largest, self.total = float(self._costs.max()), float(self._cost(self._lengths))
        if choose("oversized", oversized, ("raise", "alone")) == "raise" and self.largest > budget:
            self._raise_over_budget()
        by_length = np.argsort(self._lengths, kind="stable")
        self._bucket = np.empty(len(by_length), dtype=np.int64)
        self._bucket[by_length] = np.arange(len(by_length)) * check_int("buckets", buckets, 1) // len(by_length)
        self._batches: tuple[tuple[int, int], list[np.ndarray]] | None = None  # of an epoch, and its seed and number

    def _raise_over_budget(self) -> None:
        over = np.flatnonzero(self._costs > self.budget)
        more = "" if len(over) == 1 else f" ({format_count(len(over) - 1, 'other sample')} too)"
        error = OverBudgetError(
            f"sample {over[0]} of length {self._lengths[over[0]]} costs {self._costs[over[0]]:g}, more than budget="
            f"{self.budget:g}{more}. Increase the budget to at least {self.largest:g}, shorten the sample, or pass "
            "oversized='alone' to put it into a batch of its own."
        )
        error.budget = self.largest
        raise error

    def __iter__(self) -> Iterator[list[int]]:
        return map(np.ndarray.tolist, self._compose())

    def __len__(self) -> int:
        """Return the number of batches in the current epoch. Epochs may differ in length."""
        return len(self._compose())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, whose order the next iteration has."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the seed and the epoch."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore a state returned by `state_dict`."""
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]

    def split_batch(self, batch: list[int], parts: int) -> list[list[int]]:
        """Split a batch into parts of similar cost.

        The samples are assigned in the order of decreasing cost, each to the part with the least cost so far.

        Args:
            batch: Indices of the samples.
            parts: Number of parts. Those that get no sample are empty.
        """
        costs, split = self._costs[batch].tolist(), [list[int]() for _ in range(parts)]
        part_of_place, heap = [0] * len(batch), [(0.0, 0, part) for part in range(parts)]
        for place in sorted(range(len(batch)), key=lambda place: -costs[place]):
            cost, count, part = heap[0]
            part_of_place[place] = part
            heapq.heapreplace(heap, (cost + costs[place], count + 1, part))
        for index, part in zip(batch, part_of_place, strict=True):
            split[part].append(index)
        return split

    def _compose(self) -> list[np.ndarray]:
        key = self.seed, self.epoch
        if self._batches is None or self._batches[0] != key:
            generator, count = np.random.default_rng(key), len(self._lengths)
            order = generator.permutation(count) if self.shuffle else np.argsort(self._lengths, kind="stable")
            order = order[np.argsort(self._bucket[order], kind="stable")]
            lengths, ends = self._lengths[order], [0]
            while ends[-1] < count:
                ends.append(self._find_end(lengths, ends[-1]))
            batches = np.split(order, ends[1:-1])
            last = self._lengths[batches[-1]]
            if self.drop_last and self._cost(np.append(last, last.min())) <= self.budget:
                batches.pop()
            if self.shuffle:
                batches = [batches[number] for number in generator.permutation(len(batches))]
            self._batches = key, batches
        return self._batches[1]

    def _find_end(self, lengths: np.ndarray, start: int) -> int:
        """Return the end of the largest batch from ``start`` within the budget; it has at least one sample."""

        def compute_cost(end: int) -> float:
            return self._cost(lengths[start:end])

        end, step = start + 1, 1
        while end + step <= len(lengths) and compute_cost(end + step) <= self.budget:
            end, step = end + step, 2 * step
        return end + bisect_right(range(end + 1, min(end + step, len(lengths) + 1)), self.budget, key=compute_cost)
