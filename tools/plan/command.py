"""`treadle plan`: estimates of a run's steps, memory, traffic and time, computed without the run's hardware."""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...cli.commands import CommandParser
from ...common.command_results import fail, report

if TYPE_CHECKING:
    from .gpus import GPU
    from .plan import Plan
    from .subject import Subject

SUMMARY = "show what a run would do and need, without its machines"
DESCRIPTION = """\
Show what a run would do and need, on one screen: processes, batch, steps, schedule, memory, checkpoint, traffic, and
the time of a step. One step of one rank is simulated without values, so within seconds a laptop can plan a run on
hardware that it does not have.

    treadle plan --config run.yaml                                      the run of a configuration, unchanged
    treadle plan --config run.yaml --world-size 1024 --gpu h100         the same run on other machines
    treadle plan --config run.yaml --world-size 64 model.width=8192     with other values
    treadle plan --model 7b --world-size 1024 --micro-batch 2           a transformer of that size, no configuration

If the run does not fit, changes that would make it fit are listed, as are changes that would make it faster. Each of
them is planned as well (--no-advice skips this)."""


def build_parser(program: str = "treadle plan") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle plan`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, DESCRIPTION)
    add = parser.add_argument
    words = "a run's configuration; may be repeated, later files take precedence"
    add("--config", action="append", metavar="FILE", help=words)
    add(
        "--model", metavar="NAME", help="instead of --config: gpt-162m, llama-1b, 7b, 8b, 70b, 405b, trained with AdamW"
    )
    add("--world-size", type=_parse_count, metavar="N", help="world size. Default: the configuration's, or 1")
    add(
        "--gpu",
        metavar="NAME",
        help="GPU of each process: h100, h200, b200, a100, ... Default: this machine's, or h100",
    )
    add("--per-machine", type=_parse_count, metavar="N", help="GPUs per machine. Default: the configuration's, or 8")
    add("--strategy", metavar="NAME", help="auto, single, ddp, fsdp. Default: the configuration's, or fsdp for --model")
    add("--replicate", type=_parse_count, metavar="N", help="number of replicas, for hybrid sharding")
    add("--checkpoint-activations", action="store_true", help="recompute the activations of every block")
    add(
        "--micro-batch",
        type=_parse_count,
        metavar="N",
        help="samples per forward pass. Default: the configuration's, or 1",
    )
    add(
        "--accumulate",
        type=_parse_count,
        metavar="N",
        help="forward passes per optimizer step. Default: the configuration's, or 1",
    )
    add(
        "--precision",
        metavar="NAME",
        help="precision, as in Trainer(precision=...). Default: the configuration's, or bf16-mixed",
    )
    add("--compile", action="store_true", help="plan for a compiled model, whose pointwise operations are fused")
    add("--clip", type=_parse_positive, metavar="NORM", help="clip gradients to this norm")
    add("--length", type=_parse_count, metavar="N", help="for --model: tokens per sample")
    add("--samples", type=_parse_count, metavar="N", help="samples per epoch")
    add("--max-epochs", type=_parse_count, metavar="N", help="epochs")
    add("--max-steps", type=_parse_count, metavar="N", help="optimizer steps")
    add("--no-advice", action="store_true", help="plan only the requested run, without advice")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="for --config: values that override the files'")
    return parser


def _parse_count(text: str) -> int:
    if not text.replace(",", "").isdecimal() or int(text.replace(",", "")) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text.replace(",", ""))


def _parse_positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `treadle plan` and return the exit status: 0 if the run would fit, 1 if not, 2 if it cannot be planned."""
    try:
        options = _parse_options(sys.argv[1:] if arguments is None else arguments)
        text, plan = run(options)
    except Exception as error:
        if not _is_treadle_error(error):
            traceback.print_exc()
            return fail("treadle plan", RuntimeError(f"the planned run raised the error above: {error}"))
        return fail("treadle plan", error)
    report(text, _describe(plan))
    return 0 if plan.fits else 1


def _describe(plan: Plan) -> dict[str, Any]:
    best, likely, worst = plan.band
    names = ("fits", "world_size", "grid", "micro_batch", "accumulate", "samples", "parameters", "trainable", "memory")
    return {
        **{name: getattr(plan, name) for name in (*names, "checkpoint", "flops")},
        "gpu": plan.gpu.name,
        "peak_bytes": plan.peak,
        "gpu_bytes": plan.gpu.memory,
        "seconds": {"best": best, "likely": likely, "worst": worst},
    }


def _is_treadle_error(error: Exception) -> bool:
    """Return whether Treadle itself raised the error, rather than a task, its data or torch."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    package = __name__.partition(".")[0]
    return last is not None and last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package


def _parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    options = build_parser().parse_intermixed_args(arguments)
    if (options.model is None) == (not options.config):
        raise ValueError("pass either --config run.yaml or --model 7b, but not both. See `treadle plan --help`.")
    if options.config:
        if options.length is not None:
            raise ValueError("--length applies to --model only. With --config, set it in the configuration.")
    elif options.overrides:
        raise ValueError(
            f"the override {options.overrides[0]!r} needs --config. Remove it, or pass --config instead of --model."
        )
    return options


def run(options: argparse.Namespace) -> tuple[str, Plan]:
    """Return the plan of a run as text, and the plan."""
    from . import advise, screen, simulate, varied

    subject = _build_subject(options)
    settings = _merge_settings(options, subject)
    gpu, source = _choose_gpu(options, settings.pop("per_machine", None))

    def replan(**changes: Any) -> Plan:
        conditions = {**settings, "gpu": gpu}
        condition_names = ("micro_batch", "accumulate", "precision")
        conditions.update({name: changes.pop(name) for name in condition_names if name in changes})
        strategy = varied(subject.strategy(settings["world_size"]), **changes)
        parts = (subject.build_model, subject.make_batch, subject.loss, subject.optimizer)
        return simulate(*parts, strategy=strategy, step=subject.step, **conditions)

    plan = replan()
    hints = [] if options.no_advice else advise(plan, replan)
    return screen(plan, subject.name, subject.schedule(plan), hints, gpu_from=source, width=_choose_width()), plan


def _choose_width() -> int:
    return min(100, max(60, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else 100


def _choose_gpu(options: argparse.Namespace, per_machine: int | None) -> tuple[GPU, str]:
    """Return the GPU of each process and a note on its origin, which is empty if ``--gpu`` is set."""
    from . import detect_gpu, find_gpu

    local_gpu = detect_gpu() if options.gpu is None else None
    gpu = local_gpu or find_gpu("h100" if options.gpu is None else options.gpu)
    per_machine = options.per_machine or per_machine
    if per_machine is not None:
        gpu = replace(gpu, per_machine=per_machine)
    if options.gpu is not None:
        return gpu, ""
    return gpu, "this machine's" if local_gpu else "assumed, because none was detected; set another with --gpu"


def _build_subject(options: argparse.Namespace) -> Subject:
    if options.model:
        from .subject import build_model_subject

        return build_model_subject(options)
    from .config_subject import build_config_subject

    return build_config_subject(options)


def _merge_settings(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """Return the settings of the subject, overridden by those that the options set."""
    requested = {
        "world_size": options.world_size,
        "micro_batch": options.micro_batch,
        "accumulate": options.accumulate,
        "precision": options.precision,
        "clip": options.clip,
        "compiled": options.compile or None,
    }
    settings = dict(subject.settings)
    settings.update((name, value) for name, value in requested.items() if value is not None)
    return settings
