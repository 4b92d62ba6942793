"""Description of a job on this machine, and of the rendezvous of a run's machines."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...common.validation import check_int, check_positive
from ..processes import find_source_address, interface_of, is_named_loopback, open_datagram_socket

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")  # signals that end a run
GRACE = 30.0
FAILURE_GRACE = 2.0
_PORTS = {"c10d": 29400, "static": 29500}  # torchrun's defaults
_PATIENCE = 30.0  # seconds; a pod's name is not known everywhere immediately after it starts


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Machines of a run, and the endpoint of their rendezvous.

    Args:
        least: Minimum number of machines needed to start or restart the run.
        most: Maximum number of machines.
        endpoint: ``HOST:PORT`` of the store that the machines use for their rendezvous.
        rank: Number of this machine, if the user numbers the machines. Default: no number.
        local_addr: Address at which the other machines reach this one. Default: chosen by Treadle or torch.
        conf: Further settings of torch's rendezvous, such as ``join_timeout``.
        backend: Torch's name for the rendezvous backend. Default: ``"static"`` with a ``rank``, otherwise ``"c10d"``.
    """

    least: int
    most: int
    endpoint: str
    rank: int | None = None
    local_addr: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            fixed = self.least == self.most
            rule = "at least 1" if fixed else "N:M, where N is at least 1 and at most M"
            raise ValueError(f"--nnodes {self.least if fixed else f'{self.least}:{self.most}'} must be {rule}.")
        if self.rank is not None and self.least < self.most:
            raise ValueError(
                f"--node-rank {self.rank} needs a fixed number of machines, but this run has --nnodes "
                f"{self.least}:{self.most}. Use --nnodes {self.most}, or --rdzv-endpoint instead of --node-rank."
            )
        if self.rank is not None and not 0 <= self.rank < self.most:
            valid = "0" if self.most == 1 else f"from 0 to {self.most - 1}"
            raise ValueError(f"--node-rank {self.rank} must be {valid}, because --nnodes is {self.most}.")
        if not self.endpoint:
            raise ValueError(
                f"--nnodes {self.most} needs an endpoint. Give every machine the same --rdzv-endpoint HOST:PORT, or "
                "the same --master-addr HOST with a different --node-rank."
            )
        object.__setattr__(self, "backend", self.backend or ("c10d" if self.rank is None else "static"))

    @property
    def elastic(self) -> bool:
        """True if the run may continue with fewer machines."""
        return self.least < self.most

    def place(self) -> Place:
        """Return the addresses with which this machine joins the rendezvous."""
        if self.backend not in _PORTS:  # etcd and user-registered backends interpret it themselves
            return Place(self.endpoint, self.local_addr, owner=False, interface=None)
        host, port = _split(self.endpoint, _PORTS[self.backend], numbered=self.rank is not None)
        target = _resolve(host, port, f"the rendezvous endpoint is {host}:{port}")
        requested_address = (
            _resolve(self.local_addr, 0, f"--local-addr is {self.local_addr}") if self.local_addr else None
        )
        if requested_address is not None and not _is_local_address(requested_address):
            raise ValueError(
                f"--local-addr {self.local_addr} is not an address of this machine. `ip addr` lists its addresses."
            )
        local = requested_address or _find_source_address(target, port)
        return Place(
            f"{_add_brackets(target)}:{port}",
            local,
            owner=_is_local_address(target),
            interface=_choose_interface(local),
        )


@dataclass(frozen=True)
class Place:
    """Addresses with which this machine joins the rendezvous; the result of `Nodes.place`.

    Attributes:
        endpoint: ``HOST:PORT`` of the store.
        local_addr: Address of this machine; None if torch chooses it.
        owner: Whether the endpoint's address is known to belong to this machine.
        interface: Network interface to set for gloo, or None.
    """

    endpoint: str
    local_addr: str | None
    owner: bool
    interface: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Command that a supervisor runs on this machine, and its settings.

    Args:
        nproc: Number of ranks on this machine.
        command: The program and its arguments.
        run_id: Name of the run, the same on all machines; `TORCHELASTIC_RUN_ID` in the ranks. Default: a random
            name, or torchrun's default, ``"none"``, on several machines.
        grace: Seconds from a forwarded signal to SIGKILL. The countdown restarts as long as a rank is leaving because
            of the signal; see `mark_leaving`. Default: 30.
        failure_grace: Seconds from SIGTERM to SIGKILL for the other ranks once a rank has failed, unless a rank is
            leaving because of a signal. Default: 2.
        nodes: Machines of the run and their rendezvous. Default: this machine alone.
        max_restarts: Maximum number of restarts of all ranks after a failure. Default: 0.
        monitor_interval: Seconds between checks for reports of other machines. Default: 0.1.
        log_dir: Folder for the files that ``redirects`` and ``tee`` request. Default: none.
        redirects: Torchrun's ``--redirects``. Default: ``"0"``, none.
        tee: Torchrun's ``--tee``. Default: ``"0"``, none.
    """

    nproc: int
    command: list[str]
    run_id: str = ""
    grace: float = GRACE
    failure_grace: float = FAILURE_GRACE
    nodes: Nodes | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", self.run_id or (uuid.uuid4().hex if self.nodes is None else "none"))
        check_int("nproc", self.nproc, 1)
        check_int("--max-restarts", self.max_restarts, 0)
        check_positive("--monitor-interval", self.monitor_interval)
        for name, value in (("--redirects", self.redirects), ("--tee", self.tee)):
            if self.log_dir is None and value != "0":
                raise ValueError(f"{name} {value} writes files. Add --log-dir FOLDER.")
        if self.nodes is not None and self.nodes.backend == "static" and self.max_restarts:
            raise ValueError(
                f"--max-restarts {self.max_restarts} can't be combined with --node-rank, because machines with fixed "
                "numbers can't rendezvous a second time. Use --rdzv-endpoint HOST:PORT instead of --node-rank."
            )


def _split(endpoint: str, default_port: int, *, numbered: bool) -> tuple[str, int]:
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or "]" in port:
        host, port = endpoint.strip(), str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        if numbered:  # the endpoint consists of --master-addr and --master-port
            raise ValueError(f"--master-port {port} must be from 1 to 65535.")
        raise ValueError(f"--rdzv-endpoint {endpoint!r} must have the form HOST:PORT, with a port from 1 to 65535.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _resolve(host: str, port: int, purpose: str) -> str:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            lasting = not isinstance(error, socket.gaierror) or error.errno == socket.EAI_FAMILY
            if lasting or time.monotonic() > deadline:
                raise ValueError(
                    f"{purpose}, but this machine can't resolve the host {host!r} ({error}). Check the name, or use an "
                    "IP address."
                ) from None
            time.sleep(1)


def _add_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_local_address(address: str) -> bool:
    with open_datagram_socket(address) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _find_source_address(target: str, port: int) -> str:
    try:
        return find_source_address(target, port)
    except OSError as error:
        raise ValueError(
            f"this machine has no route to {target}:{port}, the rendezvous endpoint ({error}). "
            "Check --rdzv-endpoint or --master-addr, and the network."
        ) from None


def _choose_interface(address: str) -> str | None:
    """Return the network interface to set for gloo; None if none has to be set.

    Without this setting, gloo uses the address of the host's name, which is often a loopback address.
    """
    if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    if (interface := interface_of(address)) is not None:
        return interface
    if is_named_loopback():
        raise ValueError(
            f"this machine's name resolves to a loopback address or to none, and {address} is not the first address of "
            "any network interface. Set GLOO_SOCKET_IFNAME to the interface through which the other machines reach "
            "this machine (`ip addr` lists the interfaces), or set --local-addr."
        )
    return None
