"""Packed rows: which documents they hold, and that training on them is training on the documents alone."""

import itertools
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.interrupted_reads import read_epochs
from support.models import SGDTask, Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from treadle.engine.data.dataset_check import fingerprint
from treadle.engine.data.sequences.packing import fit

import treadle
from treadle.data import make_sdpa_mask, pack

LENGTH, VOCABULARY = 16, 50


def make_documents(count=60, longest=LENGTH, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, random.integers(1, longest + 1)).tolist() for _ in range(count)]


def unpack(row):
    """The documents of a row, by their numbers."""
    return [row["input_ids"][row["seq_idx"] == number].tolist() for number in range(int(row["seq_idx"].max()) + 1)]


def unpack_all(rows):
    return [tuple(document) for row in rows for document in unpack(row)]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_each_document_is_in_one_row_and_in_another_one_in_another_epoch():
    documents = make_documents(200)
    rows = pack(documents, LENGTH)
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        assert sorted(unpack_all(rows)) == sorted(map(tuple, documents))
        assert len(rows) == len(list(rows))
        epochs.append([unpack(row) for row in rows])
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(map(len, itertools.chain(*epochs[0]))) == sorted(map(len, documents))
    assert epochs[0] != [unpack(row) for row in pack(documents, LENGTH, seed=1)]
    assert torch.equal(rows[-1]["input_ids"], rows[len(rows) - 1]["input_ids"])
    for row in rows:
        starts = row["position_ids"] == 0
        sizes = torch.diff(torch.cat([starts.nonzero().flatten(), torch.tensor([LENGTH])]))
        assert torch.equal(row["position_ids"], torch.cat([torch.arange(size) for size in sizes]))
        real = row["seq_idx"] >= 0
        assert torch.equal(row["labels"], torch.where(real & ~starts, row["input_ids"], -100))
        assert row["input_ids"][~real].eq(0).all()
        assert [values.dtype for values in row.values()] == [torch.int64] * 3 + [torch.int32]


def best_fit_decreasing(sizes, length):
    """The textbook's: each looks at all rows."""
    spaces = []
    for size in sizes:
        enough = [space for space in spaces if space >= size]
        if enough:
            spaces[spaces.index(min(enough))] -= size
        else:
            spaces.append(length - size)
    return sorted(spaces)


@pytest.mark.parametrize("length", [7, 100, 3000])
def test_rows_are_as_full_as_best_fit_makes_them(length):
    sizes = sorted(np.random.default_rng(length).integers(1, length + 1, 400).tolist(), reverse=True)
    used = np.bincount(fit(sizes, length), weights=sizes)
    assert sorted(length - used) == best_fit_decreasing(sizes, length)


def test_long_documents_are_cut_or_refused():
    documents = [list(range(1, 4)), list(range(1, 2 * LENGTH + 6)), [], [7] * LENGTH]
    with pytest.raises(ValueError, match=r"document 1 has 37 tokens, more than length=16. Pass too_long='cut'"):
        pack(documents, LENGTH)
    with pytest.raises(ValueError, match=r"document 1 has 37 tokens, more than length=16. Pass too_long='cut'"):
        list(pack(Stream(documents), LENGTH))
    for rows in (pack(documents, LENGTH, too_long="cut"), pack(Stream(documents), LENGTH, too_long="cut")):
        pieces = sorted(unpack_all(rows))
        assert pieces == sorted([(1, 2, 3), tuple(range(1, 17)), tuple(range(17, 33)), tuple(range(33, 38)), (7,) * 16])
        assert len(list(rows)) == 4


def test_labels_of_the_dataset_are_kept():
    documents = [{"input_ids": torch.tensor([5, 6, 7]), "labels": [-100, -100, 9]}, {"input_ids": np.array([1, 2])}]
    for rows in (pack(documents, 6, pad_id=3), pack(Stream(documents), 6, pad_id=3)):
        (row,) = rows
        assert row["input_ids"].tolist() == [5, 6, 7, 1, 2, 3]
        assert row["labels"].tolist() == [-100, -100, 9, -100, 2, -100]


def test_lengths_that_are_passed_spare_the_reading():
    class Watched(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    source, read = Watched([[1], [1, 1], [1, 1, 1]]), []
    rows = pack(source, 4, lengths=[1, 2, 3])
    assert len(rows) == 2
    assert read == []
    assert repr(rows) == "PackedDataset(3 documents in 2 rows of 4 tokens, 75.0 % filled)"
    with pytest.raises(ValueError, match=r"document 2 has 3 tokens, but had 4 when the dataset was packed"):
        list(pack(source, 4, lengths=[1, 2, 4]))
    for lengths in ([1, 2], [1, 2, -3], [1, 2, 3.5], [1, 2, float("nan")]):
        with pytest.raises(ValueError, match=r"lengths=\[1, 2.* must hold one integer of at least 0 for each of the 3"):
            pack(source, 4, lengths=lengths)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((iter([[1]]), 4), {}, r"must be a dataset with __getitem__ and __len__, a list, or an IterableDataset"),
        (([[1]], 0), {}, r"length=0 must be an integer of at least 1"),
        (([[1]], 4), {"too_long": "drop"}, r"too_long='drop'"),
        (([[1]], 4), {"buffer": 3}, r"buffer=3 can only be used with an IterableDataset"),
        ((["text"], 4), {}, r"the tokens of document 0 are a str of shape \(\) .* Tokenize the dataset"),
        (([[1], [0.5]], 4), {}, r"the tokens of document 1 are a list of shape \(1,\) and type float64"),
        (([{"tokens": [1]}], 4), {}, r"document 0 has the keys 'tokens', but not 'input_ids'"),
        (([{"input_ids": [1, 2], "labels": [1]}], 4), {}, r"document 0 has 2 tokens, but 1 label"),
    ],
)
def test_what_can_not_be_packed_is_named(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pack(*arguments, **options)


def test_ranks_with_other_documents_are_told_apart():
    documents = make_documents()
    others = [documents[0][::-1], *documents[1:]]
    assert fingerprint(pack(documents, LENGTH)) == fingerprint(pack(list(documents), LENGTH))
    assert fingerprint(pack(documents, LENGTH)) != fingerprint(pack(others, LENGTH))


# -- training ----------------------------------------------------------------------------------------------------------


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.positions(positions)
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(-2)
        return self.head(x)


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = Causal()
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["input_ids"], batch["position_ids"], make_sdpa_mask(batch["seq_idx"]))
        targets = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        self.seen.append(batch["input_ids"].tolist())
        self.losses.append(loss.item())
        return {"loss": loss, "weight": (targets != -100).sum()}


class StatefulStream(Stream):
    """Knows where it is, and divides its documents among the workers."""

    at = read = 0

    def __iter__(self):
        info = get_worker_info()
        documents = self.samples if info is None else self.samples[info.id :: info.num_workers]
        start, self.at = self.at, 0
        for at, document in enumerate(documents[start:], start + 1):
            self.at, self.read = at, self.read + 1
            yield document
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


KINDS = {"dataset": list, "stream": Stream, "stateful stream": StatefulStream}
GLOBAL_ROWS, EPOCHS, STOP = 4, 2, 13  # within the second epoch


def make_rows(kind, rank=None):
    if kind == "stream by rank":  # of different lengths
        rank = int(os.environ["RANK"]) if rank is None else rank
        return pack(StatefulStream(make_documents()[slice(0, 40) if rank == 0 else slice(40, 60)]), LENGTH, buffer=3)
    return pack(KINDS[kind](make_documents()), LENGTH, **({} if kind == "dataset" else {"buffer": 6}))


def train_by_hand(kind):
    """One process, one document per padded row; a step's loss is the mean over all its targets."""
    net, losses = Causal(), []
    ranks = [make_rows(kind, rank) for rank in range(2 if kind == "stream by rank" else 1)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for rows in ranks:
            rows.set_epoch(epoch)
        iterators = [iter(rows) for rows in ranks]
        while step := [row for rows in iterators for row in itertools.islice(rows, GLOBAL_ROWS // len(ranks))]:
            documents = [torch.tensor(document) for row in step for document in unpack(row)]
            tokens = nn.utils.rnn.pad_sequence(documents, batch_first=True)
            targets = nn.utils.rnn.pad_sequence([d[1:] for d in documents], batch_first=True, padding_value=-100)
            width = tokens.shape[1]
            logits = net(tokens, torch.arange(width), torch.ones(width, width, dtype=torch.bool).tril())[:, :-1]
            loss = F.cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {f"net.{name}": weight.detach() for name, weight in net.named_parameters()}


def fit_task(kind, strategy, accumulate, folder, ckpt_path=None, **flags):
    world = treadle.PartialState().num_processes if strategy != "auto" else 1
    task, rows = Task(), make_rows(kind)
    trainer = make_trainer(
        max_epochs=EPOCHS, strategy=strategy, accumulate_grad_batches=accumulate, devices=world, **flags
    )
    trainer.fit(task, DataLoader(rows, GLOBAL_ROWS // world // accumulate), ckpt_path=ckpt_path)
    path = Path(folder, f"{kind}-{strategy}.ckpt")
    trainer.save_checkpoint(path)
    weights = {n: getattr(w, "full_tensor", w.clone)().detach() for n, w in task.named_parameters()}
    return task.seen, task.losses, weights, str(path), getattr(rows, "packed_source", None)


def train_and_resume(runs, folder):
    """By run: the weights of a whole training, and whether a resumed one equals it, bit for bit."""
    torch.set_num_threads(1)
    results = {}
    for kind, strategy, accumulate in runs:
        arguments = kind, strategy, accumulate, folder
        seen, losses, weights, *_ = fit_task(*arguments)
        stopped, _, _, path, _ = fit_task(*arguments, max_steps=STOP)
        with warnings.catch_warnings(record=True, action="always") as caught:
            rest, rest_losses, resumed, _, source = fit_task(*arguments, ckpt_path=path)
        equal = stopped + rest == seen and rest_losses == losses[len(stopped) :]
        equal = equal and all(torch.equal(weight, resumed[name]) for name, weight in weights.items())
        said = "\n".join(str(each.message) for each in caught)
        results[kind, strategy, accumulate] = weights, losses, equal, said, getattr(source, "read", None)
    return results


ONE = [("dataset", "auto", 1), ("dataset", "auto", 4), ("stream", "auto", 2), ("stateful stream", "auto", 2)]
TWO = [(kind, "ddp", 2) for kind in (*KINDS, "stream by rank")] + [
    ("dataset", "fsdp", 1),
    ("stream by rank", "fsdp", 1),
]


@pytest.mark.long
@pytest.mark.parametrize(("world", "runs"), [(1, ONE), (2, TWO)])
def test_packed_rows_train_like_padded_documents_and_resume(world, runs, tmp_path):
    expected = {kind: train_by_hand(kind) for kind in (*KINDS, "stream by rank")}
    for rank, results in enumerate(run(train_and_resume, world, runs, str(tmp_path), timeout=280)):
        for (kind, strategy, accumulate), (weights, losses, resumed, said, read) in results.items():
            case = kind, strategy, accumulate
            wanted_losses, wanted = expected[kind]
            assert len(wanted_losses) > STOP + 2
            assert weights.keys() == wanted.keys()
            for name, weight in wanted.items():
                torch.testing.assert_close(weights[name], weight, atol=1e-10, rtol=0, msg=f"{case} {name}")
            if world == accumulate == 1:
                assert losses == pytest.approx(wanted_losses, abs=1e-10)
            assert resumed, case
            assert ("must be read again" in said) == (kind == "stream" and rank == 0), (case, said)
            if kind == "stateful stream":
                assert read < len(make_documents())  # not the documents before the saved position


# -- sources -----------------------------------------------------------------------------------------------------------


def make_table():
    from datasets import Dataset as Table

    return Table.from_dict({"input_ids": make_documents(80)})


def table_stream():
    return make_table().to_iterable_dataset(4)


def packed(make, kind=DataLoader, **options):
    buffer = {} if make is make_table else {"buffer": 5}
    return lambda: kind(pack(make(), LENGTH, **buffer), 2, **options)


WORKERS = {"num_workers": 2, "persistent_workers": True}
SOURCES = {
    "table": packed(make_table, shuffle=True),
    "table, workers": packed(make_table, shuffle=True, **WORKERS),
    "HF stream": packed(table_stream),
    "HF stream, shuffled": packed(lambda: table_stream().shuffle(seed=1, buffer_size=20)),
    "HF stream, workers": packed(table_stream, **WORKERS),
    "HF stream, StatefulDataLoader": packed(table_stream, StatefulDataLoader, num_workers=2),
    "stateful stream, StatefulDataLoader": packed(
        lambda: StatefulStream(make_documents(80)), StatefulDataLoader, num_workers=2
    ),
}
READ_AGAIN = {"HF stream, shuffled", "HF stream, workers"}


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_packed_whole_and_resumed(name, tmp_path):
    def unpack_rows(batch):
        return [unpack({key: values[i] for key, values in batch.items()}) for i in range(len(batch["labels"]))]

    def read(resumed=None):
        torch.manual_seed(1 if resumed is None else 2)
        return read_epochs(SOURCES[name], unpack_rows, tmp_path, saved, resumed)

    pytest.importorskip("datasets")
    saved = 1, 9
    (first, second), _ = read()
    for epoch in (first, second):
        documents = [tuple(document) for batch in epoch for row in batch for document in row]
        assert sorted(documents) == sorted(map(tuple, make_documents(80)))
    assert first != second
    for at in saved:
        rest, said = read(at)
        assert rest == [second[at:]]
        assert ("read again" in said) == (name in READ_AGAIN)
