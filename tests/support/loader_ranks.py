"""Ranks of a loader in one process, and what they read."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from treadle.engine.checkpoint.json_codec import decode, encode
from treadle.engine.data.loader import Cursor, Loader
from treadle.engine.rng import ProcessStream, RandomStream, random_state


@dataclass
class Seat:
    rank: int
    size: int
    device = torch.device("cpu")


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def flat(lists):
    return [item for part in lists for item in part]


def plain_list(loader):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def make_alone(source, stream, cursor=None, accumulate=1):
    """The loader of a process without others."""
    return Loader(source, world=Seat(0, 1), cursor=cursor or Cursor(), stream=stream, accumulate=lambda _: accumulate)


class Ranks:
    """One `Loader` per rank, over loaders that the same code built, as in a script that every rank runs."""

    kind = Loader

    def __init__(self, make, size, accumulate=1, evaluation=False, state=None, run_seed=7, limit=None, process=False):
        seed(run_seed)
        self.loaders, self.cursors, self.streams = [], [], []
        for rank in range(size):
            cursor, stream = Cursor(), ProcessStream() if process else RandomStream(random_state())
            loader = self.kind(
                make(),
                world=Seat(rank, size),
                cursor=cursor,
                stream=stream,
                accumulate=lambda _: accumulate,
                evaluation=evaluation,
            )
            if limit is not None:
                loader.limit = limit
            if state is not None:
                loader.load_state_dict(decode(*encode(state["loader"])))
                stream.go_to(decode(*encode(state["stream"])))
            self.loaders.append(loader)
            self.cursors.append(cursor)
            self.streams.append(stream)

    def state(self):
        return {"loader": self.loaders[0].state_dict(), "stream": self.streams[0].get_state()}

    def epoch(self, stop=None, noise=False):
        """Global batches as (own ids of each rank, facts of each rank), at most `stop` of them."""
        for pieces in itertools.islice(zip(*map(iter, self.loaders), strict=True), stop):
            facts = [cursor.micro for cursor in self.cursors]
            if noise:  # a dropout, a user's random.random()
                torch.rand(3), random.random(), np.random.rand()
            yield (
                [[int(i) for i in np.atleast_1d(p)] if m.samples else [] for p, m in zip(pieces, facts, strict=True)],
                facts,
            )

    def ids(self, stop=None, noise=False):
        return [flat(parts) for parts, _ in self.epoch(stop, noise)]


class Lazy(Sampler):
    """Draws each index when it is asked for: from a generator of the process, or from one of its own."""

    def __init__(self, n, kind="torch"):
        self.n, self.kind, self.epochs = n, kind, []
        own = {
            "own": np.random.default_rng(3),
            "own-torch": torch.Generator().manual_seed(3),
            "own-python": random.Random(3),
        }
        self.generator = own.get(kind)

    def draw(self, high):
        if "torch" in self.kind:
            return int(torch.randint(high, (), generator=self.generator))
        if "python" in self.kind:
            return (self.generator or random).randrange(high)
        return int(np.random.randint(high) if self.generator is None else self.generator.integers(high))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        left = list(range(self.n))
        while left:
            yield left.pop(self.draw(len(left)))

    def __len__(self):
        return self.n


LAZY = ["torch", "python", "numpy", "own", "own-torch", "own-python"]


class Negated(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield -batch
