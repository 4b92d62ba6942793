"""``TrainingArguments`` become a Trainer that trains as transformers' own does."""

import dataclasses
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.processes import script
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from treadle.callbacks import BatchSizeFinder, ModelCheckpoint
from treadle.compat import transformers as translated
from treadle.compat.transformers import loader_arguments, task_arguments, training_arguments
from treadle.integrations import TransformersTask
from treadle.strategies import DDP, FSDP

import treadle
from treadle import loggers

transformers = pytest.importorskip("transformers")  # its classes are imported in tests: 3 s for each worker
PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_hf_trainer.md"


def arguments(folder, **fields):
    return transformers.TrainingArguments(output_dir=str(folder), **{"use_cpu": True, "disable_tqdm": True, **fields})


def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=48, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows():
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 12, 5, 20, 4, 4, 18, 7, 9, 3, 16, 6]
    return [{"input_ids": torch.randint(3, 48, (length,), generator=generator)} for length in lengths]


def collate(batch):
    ids = [row["input_ids"] for row in batch]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded, "attention_mask": (labels != -100).long(), "labels": labels}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_the_one_of_transformers_own_trainer(tmp_path):
    args = arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=3,
        learning_rate=0.02, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine", max_grad_norm=0.5,
        train_sampling_strategy="sequential", save_strategy="no", adam_beta2=0.95, report_to="none",
        adam_epsilon=1e-3,  # attention's key bias has no gradient but rounding, which Adam would blow up
    )  # fmt: skip
    theirs = model()
    transformers.Trainer(theirs, args, train_dataset=rows(), data_collator=collate).train()

    task = TransformersTask(model(), **task_arguments(args))
    trainer = treadle.Trainer(**training_arguments(args))
    trainer.fit(task, DataLoader(rows(), collate_fn=collate, **loader_arguments(args)))
    assert trainer.global_step == 6
    torch.testing.assert_close(task.model.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
    moved = (ours - start for ours, start in zip(theirs.parameters(), model().parameters(), strict=True))
    assert sum(float(change.abs().max()) for change in moved) > 0.3


@pytest.mark.long
def test_every_field_has_a_place_here_and_on_the_page():
    known = {*translated._BY_THE_SCRIPT, *translated._WITHOUT_EFFECT, *translated._REFUSED, *translated._TRANSLATED}
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields <= known
    rows = "".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    assert fields <= {*re.findall(r"`(\w+)`", rows)}


def translate(folder, **fields):
    return training_arguments(arguments(folder, **fields))


@pytest.mark.filterwarnings("ignore")
def test_fields_become_flags(tmp_path):
    flags = translate(tmp_path, max_steps=7, bf16=True, max_grad_norm=0.0, full_determinism=False)
    assert (flags["max_steps"], flags["precision"], flags["gradient_clip_val"]) == (7, "bf16-mixed", None)
    assert translate(tmp_path, num_train_epochs=0.5)["limit_train_batches"] == 0.5
    steps = translate(tmp_path, eval_strategy="steps", eval_steps=10, gradient_accumulation_steps=4)
    assert (steps["val_check_interval"], steps["check_val_every_n_epoch"]) == (40, None)
    assert translate(tmp_path)["limit_val_batches"] == 0
    assert translate(tmp_path, torch_compile_mode="reduce-overhead")["compile"]["mode"] == "reduce-overhead"
    assert isinstance(translate(tmp_path, ddp_find_unused_parameters=True)["strategy"], DDP)
    assert isinstance(translate(tmp_path, fsdp="shard_grad_op auto_wrap")["strategy"], FSDP)
    found = translate(tmp_path, auto_find_batch_size=True)["callbacks"]
    assert any(isinstance(callback, BatchSizeFinder) for callback in found)
    assert translate(tmp_path, logging_strategy="no")["log_every_n_steps"] == 0
    assert translate(tmp_path)["timeout"] is None
    assert translate(tmp_path, ddp_timeout=7200)["timeout"] == timedelta(hours=2)
    treadle.Trainer(**translate(tmp_path, ddp_timeout=7200, ddp_find_unused_parameters=True))


@pytest.mark.filterwarnings("ignore")
def test_fields_become_arguments_of_the_loader(tmp_path):
    args = arguments(
        tmp_path, per_device_train_batch_size=3, per_device_eval_batch_size=5, dataloader_num_workers=1,
        dataloader_prefetch_factor=4, dataloader_multiprocessing_context="fork", dataloader_drop_last=True,
    )  # fmt: skip
    train, val = (DataLoader(range(30), **loader_arguments(args, training)) for training in (True, False))
    assert (train.batch_size, train.drop_last, train.prefetch_factor) == (3, True, 4)
    assert (val.batch_size, val.drop_last, val.num_workers) == (5, False, 1)
    assert train.multiprocessing_context.get_start_method() == "fork"
    assert isinstance(train.sampler, RandomSampler)
    assert isinstance(val.sampler, SequentialSampler)
    unordered = DataLoader(range(30), **loader_arguments(arguments(tmp_path, dataloader_in_order=False)))
    with pytest.raises(ValueError, match="in_order=True"):
        treadle.Accelerator(cpu=True).prepare_data_loader(unordered)


@pytest.mark.filterwarnings("ignore")
def test_fields_that_change_nothing_are_named(tmp_path, capfd):
    translate(tmp_path)
    assert "have no effect" not in capfd.readouterr().err
    translate(tmp_path, skip_memory_metrics=False, logging_first_step=True)
    assert "have no effect in Treadle: logging_first_step, skip_memory_metrics" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_services_become_loggers(tmp_path):
    services = {
        "clearml": (loggers.ClearMLLogger, "treadle_logs"),
        "comet_ml": (loggers.CometLogger, None),
        "swanlab": (loggers.SwanLabLogger, "treadle_logs"),
        "trackio": (loggers.TrackioLogger, "huggingface"),
    }
    for package in services:
        pytest.importorskip(package)
    flags = translate(tmp_path, report_to=list(services), run_name="first", trackio_space_id="me/space")
    assert [(type(logger), logger.name) for logger in flags["logger"]] == list(services.values())
    assert flags["logger"][-1].version == "first"


def checkpoints(folder, **fields):
    return next(c for c in translate(folder, **fields)["callbacks"] if isinstance(c, ModelCheckpoint))


@pytest.mark.filterwarnings("ignore")
def test_saving_keeps_what_it_kept(tmp_path):
    every = checkpoints(tmp_path, save_steps=50)
    assert (every.every_n_train_steps, every.save_top_k, every.monitor) == (50, -1, None)
    best = checkpoints(tmp_path, save_strategy="best", eval_strategy="epoch", metric_for_best_model="eval_accuracy")
    assert (best.monitor, best.mode, best.save_top_k) == ("val_accuracy", "max", 1)
    assert translate(tmp_path, save_strategy="no")["enable_checkpointing"] is False
    newest = arguments(
        tmp_path, max_steps=6, save_steps=1, save_total_limit=2, per_device_train_batch_size=2, report_to="none"
    )
    trainer = treadle.Trainer(**training_arguments(newest))
    trainer.fit(TransformersTask(model()), DataLoader(rows(), collate_fn=collate, **loader_arguments(newest)))
    assert sorted(path.name[-6:-5] for path in (tmp_path / "checkpoints").iterdir()) == ["5", "6"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"push_to_hub": True}, "task.save_pretrained"),
        ({"label_smoothing_factor": 0.1}, "override training_step"),
        ({"train_sampling_strategy": "group_by_length"}, "groups by length"),
        ({"num_train_epochs": 2.5}, "must be a whole number"),
        ({"save_steps": 0.1}, "whole number of optimizer steps"),
        ({"report_to": "codecarbon"}, "write a Logger"),
        ({"logging_strategy": "epoch"}, "on_epoch=True"),
    ],
)
def test_what_has_to_be_said_otherwise_is_named(tmp_path, fields, fix):
    with pytest.raises(ValueError, match=fix):
        translate(tmp_path, **fields)


@pytest.mark.parametrize("name", ["sgd", "adamw_torch_4bit"])
def test_another_optimizer_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="override configure_optimizers"):
        task_arguments(arguments(tmp_path, optim=name))


@pytest.mark.exhaustive
def test_the_pages_script_before_runs():
    """The one after is run with the other blocks of the documents."""
    blocks = dict(re.findall(r"```python (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))
    source = blocks["reviews"] + re.sub("from reviews import .*", "", blocks["before"])
    done = script(source, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "accuracy 1.00" in done.stdout
