"""Fine-tune a transformers model with a LoRA adapter: it learns to write the docstring of a Python function.

    python examples/finetune.py                          a few minutes on two CPU cores
    python examples/finetune.py --devices 2              two processes
    python examples/finetune.py --devices 2 --streaming  each of them reads its own shards of a stream
    python examples/finetune.py --model gpt2 --targets c_attn    a model from the Hub instead of the small one

Without `--model` nothing is downloaded. A GPT-2 of 1.1 million parameters is built from a configuration and trained on
the source text of Python's standard library, with a tokenizer made from the same text. Then its weights are frozen, and
adapters are trained on the functions of that library: the signature is the prompt, the first line of the docstring is
the target. Checkpoints contain only the adapters.

Needs `pip install treadle[transformers] datasets torchmetrics`.
"""

import argparse
import ast
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from treadle.integrations import TransformersTask

import treadle as tl

CONTEXT, VOCABULARY, SHARDS = 128, 2000, 8
IGNORED = -100  # a label that the loss ignores
PROMPTS = (
    'def read_csv(path, encoding="utf-8"):\n    """',
    'def close(self):\n    """',
    'def is_valid(name):\n    """',
)


# -- data --------------------------------------------------------------------------------------------------------------


def read_sources(max_bytes: int) -> list[str]:
    """Return Python's own modules sorted by name, without tests."""
    root = Path(os.__file__).parent
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts, size = [], 0
    for file in sorted(root.rglob("*.py")):
        if size < max_bytes and not skipped & set(file.relative_to(root).parts):
            texts.append(file.read_text("utf-8", errors="replace"))
            size += len(texts[-1])
    return texts


def find_functions(source: str) -> Iterator[dict[str, str]]:
    """Yield each function's signature as a prompt with the first line of its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            prompt = f'def {node.name}({ast.unparse(node.args)}):\n    """'
            yield {"prompt": prompt, "docstring": docstring.splitlines()[0] + '"""'}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on texts. It is the same on every process."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def cut_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Return the texts as blocks of tokens for training the small model."""
    tokens = torch.tensor(tokenizer("\n".join(texts), verbose=False)["input_ids"])
    blocks = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return datasets.Dataset.from_dict({"input_ids": blocks.tolist(), "labels": blocks.tolist()})


def tokenize_pair(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the tokens of a function; the labels exclude the prompt."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    docstring = [*tokenizer(row["docstring"])["input_ids"], tokenizer.eos_token_id]
    return {
        "input_ids": (prompt + docstring)[:CONTEXT],
        "labels": ([IGNORED] * len(prompt) + docstring)[:CONTEXT],
    }


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad rows of different lengths at their ends."""
    inputs, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    ids = pad_sequence(inputs, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


# -- training ----------------------------------------------------------------------------------------------------------


def make_trainer(args: argparse.Namespace, steps: int, **flags: Any) -> tl.Trainer:
    return tl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        devices=args.devices,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=tl.loggers.CSVLogger(args.folder),
        **flags,
    )


def train_base(args: argparse.Namespace, texts: list[str]) -> Path:
    """Train a small model from scratch and return the folder of its weights and its tokenizer."""
    tokenizer = make_tokenizer(texts)
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=128, n_positions=CONTEXT + 64, vocab_size=len(tokenizer),
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    task = TransformersTask(
        GPT2LMHeadModel(config), tokenizer=tokenizer, learning_rate=2e-3, warmup_steps=0.1, lr_scheduler="cosine"
    )
    trainer = make_trainer(args, args.base_steps, limit_val_batches=0, enable_checkpointing=False)
    blocks = cut_blocks(texts, tokenizer)
    trainer.fit(task, DataLoader(blocks, args.batch_size, shuffle=True, collate_fn=collate))
    task.save_pretrained(args.folder / "base")
    trainer.accelerator.wait_for_everyone()
    return args.folder / "base"


def finetune(args: argparse.Namespace, model: Path | str, texts: list[str]) -> None:
    """Train adapters on the docstrings, evaluate them, and generate a few."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")  # as generation needs it
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    task = TransformersTask(
        model,
        auto_class="AutoModelForCausalLM",
        tokenizer=tokenizer,
        learning_rate=3e-3,
        warmup_steps=0.1,
        metrics={"accuracy": MulticlassAccuracy(len(tokenizer), average="micro")},
        generation={"max_new_tokens": 40, "do_sample": False, "pad_token_id": tokenizer.pad_token_id},
        adapter={
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05,
            "target_modules": args.targets, "fan_in_fan_out": True,
        },
    )  # fmt: skip
    saving = tl.callbacks.ModelCheckpoint(
        args.folder / "checkpoints", monitor="val_loss", save_trainable_only=True, enable_version_counter=False
    )
    trainer = make_trainer(
        args,
        args.steps,
        callbacks=[saving],
        val_check_interval=max(1, args.steps // 4),
        check_val_every_n_epoch=None,  # by steps, regardless of the length of an epoch
        limit_val_batches=20,
    )

    pairs = datasets.Dataset.from_list([pair for text in texts for pair in find_functions(text)])
    rows = pairs.map(tokenize_pair, fn_kwargs={"tokenizer": tokenizer}, remove_columns=pairs.column_names)
    parts = rows.train_test_split(0.1, seed=args.seed)
    options = {"batch_size": args.batch_size, "collate_fn": collate}
    if args.streaming:
        stream = parts["train"].to_iterable_dataset(num_shards=SHARDS).shuffle(seed=args.seed, buffer_size=100)
        train = DataLoader(split_dataset_by_node(stream, trainer.global_rank, trainer.world_size), **options)
    else:
        train = DataLoader(parts["train"], shuffle=True, **options)
    val = DataLoader(parts["test"], **options)

    before = trainer.validate(task, val)[0]
    trainer.fit(task, train, val)
    after = trainer.validate(task, val, ckpt_path="best")[0]
    task.save_pretrained(args.folder / "adapter")
    for name, values in (("before", before), ("after", after)):
        trainer.print(f"Perplexity {name}  {math.exp(values['val_loss']):.1f}, accuracy {values['val_accuracy']:.1%}")
    prompts = DataLoader(PROMPTS, collate_fn=lambda texts: dict(tokenizer(texts, return_tensors="pt", padding=True)))
    docstrings = [docstring for batch in trainer.predict(task, prompts) for docstring in batch]
    for prompt, docstring in zip(PROMPTS, docstrings, strict=True):
        trainer.print(prompt + docstring)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the Hub or a folder. Default: a small model that is trained first")
    parser.add_argument("--targets", nargs="+", default=["c_attn", "c_fc"], help="layers that get an adapter")
    parser.add_argument("--base-steps", type=int, default=600, help="optimizer steps for the small model")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps for the adapters")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per process")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--streaming", action="store_true", help="stream the functions, each process its own shards")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="how much source text to read")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    datasets.disable_progress_bars()
    tl.seed_everything(args.seed)
    texts = read_sources(args.max_bytes)
    finetune(args, args.model or train_base(args, texts), texts)


if __name__ == "__main__":
    main()
