"""Findings of a diagnosis, each about one subject and marked ``"good"``, ``"note"`` or ``"fault"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from ...common.messages import format_count
from ..distributed import LaunchEnvironment
from .machine import OPTIONAL, REQUIRED, Facts, format_bytes

GOOD, NOTE, FAULT = "good", "note", "fault"
_MARKS = (GOOD, NOTE, FAULT)

_OLDEST_LINUX = (5, 5)  # on older kernels processes may hang, as Accelerate warns
_SMALL_SHM, _MODEST_SHM = 100e6, 1e9  # bytes; Docker's default is 64 MiB, which is too little for a few batches
_FULL_DISK, _MODEST_DISK = 100e6, 5e9  # bytes
# A socket's path has at most 107 characters; /treadle-<32>/pymp-<8>/listener-<8> leaves this many to the temp folder.
_LONGEST_TEMP = 107 - len("/treadle-/pymp-/listener-") - 32 - 8 - 8
_LOW_MEMORY = 500e6  # bytes
_FEW_FILES = 1024  # data workers, connections and sharded checkpoints each need some
# Variables that `accelerate launch` sets, with the values that request nothing.
_OF_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_USE_FSDP": "false",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_USE_MEGATRON_LM": "false",
}
_OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}
_CLOCK_NOTE, _CLOCK_FAULT = 0.1, 1.0  # seconds


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        mark: ``"good"``, ``"note"`` or ``"fault"``.
        subject: Name of the inspected item, such as ``"memory"``.
        text: State of the subject and, for a problem, the fix if one is known.
    """

    mark: str
    subject: str
    text: str

    def to_dict(self) -> dict[str, str]:
        """Return the finding as a dict, for JSON."""
        return asdict(self)


def find_worst(marks: Iterable[str]) -> str:
    """Return the worst of the marks; ``"good"`` if there are none."""
    return max(marks, key=_MARKS.index, default=GOOD)


def judge(
    ranks: list[Facts],
    *,
    size: int,
    launched: LaunchEnvironment | None,
    missing: list[int],
    errors: Iterable[str],
    measured: Facts,
) -> list[Finding]:
    """Return the findings about a job in printing order.

    ``ranks`` contains the result of `inspect_process` for each rank that reported, plus the key ``"rank"``.
    ``launched`` holds the launcher's settings; None without a launcher.
    """
    return [
        _judge_presence(ranks, size, launched, missing),
        *(Finding(FAULT, "meeting", error) for error in errors),
        _judge_versions(ranks, "versions", ("Python", "torch", "treadle", "numpy")),
        _judge_versions(ranks, "libraries", tuple(dict.fromkeys((*REQUIRED[1:], *OPTIONAL)))),
        *(_judge_ranks(ranks, judge_rank) for judge_rank in _RANK_JUDGES),
        *(_judge_ranks(ranks, _folder_judge(name)) for name in ranks[0]["folders"]),
        *_judge_environment(ranks, launched),
        *_judge_measurements(measured),
        *([Finding(GOOD, "all-reduce", "one rank, nothing to reduce")] if size == 1 and launched is not None else []),
    ]


def _judge_presence(ranks: list[Facts], size: int, launched: LaunchEnvironment | None, missing: list[int]) -> Finding:
    hosts = list(dict.fromkeys(facts["host"] for facts in ranks))
    place = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} machines"
    if missing:
        absent = (
            f"{format_ranks(missing)} of {size} did not report: not started, hanging, or unable to reach MASTER_ADDR"
        )
        return Finding(FAULT, "ranks", absent)
    if launched is None:
        return Finding(GOOD, "ranks", f"this process alone, {place}")
    if len(ranks) < size:
        return Finding(NOTE, "ranks", f"the lines below describe rank {ranks[0]['rank']} of {size} alone, {place}")
    starter = "treadle" if launched.supervisor else launched.launcher
    environment = ranks[0]["environment"]
    address, port = launched.address or (environment.get("MASTER_ADDR"), environment.get("MASTER_PORT"))
    return Finding(GOOD, "ranks", f"{size} of {size} {place}, started by {starter}, met at {address}:{port}")


def _judge_versions(ranks: list[Facts], subject: str, packages: tuple[str, ...]) -> Finding:
    """Compare the versions on all ranks with those on rank zero or the lowest rank that reported."""
    first = ranks[0]
    differences = []
    for package in packages:
        expected = first["versions"].get(package, "none")
        others: dict[str, list[int]] = {}
        for facts in ranks[1:]:
            if (version := facts["versions"].get(package, "none")) != expected:
                others.setdefault(version, []).append(facts["rank"])
        differences += [
            f"{package} {expected} on rank {first['rank']}, {version} on {format_ranks(numbers)}"
            for version, numbers in others.items()
        ]
    if differences:
        return Finding(FAULT, subject, "; ".join(differences) + ". Install the same versions on all machines.")
    versions = [f"{name} {first['versions'][name]}" for name in packages if name in first["versions"]]
    return Finding(GOOD, subject, ", ".join(versions))


def _judge_ranks(ranks: list[Facts], judge_rank: Callable[[Facts], Finding]) -> Finding:
    """Return the worst finding across ranks, prefixed with its ranks unless it is good or the same on all ranks."""
    by_finding: dict[Finding, list[int]] = {}
    for facts in ranks:
        by_finding.setdefault(judge_rank(facts), []).append(facts["rank"])
    worst = find_worst(finding.mark for finding in by_finding)
    findings = {finding: numbers for finding, numbers in by_finding.items() if finding.mark == worst}
    first, numbers = next(iter(findings.items()))
    if worst == GOOD or len(by_finding) == 1:
        return first
    more = sum(map(len, findings.values())) - len(numbers)
    tail = f" (and {more} more)" if more else ""
    return Finding(worst, first.subject, f"{format_ranks(numbers)}{tail}: {first.text}")


def _judge_system(facts: Facts) -> Finding:
    name, release = facts["system"]["name"], facts["system"]["release"]
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if name == "Linux" and numbers < _OLDEST_LINUX:
        hint = "processes may hang on a kernel older than 5.5. Upgrade the kernel"
        return Finding(NOTE, "system", f"Linux {release}: {hint}.")
    return Finding(GOOD, "system", f"{name} {release}")


def _judge_cpus(facts: Facts) -> Finding:
    cpu, environment = facts["cpu"], facts["environment"]
    usable = min(cpu["usable"], cpu["quota"] or cpu["usable"])
    local_ranks = int(environment.get("LOCAL_WORLD_SIZE", 1))
    threads = "thread" if cpu["threads"] == 1 else "threads"
    ranks = format_count(local_ranks, "rank")
    text = f"{cpu['name']}, {usable:g} of {cpu['installed']} usable, {cpu['threads']} {threads} per rank"
    if "OMP_NUM_THREADS" in environment:
        text += f" (OMP_NUM_THREADS={environment['OMP_NUM_THREADS']})"
    if cpu["threads"] * local_ranks > max(usable, local_ranks):
        hint = f"{ranks} with {cpu['threads']} {threads} each use more CPUs than are available"
        return Finding(NOTE, "CPUs", f"{text}: {hint}. Set OMP_NUM_THREADS={max(1, int(usable // local_ranks))}.")
    if usable < local_ranks:
        return Finding(NOTE, "CPUs", f"{text}: less than one CPU per rank, for {ranks} on this machine.")
    return Finding(GOOD, "CPUs", text)


def _judge_memory(facts: Facts) -> Finding:
    memory = facts["memory"]
    text = f"{format_bytes(memory['available'])} of {format_bytes(memory['total'])} available"
    if memory["limit"] is not None and memory["limit"] < memory["total"]:
        text += f", limited to {format_bytes(memory['limit'])} by the container or batch job"
    return Finding(NOTE if memory["available"] < _LOW_MEMORY else GOOD, "memory", text)


def _judge_devices(facts: Facts) -> Finding:
    devices, visible = facts["devices"], facts["environment"].get("CUDA_VISIBLE_DEVICES")
    cuda = devices["cuda"]
    if not cuda:
        if devices["files"] and visible != "":
            text = "torch sees no CUDA device, but this machine has an NVIDIA driver. Check with `nvidia-smi` whether"
            return Finding(FAULT, "devices", f"{text} the driver supports torch's CUDA version (torch.version.cuda).")
        hidden = ", hidden by CUDA_VISIBLE_DEVICES=''" if devices["files"] else ""
        return Finding(GOOD, "devices", f"{'mps' if devices['mps'] else 'CPU only'}{hidden}")
    names = [device["name"] for device in cuda]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    free = min(device["free"] for device in cuda)
    text = (
        f"{counts}, at least {format_bytes(free)} of {format_bytes(cuda[0]['total'])} free, CUDA {devices['runtime']}"
    )
    text += f", driver {devices['driver']}" if devices["driver"] else ""
    if devices["pairs"]:
        text += f", P2P for {devices['peer pairs']} of {devices['pairs']} pairs"
        text += {True: ", NVLink", False: ", no NVLink", None: ""}[devices["nvlink"]]
    named = len([part for part in visible.split(",") if part.strip()]) if visible is not None else 0
    if len(cuda) < named:
        mismatch = f"CUDA_VISIBLE_DEVICES={visible!r} names {named} devices, but torch sees only {len(cuda)}"
        return Finding(FAULT, "devices", f"{text}: {mismatch}.")
    crowded = any(device["free"] < device["total"] / 2 for device in cuda)
    return Finding(
        NOTE if crowded else GOOD, "devices", text + (": another program uses GPU memory." if crowded else "")
    )


def _judge_backends(facts: Facts) -> Finding:
    backends, cuda = facts["backends"], facts["devices"]["cuda"]
    text = ", ".join(f"{name} {version}".strip() for name, version in backends.items())
    absent = [name for name in ("gloo", *(["nccl"] if cuda else [])) if name not in backends]
    if absent:
        names = " and ".join(absent)
        return Finding(FAULT, "backends", f"torch was built without {names}. Install a build of torch with {names}.")
    return Finding(GOOD, "backends", text)


def _judge_limits(facts: Facts) -> Finding:
    files, memory = facts["limits"]["open files"], facts["limits"]["locked memory"]
    text = f"open files {'unlimited' if files < 0 else files}"
    text += f", locked memory {'unlimited' if memory < 0 else format_bytes(memory)}"
    if 0 <= files < _FEW_FILES:
        return Finding(NOTE, "limits", f"{text}: too few for many data workers. Raise the limit with `ulimit -n`.")
    return Finding(GOOD, "limits", text)


def _judge_start_method(facts: Facts) -> Finding:
    return Finding(GOOD, "data workers", f"started by {facts['start method']}")


def _judge_port(facts: Facts) -> Finding:
    if facts["free port"] is None:
        return Finding(FAULT, "ports", "127.0.0.1 has no free port.")
    return Finding(GOOD, "ports", "free ports are available")


_RANK_JUDGES = (
    *(_judge_system, _judge_cpus, _judge_memory, _judge_devices, _judge_backends),
    *(_judge_limits, _judge_start_method, _judge_port),
)


def _folder_judge(name: str) -> Callable[[Facts], Finding]:
    def judge_folder(facts: Facts) -> Finding:
        folder = facts["folders"][name]
        where = "" if folder["path"] == name else f"{folder['path']}: "
        if folder["error"] is not None:
            return Finding(FAULT, name, f"{where}can't write a file: {folder['error']}.")
        free = folder["free"]
        space = f"{where}{format_bytes(free)} of {format_bytes(folder['total'])} free"
        if name == "/dev/shm":
            if free < _SMALL_SHM:
                hint = "data workers crash with a bus error. Use docker run --shm-size=8g, or --ipc=host"
                return Finding(FAULT, name, f"{space}: {hint}.")
            return Finding(NOTE if free < _MODEST_SHM else GOOD, name, space)
        if free < _FULL_DISK:
            return Finding(FAULT, name, f"{space}: too little for checkpoints.")
        if name == "temp folder" and len(folder["path"]) > _LONGEST_TEMP:
            text = "too long for the sockets of data workers under `treadle launch` or devices=. Set TMPDIR to a path"
            return Finding(NOTE, name, f"{where}{text} of at most {_LONGEST_TEMP} characters.")
        return Finding(NOTE if free < _MODEST_DISK else GOOD, name, space)

    return judge_folder


def _judge_environment(ranks: list[Facts], launched: LaunchEnvironment | None) -> Iterator[Finding]:
    by_text: dict[tuple[str, str], list[int]] = {}
    for facts in ranks:
        for mark, text in _list_contradictions(facts, launched):
            by_text.setdefault((mark, text), []).append(facts["rank"])
    for (mark, text), numbers in by_text.items():
        ranks_text = "" if len(numbers) == len(ranks) else f"{format_ranks(numbers)}: "
        yield Finding(mark, "environment", ranks_text + text)
    if not by_text:
        yield Finding(GOOD, "environment", "no variables that contradict each other")


def _list_contradictions(facts: Facts, launched: LaunchEnvironment | None) -> Iterator[tuple[str, str]]:
    """Yield the mark and the text of each problem with environment variables."""
    env = facts["environment"]
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    if "RANK" in env and not by_torchrun:
        for size_name, rank_name in _OTHER_LAUNCHERS.items():
            other_size = env.get(size_name, "1")
            if other_size != "1" and (env.get("WORLD_SIZE"), env["RANK"]) != (other_size, env.get(rank_name)):
                used, unused = (
                    " and ".join(f"{name}={env[name]}" for name in names if name in env)
                    for names in (("RANK", "WORLD_SIZE"), (rank_name, size_name))
                )
                yield (
                    FAULT,
                    f"Treadle uses {used}, which contradicts {unused}. Unset RANK and WORLD_SIZE if srun or mpirun "
                    "starts the ranks.",
                )
    address = env.get("MASTER_ADDR", "")
    if launched is not None and launched.node_count > 1 and (address == "localhost" or address.startswith("127.")):
        yield (
            FAULT,
            f"MASTER_ADDR={address} is a loopback address, but the run has {launched.node_count} machines. Set it to "
            "the address of rank 0's machine.",
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL accepts prefixes, "^" for all others and "=" for an exact name.
        wanted = [part.lstrip("=") for part in env.get(name, "").split(",") if part]
        unknown = [part for part in wanted if not any(other.startswith(part) for other in facts["interfaces"])]
        if unknown and not env[name].startswith("^"):
            existing = ", ".join(facts["interfaces"])
            yield (
                FAULT,
                f"{name}={env[name]}, but this machine has no interface {', '.join(unknown)}. It has {existing}.",
            )
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"):
        if env.get(name) == "1" and facts["devices"]["cuda"]:
            yield NOTE, f"{name}=1 makes collectives slower. Unset it unless it is needed."
    ignored = [f"{name}={env[name]}" for name, default in _OF_ACCELERATE.items() if env.get(name, default) != default]
    if ignored:
        yield (
            NOTE,
            f"Treadle does not read {', '.join(ignored)}. Pass the setting to Accelerator(...) or Trainer(...).",
        )


def _judge_measurements(measured: Facts) -> Iterator[Finding]:
    if "clocks" in measured:
        offsets = measured["clocks"]
        rank = max(range(len(offsets)), key=lambda number: abs(offsets[number]))
        offset = abs(offsets[rank])
        if offset < _CLOCK_NOTE:
            yield Finding(GOOD, "clocks", f"at most {offset * 1e3:.1f} ms from rank 0's")
        else:
            side = "ahead of" if offsets[rank] > 0 else "behind"
            text = f"the clock of rank {rank} is {offset:.1f} s {side} rank 0's, so times in logs and checkpoints "
            text += "differ. Synchronize the clocks with NTP."
            yield Finding(FAULT if offset >= _CLOCK_FAULT else NOTE, "clocks", text)
    if "all-reduce" in measured:
        all_reduce = measured["all-reduce"]
        text = (
            f"{all_reduce['backend']}, latency {all_reduce['latency'] * 1e6:.0f} us, bus bandwidth "
            f"{format_bytes(all_reduce['bandwidth'])}/s for {all_reduce['bytes'] >> 20} MiB"
        )
        yield Finding(GOOD, "all-reduce", text)


def format_ranks(ranks: list[int]) -> str:
    """Format ranks as "rank 1" or "ranks 1, 2". The ranks after the first eight are only counted."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
