"""Measure one optimizer step under a framework, relative to a hand-written loop.

    python benchmarks/overhead.py                       the table
    python benchmarks/overhead.py --suite more          and evaluation, accumulation with clipping
    python benchmarks/overhead.py --only treadle --json overhead.json

Every arm trains the same tiny model on the same batches from the same start, and must produce the losses of the raw
loop, or the program ends with status 1 and the arm's name: a framework that skips work is not fast.

The model is tiny on purpose. A framework adds a fixed number of microseconds per step, which is largest relative to a
tiny model. Divide the `us/step` difference by the time of your own step to see its share.

Method: an arm runs n1 steps and then n2 steps, and its time per step is the slope (t2 - t1) / (n2 - n1), which leaves
out imports, construction, start and end. The arms take turns (raw, A, B, ..., raw, A, B, ...), so other load of the
machine affects all of them, and a ratio is the median of the ratios to the raw loop of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16
CHECKED_STEPS = 60  # how many losses of each arm are compared with the raw loop's
TOLERANCE = 1e-6

# ---------------------------------------------------------------------------------------------------------------------
# What every arm trains
# ---------------------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_loader(batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batches * BATCH_SIZE, 32, generator=generator)
    targets = torch.randint(10, (batches * BATCH_SIZE,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH_SIZE, shuffle=False, num_workers=0)


recorded: list[Tensor] | None = None  # a list while the losses are compared, None while the clock runs


def loss_of(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Return the loss. Every arm calls this function, so that recording takes the same time in each of them."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs), targets)
    if recorded is not None:
        recorded.append(loss.detach())
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# The arms: each is a function of the number of optimizer steps
# ---------------------------------------------------------------------------------------------------------------------


def raw(steps: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for batch in batches_for(steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def treadle_off(steps: int) -> None:
    fit("treadle", steps, **OFF)


def treadle_on(steps: int) -> None:
    fit_with_everything("treadle", steps)


def treadle_accelerator(steps: int) -> None:
    own_loop("treadle", steps)


def lightning_off(steps: int) -> None:
    fit("lightning.pytorch", steps, **OFF)


def lightning_on(steps: int) -> None:
    fit_with_everything("lightning.pytorch", steps)


def accelerate(steps: int) -> None:
    own_loop("accelerate", steps)


def fabric(steps: int) -> None:
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    for batch in batches_for(steps, fabric.setup_dataloaders):
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def raw_accumulating(steps: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for index, batch in enumerate(batches_for(4 * steps)):
        (loss_of(model, batch) / 4).backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def treadle_accumulating(steps: int) -> None:
    fit("treadle", steps, batches=4 * steps, accumulate_grad_batches=4, gradient_clip_val=1.0, **OFF)


def lightning_accumulating(steps: int) -> None:
    fit("lightning.pytorch", steps, batches=4 * steps, accumulate_grad_batches=4, gradient_clip_val=1.0, **OFF)


def raw_validating(steps: int) -> None:
    model = make_model().eval()
    total, count = torch.zeros(()), 0
    with torch.inference_mode():
        for batch in make_loader(steps):
            total += loss_of(model, batch) * len(batch[0])
            count += len(batch[0])
    (total / count).item()


def treadle_validating(steps: int) -> None:
    validate("treadle", steps)


def lightning_validating(steps: int) -> None:
    validate("lightning.pytorch", steps)


def raw_predicting(steps: int) -> None:
    model = make_model().eval()
    kept = []
    with torch.inference_mode():
        for batch in make_loader(steps):
            kept.append(loss_of(model, batch))


def treadle_predicting(steps: int) -> None:
    predict("treadle", steps)


def lightning_predicting(steps: int) -> None:
    predict("lightning.pytorch", steps)


def treadle_by_hand(steps: int) -> None:
    fit("treadle", steps, by_hand=True, **OFF)


def lightning_by_hand(steps: int) -> None:
    fit("lightning.pytorch", steps, by_hand=True, **OFF)


# What Treadle and its peers have in common is written once: the same names are the point.

OFF = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def batches_for(count: int, prepare: Callable[[DataLoader], Any] = lambda loader: loader) -> Iterator[Any]:
    """Return the first `count` batches of a longer epoch, so that no arm's clock includes the end of an epoch."""
    return itertools.islice(prepare(make_loader(count + 10)), count)


def make_task(library: ModuleType, logs: bool, by_hand: bool = False) -> Any:
    base = library.TaskModule if hasattr(library, "TaskModule") else library.LightningModule

    class Task(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.model, batch)
            if logs:
                self.log("train_loss", loss, prog_bar=True)
            if by_hand:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.model, batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss_of(self.model, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

    return Task()


def fit(
    name: str, steps: int, *, batches: int | None = None, logs: bool = False, by_hand: bool = False, **options: Any
) -> None:
    library = importlib.import_module(name)
    trainer = library.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", devices=1, enable_model_summary=False, **options
    )
    trainer.fit(make_task(library, logs, by_hand), train_dataloaders=make_loader((batches or steps) + 10))


def fit_with_everything(name: str, steps: int) -> None:
    """Fit with one logged value, the progress bar, a logger that writes every 50 steps, and a checkpoint callback."""
    callbacks, loggers = (importlib.import_module(f"{name}.{part}") for part in ("callbacks", "loggers"))
    with tempfile.TemporaryDirectory() as folder:
        fit(
            name,
            steps,
            logs=True,
            logger=loggers.CSVLogger(folder),
            log_every_n_steps=50,
            callbacks=[callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=1_000_000)],
            enable_progress_bar=True,
        )


def validate(name: str, batches: int) -> None:
    library = importlib.import_module(name)
    trainer = library.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **OFF)
    trainer.validate(make_task(library, logs=True), make_loader(batches), verbose=False)


def predict(name: str, batches: int) -> None:
    library = importlib.import_module(name)
    trainer = library.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **OFF)
    trainer.predict(make_task(library, logs=False), make_loader(batches))


def own_loop(name: str, steps: int) -> None:
    accelerator = importlib.import_module(name).Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    for batch in batches_for(steps, accelerator.prepare):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Arm:
    """Row of the table.

    Attributes:
        name: The name of the row.
        run: Trains for the given number of optimizer steps.
        needs: The library without which the row reads "not installed".
        raw: The hand-written arm whose losses it must match and whose time is the divisor; itself for that arm.
    """

    name: str
    run: Callable[[int], None]
    needs: str = "torch"
    raw: str = ""


ARMS = [
    Arm("raw loop", raw),
    Arm("Treadle Trainer, everything off", treadle_off, "treadle", "raw loop"),
    Arm("Treadle Trainer, everything on", treadle_on, "treadle", "raw loop"),
    Arm("Treadle Accelerator", treadle_accelerator, "treadle", "raw loop"),
    Arm("Fabric", fabric, "lightning", "raw loop"),
    Arm("Accelerate", accelerate, "accelerate", "raw loop"),
    Arm("Lightning, everything off", lightning_off, "lightning", "raw loop"),
    Arm("Lightning, everything on", lightning_on, "lightning", "raw loop"),
]
MORE = [
    Arm("raw, accumulate 4, clip", raw_accumulating),
    Arm("Treadle Trainer, accumulate 4, clip", treadle_accumulating, "treadle", "raw, accumulate 4, clip"),
    Arm("Lightning, accumulate 4, clip", lightning_accumulating, "lightning", "raw, accumulate 4, clip"),
    Arm("raw validation", raw_validating),
    Arm("Treadle validation, per batch", treadle_validating, "treadle", "raw validation"),
    Arm("Lightning validation, per batch", lightning_validating, "lightning", "raw validation"),
    Arm("raw prediction", raw_predicting),
    Arm("Treadle prediction, per batch", treadle_predicting, "treadle", "raw prediction"),
    Arm("Lightning prediction, per batch", lightning_predicting, "lightning", "raw prediction"),
    Arm("Treadle, manual optimization", treadle_by_hand, "treadle", "raw loop"),
    Arm("Lightning, manual optimization", lightning_by_hand, "lightning", "raw loop"),
]

# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Terminal(io.TextIOWrapper):
    """Terminal without a screen. It reports that it is one, so that no progress bar disables itself."""

    def __init__(self) -> None:
        super().__init__(io.BufferedWriter(io.FileIO(os.devnull, "w")))

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def silence() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), Terminal() as stream:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            try:
                yield
            finally:
                logging.disable(logging.NOTSET)


def losses(arm: Arm, steps: int) -> Tensor:
    global recorded
    recorded = []
    with silence():
        arm.run(steps)
    values, recorded = torch.stack(recorded), None
    return values


def check_agreement(arms: list[Arm]) -> None:
    """End the program if an arm does not train what the raw loop does. This also warms every arm up."""
    expected: dict[str, Tensor] = {}
    for arm in arms:
        got = losses(arm, CHECKED_STEPS)
        want = expected.setdefault(arm.raw or arm.name, got)  # a raw arm stands before those measured against it
        if got.shape != want.shape:
            sys.exit(f"{arm.name}: computed {len(got)} losses where {arm.raw} computed {len(want)}")
        if not (worst := (got - want).abs().max().item()) <= TOLERANCE:
            sys.exit(f"{arm.name}: its losses differ from those of {arm.raw} by {worst:.3g}, allowed {TOLERANCE:g}")


def seconds(arm: Arm, steps: int, clock: Callable[[], float]) -> float:
    # An arm may leave the collector switched off, objects frozen or the thread count changed: all start alike.
    gc.enable()
    gc.unfreeze()
    gc.collect()
    torch.set_num_threads(1)
    with silence():
        start = clock()
        arm.run(steps)
        return clock() - start


def measure(arms: list[Arm], rounds: int, steps: tuple[int, int], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return microseconds per optimizer step: for each arm, one slope per round."""
    short, long = steps
    slopes: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        if sys.stderr.isatty():
            print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
        for arm in arms:
            taken = seconds(arm, long, clock) - seconds(arm, short, clock)
            slopes[arm.name].append(taken / (long - short) * 1e6)
    return slopes


def summarize(arm: Arm, slopes: dict[str, list[float]]) -> dict[str, float]:
    ratios = [mine / raw for mine, raw in zip(slopes[arm.name], slopes[arm.raw or arm.name], strict=True)]
    return {
        "us_per_step": statistics.median(slopes[arm.name]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Reporting
# ---------------------------------------------------------------------------------------------------------------------


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def environment() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        cpu = next((value.strip() for key, _, value in lines if key.strip() == "model name"), cpu)
    found = {"cpu": f"{cpu}, {os.cpu_count()} cores", "python": platform.python_version(), "torch": torch.__version__}
    for library in ("treadle", "lightning", "accelerate"):
        found[library] = importlib.metadata.version(library) if installed(library) else "not installed"
    return found


def print_table(arms: list[Arm], slopes: dict[str, list[float]]) -> None:
    print(f"{'':<38}{'us/step':>9}{'x raw':>9}   min - max")
    for arm in arms:
        if arm.name not in slopes:
            print(f"{arm.name:<38}{'not installed':>18}")
            continue
        row = summarize(arm, slopes)
        spread = f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}" if arm.raw else ""
        print(f"{arm.name:<38}{row['us_per_step']:>9.1f}{row['ratio']:>9.2f}   {spread}".rstrip())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often every arm takes its turn")
    parser.add_argument("--steps", type=int, nargs=2, default=(300, 1500), metavar=("N1", "N2"), help="run lengths")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only arms with one of these words in their names")
    parser.add_argument("--suite", choices=("steps", "more"), default="steps", help="more: accumulation and validation")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        default="cpu",
        help="cpu (default) counts this process's threads only, and so is steadier where others share the machine",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers here")
    args = parser.parse_args()
    if args.rounds < 1 or not 0 < args.steps[0] < args.steps[1]:
        parser.error(f"--rounds {args.rounds} --steps {args.steps[0]} {args.steps[1]}: need ROUNDS >= 1, 0 < N1 < N2")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    arms = ARMS + (MORE if args.suite == "more" else [])
    if args.only:
        chosen = [arm for arm in arms if any(word.lower() in arm.name.lower() for word in args.only)]
        needed = {arm.raw for arm in chosen}
        arms = [arm for arm in arms if arm in chosen or arm.name in needed]
    runnable = [arm for arm in arms if installed(arm.needs)]
    info = environment()
    print("\n".join(f"{key:<12}{value}" for key, value in info.items()) + "\n")
    check_agreement(runnable)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    slopes = measure(runnable, args.rounds, tuple(args.steps), clock)
    print_table(arms, slopes)
    print(
        f"\n{args.clock} time, median of {args.rounds} rounds; one thread, batch {BATCH_SIZE}, losses equal to raw's."
    )
    if args.json:
        results = {arm.name: {**summarize(arm, slopes), "rounds": slopes[arm.name]} for arm in runnable}
        args.json.write_text(json.dumps({"environment": info, "clock": args.clock, "arms": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
