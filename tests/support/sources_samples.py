"""Every kind of data source that users bring, each with the samples 0 to 95, as a script on any rank builds it."""

import io
import os
import random
import tarfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

SAMPLES = 96
BATCH = 4


def rank_and_size():
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def of_this_worker(ids):
    info = get_worker_info()
    return ids if info is None else ids[info.id :: info.num_workers]


class Stream(IterableDataset):
    """One stream, the same on every rank; shared out among the workers."""

    def __init__(self, ids=range(SAMPLES)):
        self.ids = list(ids)

    def __iter__(self):
        return iter(of_this_worker(self.ids))


class ByRank(Stream):
    """A stream that looks at the rank, as Lightning's users write it; without `lost` samples at its end."""

    def __init__(self, lost=0):
        super().__init__(range(SAMPLES - lost))

    def __iter__(self):
        rank, size = rank_and_size()
        return iter(of_this_worker(self.ids[rank::size]))


class Knowing(ByRank):
    """The same, which knows where it stands."""

    at = 0

    def __iter__(self):
        rank, size = rank_and_size()
        mine = of_this_worker(self.ids[rank::size])
        start, self.at = self.at, 0
        for self.at, value in enumerate(mine[start:], start + 1):
            yield value
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class CountsEpochs(IterableDataset):
    """Shuffles by an epoch that it counts by itself."""

    epoch_seed = 5

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        ids = list(range(SAMPLES))
        random.Random(self.epoch_seed + self.epoch).shuffle(ids)
        return iter(of_this_worker(ids))


class DrawsFromTorch(IterableDataset):
    """Shuffles with torch's default generator."""

    def __iter__(self):
        return iter(of_this_worker(torch.randperm(SAMPLES).tolist()))


class Rewinds:
    """A loader whose ``__iter__`` rewinds it and returns itself."""

    def __init__(self, ids, batch=BATCH):
        self.ids, self.batch = ids, batch

    def __iter__(self):
        self.left = list(self.ids)
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        batch, self.left = self.left[: self.batch], self.left[self.batch :]
        return torch.tensor(batch)

    def __len__(self):
        return -(-len(self.ids) // self.batch)


class LooksAtRank:
    """A sampler that yields each rank a share of its own, and says so nowhere; `lost` of all samples are left out."""

    def __init__(self, lost=0):
        rank, size = rank_and_size()
        self.ids = list(range(SAMPLES - lost))[rank::size]

    def __iter__(self):
        return iter(random.sample(self.ids, len(self.ids)))

    def __len__(self):
        return len(self.ids)


class Buckets:
    """A batch sampler of its own: batches of 3 and 5 in another order in each epoch."""

    def __init__(self):
        ends = sorted([*range(0, SAMPLES, 8), *range(3, SAMPLES, 8), SAMPLES])
        self.batches = [list(range(*pair)) for pair in pairwise(ends)]

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))

    def __len__(self):
        return len(self.batches)


class RewindingSampler(Rewinds):
    """A sampler of that kind: batches of one are its samples."""

    def __next__(self):
        return super().__next__().item()


def hf_table():
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(SAMPLES))})


def hf_stream():
    return hf_table().to_iterable_dataset(num_shards=4)


def shuffled(stream):
    return stream.shuffle(seed=3, buffer_size=16)


def split_by_node(dataset):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, *rank_and_size())


def evens_doubled(batch):
    return {"id": [i for i in batch["id"] for _ in range(2) if i % 2 == 0]}


def hf_ids(rows):
    return torch.tensor([row["id"] for row in rows])


def hf(dataset, **settings):
    return DataLoader(dataset, batch_size=BATCH, collate_fn=hf_ids, **settings)


def write_tars(folder, shards=4):
    """WebDataset's format: one small file for each sample."""
    for shard in range(shards):
        with tarfile.open(Path(folder) / f"{shard}.tar", "w") as tar:
            for number in range(shard, SAMPLES, shards):
                payload = str(number).encode()
                entry = tarfile.TarInfo(f"{number:04d}.txt")
                entry.size = len(payload)
                tar.addfile(entry, io.BytesIO(payload))


def tar_ids(samples):
    return torch.tensor([int(sample["txt"]) for sample in samples])


def web(folder, workers, shuffle):
    import webdataset as wds

    urls = [str(Path(folder) / f"{shard}.tar") for shard in range(4)]
    stream = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False)
    if shuffle == "det":
        stream = stream.compose(wds.detshuffle(16))
    elif shuffle == "clock":
        stream = stream.shuffle(16)
    elif shuffle == "seed":
        stream = stream.shuffle(16, seed=3)
    return DataLoader(stream, batch_size=BATCH, collate_fn=tar_ids, num_workers=workers)


def stateful_loader(dataset, workers, **settings):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=BATCH, num_workers=workers, **settings)


def nodes(ids):
    import torchdata.nodes as tn

    batches = tn.Mapper(tn.Batcher(tn.IterableWrapper(ids), BATCH, drop_last=False), torch.tensor)
    return tn.Loader(batches)


def plain_sources(ids, rank, size):
    """By name: the data and the options of a DataLoader."""
    batches = BatchSampler(LooksAtRank(lost=1).ids, 3, False)
    drawn = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
    return {
        "list": (ids, {"shuffle": True}),
        "random_split": (random_split(ids, [SAMPLES, 0], torch.Generator().manual_seed(2))[0], {}),
        "Subset by rank": (Subset(ids, ids[rank::size]), {"shuffle": True}),
        "DistributedSampler": (ids, {"sampler": DistributedSampler(ids, size, rank, seed=3)}),
        "sampler that looks at the rank": (ids, {"sampler": LooksAtRank()}),
        "sampler that looks at the rank, uneven": (ids, {"sampler": LooksAtRank(lost=9)}),
        "batch sampler": (ids, {"batch_sampler": Buckets(), "batch_size": 1}),
        "batch sampler that looks at the rank": (ids, {"batch_sampler": list(batches), "batch_size": 1}),
        "weights without replacement": (ids, {"sampler": drawn}),
        "ConcatDataset": (ConcatDataset([ids[:40], ids[40:]]), {"shuffle": True}),
        "ChainDataset": (ChainDataset([Stream(range(48)), Stream(range(48, SAMPLES))]), {}),
        "stream without batches": (Stream(), {"batch_size": None}),
        "sampler that rewinds": (ids, {"sampler": RewindingSampler(ids, 1)}),
        "stream": (Stream(), {}),
        "stream, torch's generator": (DrawsFromTorch(), {}),
        "stream that counts epochs": (CountsEpochs(), {}),
        "stream by rank": (ByRank(), {}),
        "stream by rank, uneven": (ByRank(lost=9), {}),
        "stream by rank with a state": (Knowing(), {}),
    }


def load(data, options, workers):
    return DataLoader(data, num_workers=workers, **{"batch_size": BATCH, **options})


def sources(folder):
    """By name: a function of the number of workers that builds the loader."""
    rank, size = rank_and_size()
    ids = list(range(SAMPLES))
    return {
        **{name: partial(load, *source) for name, source in plain_sources(ids, rank, size).items()},
        "persistent workers": lambda w: DataLoader(Stream(), BATCH, num_workers=w, persistent_workers=w > 0),
        "loader that rewinds": lambda w: Rewinds(ids),
        "loader that rewinds, by rank": lambda w: Rewinds(ids[rank::size]),
        "list of batches": lambda w: list(torch.arange(SAMPLES).split(BATCH)),
        "list of batches by rank, uneven": lambda w: list(
            torch.arange(SAMPLES)[: 88 if rank else None][rank::size].split(BATCH)
        ),
        "datasets": lambda w: hf(hf_table(), shuffle=True, num_workers=w),
        "datasets, split_by_node": lambda w: hf(split_by_node(hf_table()), shuffle=True, num_workers=w),
        "datasets, shuffled, split_by_node": lambda w: hf(split_by_node(hf_table().shuffle(seed=3)), num_workers=w),
        "datasets stream": lambda w: hf(hf_stream(), num_workers=w),
        "datasets stream, shuffled": lambda w: hf(shuffled(hf_stream()), num_workers=w),
        "datasets stream, split_by_node": lambda w: hf(split_by_node(hf_stream()), num_workers=w),
        "datasets stream, shuffled, split_by_node": lambda w: hf(split_by_node(shuffled(hf_stream())), num_workers=w),
        "datasets stream, batched map": lambda w: hf(
            split_by_node(hf_stream().map(evens_doubled, batched=True, batch_size=8)), num_workers=w
        ),
        "WebDataset": lambda w: web(folder, w, None),
        "WebDataset, detshuffle": lambda w: web(folder, w, "det"),
        "WebDataset, shuffle(seed=)": lambda w: web(folder, w, "seed"),
        "WebDataset, shuffle": lambda w: web(folder, w, "clock"),
        "StatefulDataLoader": lambda w: stateful_loader(ids, w, shuffle=True),
        "StatefulDataLoader, stream by rank": lambda w: stateful_loader(ByRank(), w),
        "StatefulDataLoader, datasets stream, shuffled": lambda w: stateful_loader(
            split_by_node(shuffled(hf_stream())), w, collate_fn=hf_ids
        ),
        "torchdata.nodes": lambda w: nodes(ids),
    }


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
