"""Measure training on a GPU under Treadle and other frameworks, relative to a hand-written loop.

    python benchmarks/gpu.py --json gpu.json       all cases on this machine's first GPU, below eight minutes on an H100
    python benchmarks/gpu.py --cases mlp gpt2      some of them
    python benchmarks/gpu.py --tiny                the same program end to end on any machine, in a minute; no figures

Cases: `mlp`, whose steps are bound by launches; `gpt2`, 124 M parameters in bf16-mixed, and `gpt2-compiled`; `llama1b`,
1.1 B with FSDP in a world of one; `loading`, images from DataLoaders with 0 and 4 workers; `save`, the time that an
asynchronous checkpoint takes from the training.

Every arm trains the same model on the same batches from the same start, and its first losses must be those of the raw
loop, or the program ends with status 1 and the arm's name. The arms take turns (raw, A, B, ..., raw, A, B, ...), so
other load of the machine affects all of them. A ratio is the median of the ratios to the raw loop of the same round;
above 1 an arm is faster. The clock runs between two steps, with a device sync at both.

The raw loop is written for speed: pinned batches that are copied without waiting, fused AdamW. The others get a plain
AdamW and a plain DataLoader, and choose their own settings.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import CHECKED_STEPS, OFF, environment, installed, silence
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from treadle.strategies import FSDP
from treadle.strategies.distributed import disconnect

import treadle

# ---------------------------------------------------------------------------------------------------------------------
# Models: each returns its loss
# ---------------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width // 4, bias=False)  # a key and a value for every four heads
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = rotate(self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2))
        k, v = self.kv(y).unflatten(-1, (2, self.heads // 4, self.size)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor) -> Tensor:
    """Apply rotary positions (RoFormer, https://arxiv.org/abs/2104.09864)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class LanguageModel(nn.Module):
    def __init__(self, block: type[nn.Module], layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), y.flatten())

    def count_flops(self, batch: int, length: int) -> float:
        """Return the FLOPs of one step: 6 per weight and token, and those of attention (PaLM, appendix B)."""
        weights = sum(p.numel() for p in self.parameters()) - self.tokens.weight.numel()
        attention = 12 * len(self.blocks) * self.tokens.embedding_dim * length / 2  # causal
        return batch * length * (6 * weights + attention)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 7, 4), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Samples(Dataset):
    """Dataset of random inputs and targets, each drawn from its index."""

    count: int
    shape: tuple[int, ...]
    classes: int
    words: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self.words:
            row = torch.randint(self.classes, (self.shape[0] + 1,), generator=generator)
            return row[:-1], row[1:]
        return torch.randn(self.shape, generator=generator), torch.tensor(index % self.classes)


# ---------------------------------------------------------------------------------------------------------------------
# Cases and arms
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Case:
    """Training to measure.

    Attributes:
        name: The beginning of the row.
        make_model: Makes the model on the CPU.
        samples: The dataset.
        batch: Samples per step.
        warmup: Steps before the clock starts.
        steps: Steps between its start and its end.
        rounds: Number of turns of each arm.
        bf16: Whether to compute in bf16-mixed.
        compiled: Whether torch compiles the model.
        sharded: Whether to use FSDP, gathered in bfloat16.
        workers: Workers of the DataLoader.
        length: Tokens per sample; 0 for data that is not text.
        tolerance: Maximum relative difference of a loss from the raw loop's.
    """

    name: str
    make_model: Callable[[], nn.Module]
    samples: Samples
    batch: int
    warmup: int
    steps: int
    rounds: int = 3
    bf16: bool = False
    compiled: bool = False
    sharded: bool = False
    workers: int = 0
    length: int = 0
    tolerance: float = 1e-4

    def make_optimizer(self, model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def loader(self, pin: bool = False) -> DataLoader:
        count = self.warmup + self.steps + 1
        data = Samples(count * self.batch, self.samples.shape, self.samples.classes, self.samples.words)
        return DataLoader(data, self.batch, num_workers=self.workers, pin_memory=pin and DEVICE.type == "cuda")

    @property
    def unit(self) -> str:
        return "tokens/s" if self.length else "samples/s"

    @property
    def units(self) -> int:
        """Tokens or samples per step."""
        return self.batch * max(1, self.length)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Clock:
    """Clock that every arm calls before each step, at the same place."""

    case: Case
    losses: list[Tensor] = field(default_factory=list)
    calls: int = 0
    began: float = 0.0
    cpu_began: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def tick(self) -> None:
        if self.calls in (self.case.warmup, self.case.warmup + self.case.steps):
            synchronize()
            now, cpu = time.perf_counter(), time.thread_time()
            self.seconds, self.cpu_seconds = now - self.began, cpu - self.cpu_began
            self.began, self.cpu_began = now, cpu
        self.calls += 1

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        self.tick()
        loss = model(*batch)
        self.losses.append(loss.detach().clone())
        return loss


clock: Clock


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def raw(case: Case) -> None:
    model = case.make_model().to(DEVICE)
    if case.sharded:
        model = shard_by_hand(model)
    optimizer = case.make_optimizer(model, fused=True)
    run = torch.compile(model) if case.compiled else model
    context = torch.autocast(DEVICE.type, torch.bfloat16) if case.bf16 and not case.sharded else nullcontext()
    for batch in case.loader(pin=True):
        moved = [tensor.to(DEVICE, non_blocking=True) for tensor in batch]
        with context:
            loss = clock.loss(run, moved)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shard_by_hand(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for block in model.blocks:
        fully_shard(block, mp_policy=gathers_in_bf16())
    fully_shard(model, mp_policy=gathers_in_bf16())
    return model


def gathers_in_bf16() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def treadle_accelerator(case: Case) -> None:
    options: dict[str, Any] = {"strategy": FSDP(mixed_precision=gathers_in_bf16())} if case.sharded else {}
    own_loop("treadle", case, **options)


def accelerate(case: Case) -> None:
    own_loop("accelerate", case)


def own_loop(library: str, case: Case, **options: Any) -> None:
    module = importlib.import_module(library)
    accelerator = module.Accelerator(
        mixed_precision="bf16" if case.bf16 else "no",
        dynamo_backend="inductor" if case.compiled else "no",
        cpu=DEVICE.type == "cpu",
        **options,
    )
    model = case.make_model()
    model, optimizer, loader = accelerator.prepare(model, case.make_optimizer(model), case.loader())
    for batch in loader:
        accelerator.backward(clock.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    if library == "accelerate":
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def treadle_trainer(case: Case) -> None:
    fit("treadle", case, compile=case.compiled)


def treadle_whole(case: Case) -> None:
    fit("treadle", case, compile={"use_regional_compilation": False})


def treadle_on(case: Case) -> None:
    fit("treadle", case, compile=case.compiled, logs=True)


def lightning(case: Case) -> None:
    fit("lightning.pytorch", case)


def lightning_on(case: Case) -> None:
    fit("lightning.pytorch", case, logs=True)


def fit(name: str, case: Case, *, logs: bool = False, **options: Any) -> None:
    library = importlib.import_module(name)
    base = library.TaskModule if hasattr(library, "TaskModule") else library.LightningModule

    class Task(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.make_model()
            self.run = torch.compile(self.model) if case.compiled and "compile" not in options else None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = clock.loss(self.model if self.run is None else self.run, batch)
            if logs:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case.make_optimizer(self.model)

    if case.sharded:
        options["strategy"] = FSDP(mixed_precision=gathers_in_bf16())
    with tempfile.TemporaryDirectory() as folder:
        extra = dict(OFF)
        if logs:
            csv = importlib.import_module(f"{name}.loggers").CSVLogger(folder)
            extra = {"logger": csv, "enable_checkpointing": False, "log_every_n_steps": 10}
        library.Trainer(
            max_epochs=1,
            accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if case.bf16 else "32-true",
            enable_model_summary=False,
            default_root_dir=folder,
            **extra,
            **options,
        ).fit(Task(), case.loader())


@dataclass(frozen=True)
class Arm:
    """Row of the table: its name, its function, the library it needs, and its cases (all by default)."""

    name: str
    run: Callable[[Case], None]
    needs: str = "torch"
    only: Callable[[Case], bool] = lambda case: True


ARMS = [
    Arm("raw loop", raw),
    Arm("Treadle Accelerator", treadle_accelerator),
    Arm("Treadle Trainer", treadle_trainer),
    Arm("Treadle Trainer, compiled whole", treadle_whole, only=lambda case: case.compiled),
    Arm("Treadle Trainer, bar and logs", treadle_on, only=lambda case: not case.compiled and not case.sharded),
    Arm("Accelerate", accelerate, "accelerate", only=lambda case: not case.sharded),
    Arm("Lightning", lightning, "lightning", only=lambda case: not case.sharded),
    Arm("Lightning, bar and logs", lightning_on, "lightning", lambda case: not case.compiled and not case.sharded),
]


def make_cases(tiny: bool) -> dict[str, list[Case]]:
    if tiny:
        mlp, images, rounds, warmup, steps = MLP, (3, 32, 32), 2, 1, 2
        gpt = {"layers": 3, "width": 32, "heads": 4, "vocabulary": 64}
        llama, batch, length, image_batch, width = dict(gpt), 2, 16, 4, 16
    else:
        mlp, images, rounds, warmup, steps = MLP, (3, 224, 224), 3, 10, 30
        gpt = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304}
        llama = {"layers": 16, "width": 2048, "heads": 32, "vocabulary": 32000}
        batch, length, image_batch, width = 16, 1024, 256, 256
    text = Samples(0, (length,), gpt["vocabulary"], words=True)
    text_cases = {"samples": text, "batch": batch, "length": length, "bf16": True, "tolerance": 0.02}
    make_gpt = partial_model(LanguageModel, block=GPTBlock, **gpt)
    make_llama = partial_model(LanguageModel, block=LlamaBlock, **llama)
    clocked = {"warmup": warmup, "steps": steps, "rounds": rounds}
    large = clocked | {"steps": max(2, steps // 2), "rounds": min(2, rounds)}
    llama_text = Samples(0, (2 * length,), llama["vocabulary"], words=True)
    llama_case = text_cases | large | {"samples": llama_text, "length": 2 * length, "batch": max(1, batch // 4)}
    loading = [
        Case(
            name=f"loading, {workers} workers",
            make_model=partial_model(ConvNet),
            samples=Samples(0, images, 10),
            batch=image_batch,
            workers=workers,
            tolerance=0.01,
            **large,
        )
        for workers in (0, 1 if tiny else 4)
    ]
    long = clocked | {"warmup": 20 * warmup, "steps": 20 * steps}
    return {
        "mlp": [
            Case(
                name="mlp",
                make_model=partial_model(mlp, width=width),
                samples=Samples(0, (width,), 10),
                batch=8,  # so that the host's time goes to launches, and not to making samples
                tolerance=1e-3,
                **long,
            )
        ],
        "gpt2": [Case(name="gpt2", make_model=make_gpt, **text_cases, **clocked)],
        "gpt2-compiled": [Case(name="gpt2-compiled", make_model=make_gpt, compiled=True, **text_cases, **large)],
        "llama1b": [Case(name="llama1b", make_model=make_llama, sharded=True, **llama_case)],
        "loading": loading,
    }


def partial_model(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(**options)

    return make


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """Turn of an arm."""

    units_per_second: float
    host_ms: float
    peak_gib: float
    losses: Tensor


def take_turn(arm: Arm, case: Case) -> Round:
    global clock
    free_memory()
    clock = Clock(case)
    with silence():
        arm.run(case)
    disconnect()
    if dist.is_initialized():
        dist.destroy_process_group()
    clock.losses, losses = [], torch.stack(clock.losses).float().cpu()
    if not clock.seconds or clock.calls != case.warmup + case.steps + 1:
        sys.exit(f"{case.name}, {arm.name}: {clock.calls} steps, where {case.warmup + case.steps + 1} were asked for")
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else math.nan
    return Round(case.steps * case.units / clock.seconds, clock.cpu_seconds / case.steps * 1e3, peak, losses)


def free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(case: Case, arms: Iterable[Arm]) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {arm.name: [] for arm in arms}
    for number in range(case.rounds):
        for arm in arms:
            note(f"{case.name}, round {number + 1} of {case.rounds}: {arm.name}")
            turn = take_turn(arm, case)
            rounds[arm.name].append(turn)
            expected = rounds["raw loop"][0].losses
            worst = ((turn.losses - expected).abs() / expected.abs())[:CHECKED_STEPS].max().item()
            if not worst <= case.tolerance:
                sys.exit(f"{case.name}, {arm.name}: its losses differ from the raw loop's by {worst:.2%}")
    return rounds


def note(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text:<78}", end="\r", file=sys.stderr, flush=True)


def summarize(case: Case, rounds: dict[str, list[Round]]) -> dict[str, dict[str, float]]:
    model = case.make_model()
    peak_flops = treadle.callbacks.get_available_flops(DEVICE, torch.bfloat16 if case.bf16 else torch.float32)
    flops = model.count_flops(case.batch, case.length) if isinstance(model, LanguageModel) else None
    rows = {}
    for name, turns in rounds.items():
        ratios = [t.units_per_second / r.units_per_second for t, r in zip(turns, rounds["raw loop"], strict=True)]
        rate = statistics.median(turn.units_per_second for turn in turns)
        rows[name] = {
            "rate": rate,
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "mfu": rate / case.units * flops / peak_flops if flops and peak_flops else math.nan,
            "host_ms": statistics.median(turn.host_ms for turn in turns),
            "peak_gib": max(turn.peak_gib for turn in turns),
        }
    return rows


def measure_save(case: Case, steps: int) -> dict[str, float]:
    """Measure what one checkpoint takes from the training, written synchronously and asynchronously."""
    global clock
    free_memory()
    clock = Clock(case)
    with silence(), tempfile.TemporaryDirectory() as folder:
        accelerator = treadle.Accelerator(mixed_precision="bf16", cpu=DEVICE.type == "cpu")
        model = case.make_model()
        model, optimizer = accelerator.prepare(model, case.make_optimizer(model))
        batch = [tensor.to(DEVICE) for tensor in next(iter(case.loader()))]

        def train(count: int) -> float:
            synchronize()
            began = time.perf_counter()
            for _ in range(count):
                accelerator.backward(model(*batch))
                optimizer.step()
                optimizer.zero_grad()
            synchronize()
            return time.perf_counter() - began

        train(5)
        accelerator.save_state(f"{folder}/first", blocking=False)  # makes the pinned memory
        accelerator.finish_saving()
        plain, beside, written, at_once = [], [], [], []
        for number in range(3):
            plain.append(train(steps))
            began = time.perf_counter()
            accelerator.save_state(f"{folder}/beside{number}", blocking=False)
            call = time.perf_counter() - began
            beside.append(call + train(steps))
            accelerator.finish_saving()
            written.append(time.perf_counter() - began)
            began = time.perf_counter()
            accelerator.save_state(f"{folder}/at-once{number}")
            at_once.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in Path(folder, "first").iterdir())
    stall = statistics.median(b - p for b, p in zip(beside, plain, strict=True))
    save = statistics.median(at_once)
    return {"gib": size / 2**30, "at_once_s": save, "beside_s": statistics.median(written), "stall_s": stall}


# ---------------------------------------------------------------------------------------------------------------------
# Reporting
# ---------------------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, str]:
    found = environment()
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} free"
        found["cuda"] = f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return found


def print_case(case: Case, rows: dict[str, dict[str, float]], missing: list[str]) -> None:
    columns = f"{case.unit:>12}{'x raw':>8}{'min - max':>14}{'MFU':>8}{'host ms':>9}{'peak GiB':>10}"
    print(f"\n{case.name:<34}{columns}")
    for name, row in rows.items():
        spread = f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}"
        mfu, peak = (
            "" if math.isnan(value) else text
            for value, text in ((row["mfu"], f"{row['mfu']:.1%}"), (row["peak_gib"], f"{row['peak_gib']:.1f}"))
        )
        numbers = f"{row['rate']:>12,.0f}{row['ratio']:>8.3f}{spread:>14}{mfu:>8}{row['host_ms']:>9.2f}{peak:>10}"
        print(f"{name:<34}{numbers}".rstrip(), flush=True)
    for name in missing:
        print(f"{name:<34}{'not installed':>12}")


def print_save(row: dict[str, float]) -> None:
    share = row["stall_s"] / row["at_once_s"]
    saves = f"{row['gib']:.2f} GiB; at once {row['at_once_s']:.2f} s; beside the training {row['beside_s']:.2f} s"
    print(
        f"\nsave, gpt2: {saves}, which takes {row['stall_s']:.3f} s from it, {share:.0%} of a save at once", flush=True
    )


def main() -> None:
    names = ["mlp", "gpt2", "gpt2-compiled", "llama1b", "loading", "save"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, on any machine")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after so many minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    args = parser.parse_args()
    if DEVICE.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device here; --tiny runs the program on the CPU")
    began, info, cases = time.monotonic(), describe_machine(), make_cases(args.tiny)
    print("\n".join(f"{key:<12}{value}" for key, value in info.items()))
    results: dict[str, Any] = {"environment": info, "cases": {}}
    for name in args.cases:
        if time.monotonic() - began > 60 * args.minutes:
            print(f"\n{name}: not measured, {args.minutes:g} minutes have passed")
            continue
        if name == "save":
            results["save"] = measure_save(cases["gpt2"][0], 3 if args.tiny else 30)
            print_save(results["save"])
        for case in cases.get(name, ()):
            arms = [arm for arm in ARMS if arm.only(case)]
            rows = summarize(case, measure(case, [arm for arm in arms if installed(arm.needs)]))
            print_case(case, rows, [arm.name for arm in arms if not installed(arm.needs)])
            results["cases"][case.name] = {"unit": case.unit, "arms": rows}
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
