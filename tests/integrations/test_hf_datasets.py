"""Hugging Face datasets in a `TransformersTask`: each rank reads its share and resumes exactly."""

import pytest
import torch
from support import sources_samples as samples
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, get_worker_info
from treadle.callbacks import ModelCheckpoint
from treadle.integrations import TransformersTask

import treadle

transformers = pytest.importorskip("transformers")

SHARDS = [5, 7, 5, 7, 5, 7, 5, 7]  # samples in each; on two ranks one has 20 and the other 28
TOTAL, BATCH, WORKERS = sum(SHARDS), 2, 2
READ = torch.zeros(WORKERS, dtype=torch.int64).share_memory_()
"""What each worker of this rank has read; workers inherit the memory."""


def make_rows(shards):
    """Rows whose first token is their number."""
    for shard in shards:
        for number in range(sum(SHARDS[:shard]), sum(SHARDS[: shard + 1])):
            yield {"input_ids": [number, *range(60, 60 + number % 5)]}


def make_shards(shards):
    for row in make_rows(shards):
        info = get_worker_info()
        READ[0 if info is None else info.id] += 1
        yield row


def note_rows(rows):
    READ[0] += len(rows["input_ids"])
    return rows


def collate(rows):
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded, "attention_mask": (labels != -100).long(), "labels": labels}


def make_loader(kind):
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "dataset":
        rows = datasets.Dataset.from_list(list(make_rows(range(len(SHARDS))))).with_transform(note_rows)
        return DataLoader(rows, BATCH, shuffle=True, collate_fn=collate)
    stream = datasets.IterableDataset.from_generator(make_shards, gen_kwargs={"shards": list(range(len(SHARDS)))})
    stream = samples.split_by_node(stream)
    if kind == "stream":
        return DataLoader(stream, BATCH, collate_fn=collate)
    return StatefulDataLoader(stream, BATCH, num_workers=WORKERS, collate_fn=collate)


class Task(TransformersTask):
    """Writes down the rows that it trains on."""

    def training_step(self, batch, batch_idx):
        count = self.trainer.accelerator.cursor.micro.samples
        self.rows.append(batch["input_ids"][:count, 0].tolist())
        return super().training_step(batch, batch_idx)


def make_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def train(kind, folder, resume):
    """Two epochs of the Trainer, or what is left of the second from a checkpoint within it on."""
    task = Task(make_model(), learning_rate=0.01, lr_scheduler="constant")
    task.rows = []
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, **NO_OUTPUT)
    ranks = trainer.world_size
    step = 3 + (7 if ranks > 1 and kind != "dataset" else -(-TOTAL // (4 * ranks)))  # the third of the second epoch
    if not resume:
        trainer.callbacks.append(
            ModelCheckpoint(folder, "{step}", every_n_train_steps=step, enable_version_counter=False)
        )
    treadle.seed_everything(8 if resume else 7)
    checkpoint = folder / f"step={step}.ckpt" if resume else None
    trainer.fit(task, make_loader(kind), ckpt_path=checkpoint)
    return task.rows, [parameter.detach().clone() for parameter in task.parameters()]


def train_and_resume(folder):
    """By kind: rows, weights and reads of the whole run, and of the resumed one."""
    results = {}
    for kind in ("dataset", "stream", "stateful"):
        runs = []
        for resume in (False, True):
            READ.zero_()
            runs.append((*train(kind, folder / kind, resume), int(READ.sum())))
        results[kind] = runs
    return results


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_each_rank_reads_its_share_and_resumes_exactly(tmp_path, ranks):
    results = run(train_and_resume, ranks, tmp_path)
    for kind in results[0]:
        taken = [row for result in results for batch in result[kind][0][0] for row in batch]
        assert sorted(taken) == sorted([*range(TOTAL)] * 2), kind
        for result in results:
            (rows, weights, read), (rest, resumed, read_again) = result[kind]
            assert rest == rows[-len(rest) :], kind
            assert 2 <= len(rest) < len(rows) / 2, kind
            assert all(map(torch.equal, weights, resumed)), kind
            assert read == sum(map(len, rows)), kind
            # Beside the rest: what the states lie behind by, which datasets reads anew within a shard.
            assert read_again <= sum(map(len, rest)) + max(SHARDS) * WORKERS, kind
