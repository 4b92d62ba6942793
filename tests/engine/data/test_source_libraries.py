"""What each rank and each worker really reads of a stream, in an epoch and at a resume."""

import logging

import pytest
import torch
from support import sources_samples as samples
from support.interrupted_reads import note, take_read
from support.processes import run
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import treadle

WORKERS = 2


class Files(IterableDataset):
    """Eight files, of which each rank and each worker opens its own."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, size = samples.rank_and_size()
        for file in range(8)[rank * workers + worker :: size * workers]:
            yield from map(note, range(file * 12, file * 12 + 12))


def read_shards(shards):
    for shard in shards:
        yield from ({"id": note(number)} for number in range(shard * 12, shard * 12 + 12))


def hf_files():
    import datasets

    return datasets.IterableDataset.from_generator(read_shards, gen_kwargs={"shards": list(range(8))})


def web(folder, splitter):
    import webdataset as wds

    urls = [f"{folder}/{shard}.tar" for shard in range(8)]
    return wds.WebDataset(urls, nodesplitter=splitter, shardshuffle=False, empty_check=False).map(note)


def streams(kind, folder):
    """A loader of 96 samples in 8 files or shards."""
    import webdataset as wds

    settings = {"batch_size": 4, "num_workers": WORKERS}
    makers = {
        "files": lambda: DataLoader(Files(), **settings),
        "datasets": lambda: DataLoader(
            samples.split_by_node(hf_files()), collate_fn=samples.hf_ids, **settings
        ),
        "webdataset": lambda: DataLoader(web(folder, wds.split_by_node), collate_fn=samples.tar_ids, **settings),
        "whole datasets": lambda: DataLoader(hf_files(), collate_fn=samples.hf_ids, **settings),
        "whole webdataset": lambda: DataLoader(
            web(folder, lambda source: source), collate_fn=samples.tar_ids, **settings
        ),
        "whole files": lambda: DataLoader(samples.Stream(), batch_size=4),
    }  # fmt: skip
    return makers[kind]()


def read_an_epoch(folder, kinds):
    """By kind: the ids that this rank trains on, what its workers read, and what is said."""
    words, results = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logger = logging.getLogger("treadle")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # a logger that has a handler before Treadle is imported keeps its own level
    for kind in kinds:
        accelerator = treadle.Accelerator(cpu=True)
        loader = accelerator.prepare_data_loader(streams(kind, folder))
        take_read()
        ids = [int(i) for batch in loader if accelerator.cursor.micro.samples for i in batch]
        loader.close()
        results[kind] = ids, take_read(), "\n".join(words)
        words.clear()
    return results


SPLIT = ("files", "datasets", "webdataset")


WHOLE = ("whole datasets", "whole webdataset", "whole files")


@pytest.mark.long
def test_each_rank_and_worker_reads_its_own_shards_or_the_libraries_fixes_are_named(tmp_path):
    samples.write_tars(tmp_path, shards=8)
    first, second = run(read_an_epoch, 2, str(tmp_path), [*SPLIT, *WHOLE])
    for kind in SPLIT:
        assert first[kind][1] == second[kind][1] == [24, 24], kind
        assert sorted(first[kind][0] + second[kind][0]) == list(range(samples.SAMPLES)), kind
    for kind in WHOLE:
        assert "each of the 2 ranks reads all of" in first[kind][2], kind
        for fix in ("split_dataset_by_node", "split_by_node", "files[rank::2]"):
            assert fix in first[kind][2], kind
        assert not set(first[kind][0]) & set(second[kind][0]), kind
    for kind in ("whole datasets", "whole webdataset"):
        assert first[kind][1] == second[kind][1] == [48, 48]


# -- a resume ----------------------------------------------------------------------------------------------------------

LARGE, BATCH, STOP = 10_000, 100, 90


class Indexed(Dataset):
    def __len__(self):
        return LARGE

    def __getitem__(self, index):
        return note(index)


class Knowing(samples.Knowing):
    """A stream that knows where it stands."""

    def __init__(self):
        self.ids = range(LARGE)

    def __iter__(self):
        return map(note, super().__iter__())


def large(kind):
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "DataLoader, dataset with a length":
        return DataLoader(Indexed(), BATCH, shuffle=True, num_workers=WORKERS)
    return StatefulDataLoader(Knowing(), BATCH, num_workers=WORKERS)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DataLoader, dataset with a length", "StatefulDataLoader, stream with a state"])
def test_a_resume_by_the_sources_own_state_reads_nothing_again(tmp_path, kind):
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(large(kind))
    take_read()
    batches = iter(loader)
    for _ in range(STOP):
        next(batches)
    accelerator.save_state(tmp_path / "saved")
    expected = next(batches)
    loader.close()
    assert sum(take_read()) >= STOP * BATCH

    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(large(kind))
    accelerator.load_state(tmp_path / "saved")
    assert torch.equal(next(iter(loader)), expected)
    loader.close()
    assert sum(take_read()) <= BATCH * (1 + 3 * WORKERS)  # the batch, and what the workers read ahead
