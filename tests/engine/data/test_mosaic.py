"""MosaicML's streams: each rank and worker reads its share, and a resume goes on by their own state."""

import pytest
from support.interrupted_reads import note, read_epochs, take_read
from support.mosaic import import_streaming
from support.processes import run
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, STOP, WORKERS = 4, 5, 2


def write_shards(folder, count):
    streaming = import_streaming()
    with streaming.MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=200) as writer:
        for number in range(count):
            writer.write({"id": number})


def make_loader(folder, workers, own):
    streaming = import_streaming()

    class Noted(streaming.StreamingDataset):
        def get_item(self, *args, **kwargs):
            return note(super().get_item(*args, **kwargs))

    dataset = Noted(local=folder, batch_size=BATCH, shuffle=True, shuffle_seed=3)
    kind = streaming.StreamingDataLoader if own else DataLoader
    return kind(dataset, batch_size=BATCH, num_workers=workers)


def read(folder, saved, workers, own, resume):
    """The ids of each batch that counts, by epoch, the warnings, and what the workers read."""
    take_read()
    found = read_epochs(
        lambda: make_loader(folder, workers, own), lambda batch: batch["id"].tolist(), saved, [STOP], resume
    )
    return *found, take_read()


def whole_and_rest(*arguments):
    return [read(*arguments, resume) for resume in (None, STOP)]


def rare(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "workers", "own", "count"),
    [
        (2, WORKERS, True, 96),
        rare(1, 0, True, 96),
        rare(2, 0, True, 96),
        rare(2, WORKERS, False, 96),
        rare(2, 0, True, 97),  # MosaicML repeats a sample, so that each rank has as many
    ],
)
def test_each_sample_once_and_resumed_at_once_or_said(tmp_path, world, workers, own, count):
    import_streaming()
    write_shards(tmp_path / "shards", count)
    arguments = str(tmp_path / "shards"), tmp_path / "saved", workers, own
    whole, rest = zip(*run(whole_and_rest, world, *arguments), strict=True)
    for epoch in range(2):
        ids = [number for epochs, *_ in whole for batch in epochs[epoch] for number in batch]
        assert set(ids) == set(range(count))
        assert len(ids) == count + count % world
    used, share = max(workers, 1), -(-count // world)
    said = "cannot resume exactly" in whole[0][1] and "this resume is not exact" in rest[0][1]
    assert said != own
    for (epochs, _, counts), (rest_epochs, _, rest_counts) in zip(whole, rest, strict=True):
        assert counts[:used] == [2 * (share // used)] * used
        assert (rest_epochs[0] == epochs[1][STOP:]) == own
        if own:
            assert sum(rest_counts) == share - STOP * BATCH
