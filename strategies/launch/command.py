"""`treadle launch`: start a script in one or more processes, on one machine or on several."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ...common.command_results import fail, report
from ...common.messages import nearest
from .rendezvous import Job, Nodes
from .supervisor import cpus, supervise

DESCRIPTION = """\
Start a script in several processes, each with torchrun's variables, and wait for all of them. The first one to fail
ends the others, on every machine; its exit status is that of this command.

    treadle launch train.py                                             one process per GPU of this machine, or one
    treadle launch --nproc-per-node 2 train.py --lr 0.1                 two processes
    treadle launch --nnodes 2 --rdzv-endpoint node1:29400 train.py      on each of two machines
    treadle launch --nnodes 2 --node-rank 0 --master-addr node1 train.py    the same, with numbered machines

Set precision, strategy and accumulation in the script. Accelerate's --num_processes (of all machines together),
--num_machines, --machine_rank, --main_process_ip and --main_process_port work too."""

_IN_CODE = "Set it in the script: Trainer({0}=...) or Accelerator({0}=...)"
_REFUSED = {
    "mixed_precision": "Set it in the script: Accelerator(mixed_precision=...) or Trainer(precision=...)",
    "gradient_accumulation_steps": _IN_CODE.format("gradient_accumulation_steps"),
    "use_fsdp": _IN_CODE.format("strategy"),
    "use_deepspeed": _IN_CODE.format("strategy"),
    "use_megatron_lm": _IN_CODE.format("strategy"),
    "dynamo_backend": "Call torch.compile(model) in the script",
    "config_file": "Pass the settings of the file as options of this command",
    "tpu": "TPUs are not supported",
    "start_method": "Each rank is a new program. Remove the option",
    "gpu_ids": "Set CUDA_VISIBLE_DEVICES",
}


# Options with a value: the names, the value's name in the help, its type or default, and the help.
_VALUES: tuple[tuple[str, str, Any, str], ...] = (
    (
        "--nproc-per-node",
        "N",
        str,
        "number of processes on this machine, or auto, gpu or cpu. Default: one per GPU, or 1",
    ),
    ("--nnodes --num_machines", "N[:M]", str, "number of machines, or the minimum and the maximum. Default: 1"),
    ("--num_processes", "N", int, "number of processes on all machines together"),
    ("--rdzv-endpoint", "HOST:PORT", str, "address of the machine where all machines rendezvous"),
    ("--rdzv-id", "NAME", str, "name of the run, the same on all machines"),
    ("--rdzv-backend", "NAME", str, "torch's rendezvous backend. Default: c10d, or static with --node-rank"),
    ("--rdzv-conf", "K=V,...", "", "settings of the backend: join_timeout, read_timeout, is_host, ..."),
    ("--node-rank --machine_rank", "R", int, "number of this machine, with --master-addr"),
    ("--master-addr --main_process_ip", "HOST", str, "address of machine 0. Default: 127.0.0.1"),
    ("--master-port --main_process_port", "PORT", int, "free port of machine 0. Default: 29500"),
    ("--local-addr", "HOST", str, "address of this machine. Default: the one that reaches the other machines"),
    ("--max-restarts", "N", 0, "restarts of all ranks after a failure. Default: 0"),
    ("--monitor-interval", "S", 0.1, "seconds between checks of the other machines. Default: 0.1"),
    ("--log-dir", "FOLDER", str, "folder for the files of --redirects and --tee"),
    ("--redirects -r", "0-3", "0", "write to files: 1 output, 2 error, 3 both; 0:1,1:3 for some ranks"),
    ("--tee -t", "0-3", "0", "like --redirects, and also write to the terminal"),
)
_FLAGS = (
    ("--module -m", "the script is the name of a module, as for python -m"),
    ("--no-python", "run the script directly, without Python"),
    ("--debug", "set TREADLE_DEBUG=1 for every rank"),
    ("--cpu", "hide the GPUs of this machine from the ranks"),
    ("--multi_gpu", "fail without a GPU"),
    ("--json", "print the exit status as a JSON object after the script's output; it must be the first option"),
    ("--standalone", "one machine only, which is the default"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options, which raises a ValueError for wrong options."""
    command_parser = _Parser(
        "treadle launch",
        usage="treadle launch [options] script.py [arguments of the script]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    _add_options(command_parser)
    command_parser.add_argument("script", help="script, or module with -m, or program with --no-python")
    command_parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return command_parser


def _add_options(command_parser: argparse.ArgumentParser) -> None:
    """Add the options. Each name can be spelled with hyphens or with underscores, as in torchrun."""

    def spell(names: str) -> Iterable[str]:
        listed = names.split()
        hyphens = [name[:2] + name[2:].replace("_", "-") for name in listed]
        return dict.fromkeys((*listed, *(name[:2] + name[2:].replace("-", "_") for name in listed), *hyphens))

    for names, metavar, default, text in _VALUES:
        kind = default if isinstance(default, type) else type(default)
        default = None if isinstance(default, type) else default
        command_parser.add_argument(*spell(names), metavar=metavar, type=kind, default=default, help=text)
    for names, text in _FLAGS:
        command_parser.add_argument(*spell(names), action="store_true", help=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `treadle launch`, and return its exit status, which is 2 if the run cannot be started."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        job = job_of(options)
        if options.debug:
            os.environ["TREADLE_DEBUG"] = "1"
        if options.cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        status = supervise(job)
    except (ValueError, OSError) as error:
        return fail("treadle launch", error)
    report(None, {"status": status, "command": job.command})
    return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `treadle launch`.

    Raises:
        ValueError: If an option is invalid.
    """
    command_parser = parser()
    options, unknown = command_parser.parse_known_args(arguments)
    for option in unknown:
        _refuse_option(option.partition("=")[0], command_parser)
    return options


def _refuse_option(name: str, command_parser: argparse.ArgumentParser) -> NoReturn:
    if (key := name.lstrip("-").replace("-", "_")) in _REFUSED:
        raise ValueError(f"{name} is not an option of treadle launch. {_REFUSED[key]}.")
    options = [option for action in command_parser._actions for option in action.option_strings if len(option) > 2]
    spelled = [option for option in options if "_" in name or "_" not in option]
    begun = [option for option in spelled if option.startswith(name)]
    raise ValueError(
        f"{name} is not an option of treadle launch.{nearest(name, begun or spelled)} `treadle launch --help` lists "
        "the options."
    )


def job_of(options: argparse.Namespace) -> Job:
    """Return the job that the options describe.

    Raises:
        ValueError: If the options are invalid.
    """
    nodes = _parse_nodes(options)
    if options.multi_gpu and (options.cpu or not _count_gpus()):
        raise ValueError(
            "--multi_gpu contradicts --cpu, which hides the GPUs. Remove one of them."
            if options.cpu
            else "--multi_gpu needs a GPU, but torch sees none on this machine. Remove --multi_gpu."
        )
    if options.no_python and options.module:
        raise ValueError("--module and --no-python contradict each other. Remove one of them.")
    python = [] if options.no_python else [sys.executable, "-u"]  # unbuffered: the output of ranks appears immediately
    if not (options.no_python or options.module or os.path.exists(options.script)):
        raise ValueError(
            f"the script {options.script!r} does not exist in {os.getcwd()}. Check its path, or add --module."
        )
    return Job(
        nproc=_parse_nproc(options, nodes),
        command=[*python, *(["-m"] if options.module else []), options.script, *options.arguments],
        run_id=options.rdzv_id or "",
        nodes=nodes,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        log_dir=options.log_dir,
        redirects=options.redirects,
        tee=options.tee,
    )


def _parse_nodes(options: argparse.Namespace) -> Nodes | None:
    """Return the machines of the run; None for one machine without ``--rdzv-endpoint``."""
    text = options.nnodes or "1"
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"--nnodes {text!r} must have the form N or N:M, such as 2 or 1:4.")
    least, most = int(match[1]), int(match[2] or match[1])
    numbered = [
        name
        for name, value in (
            ("--node-rank", options.node_rank is not None),
            ("--master-addr", options.master_addr),
            ("--master-port", options.master_port),
        )
        if value
    ]
    if options.rdzv_endpoint and numbered:
        raise ValueError(
            f"--rdzv-endpoint can't be combined with {' and '.join(numbered)}. Remove --rdzv-endpoint or "
            f"{' and '.join(numbered)}."
        )
    if (least, most) == (1, 1) and not options.rdzv_endpoint:
        for name in ("--node-rank", "--rdzv-conf", "--local-addr"):
            if value := getattr(options, name[2:].replace("-", "_")):
                raise ValueError(
                    f"{name} {value} is for several machines, but --nnodes is {text}. Set --nnodes to the number of "
                    f"machines, or remove {name}."
                )
        return None
    if options.standalone:
        other = "--rdzv-endpoint" if (least, most) == (1, 1) else f"--nnodes {text}"
        raise ValueError(f"--standalone is for one machine and contradicts {other}. Remove one of them.")
    endpoint = options.rdzv_endpoint or ""
    if numbered:
        if options.node_rank is None:
            raise ValueError(
                f"{' and '.join(numbered)} {'needs' if len(numbered) == 1 else 'need'} --node-rank. Number the "
                "machines from 0."
            )
        endpoint = f"{options.master_addr or '127.0.0.1'}:{options.master_port or 29500}"
    conf = dict(part.partition("=")[::2] for part in options.rdzv_conf.split(",") if part)
    if any(not key or not value for key, value in conf.items()):
        raise ValueError(f"--rdzv-conf {options.rdzv_conf!r} must have the form KEY=VALUE,KEY=VALUE.")
    return Nodes(
        least=least,
        most=most,
        endpoint=endpoint,
        rank=options.node_rank,
        local_addr=options.local_addr,
        conf=conf,
        backend=options.rdzv_backend or "",
    )


def _parse_nproc(options: argparse.Namespace, nodes: Nodes | None) -> int:
    text, total = options.nproc_per_node, options.num_processes
    if total is not None:
        if text is not None:
            raise ValueError("--nproc-per-node and --num_processes can't be combined. Remove one of them.")
        machines = 1 if nodes is None else nodes.most
        if total < machines or total % machines:
            raise ValueError(f"--num_processes {total} must be a multiple of the number of machines, {machines}.")
        return int(total) // machines
    gpus = 0 if options.cpu else _count_gpus()
    if text is None:
        return gpus or 1
    if text == "gpu" and not gpus:
        raise ValueError(
            "--nproc-per-node gpu contradicts --cpu, which hides the GPUs. Remove --cpu, or pass a number."
            if options.cpu
            else "--nproc-per-node gpu needs a GPU, but torch sees none on this machine. Pass a number."
        )
    if text in ("auto", "gpu", "cpu"):
        return gpus if gpus and text != "cpu" else cpus()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--nproc-per-node {text!r} must be a positive number, auto, gpu or cpu.")
    return int(text)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
