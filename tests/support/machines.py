"""Machines of a run, played by agents on this one: on its loopback interface, or in network namespaces of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess

import pytest

from support.fault_cells import kill_all
from support.launches import wait_for
from support.processes import clean_environment, programs
from support.restarts import JOB, read_events


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces():
    """Two network namespaces joined by a pair of interfaces, 10.213.7.1 and 10.213.7.2; the host's name is loopback."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip: apt-get install iproute2")
    names = [f"treadle{os.getpid()}{letter}" for letter in "ab"]
    links = [f"tr{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # the interfaces go with it
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Machines:
    """Agents that run ``restarted_job.py`` in one folder, as machines with a disk in common. A context manager.

    Args:
        folder: with ``job.json``.
        command: the launcher and its options, without the place where the machines meet.
        hosts: network namespaces, of which the first holds the store; else all machines share the loopback interface.
    """

    def __init__(self, folder, command, hosts=()):
        self.folder, self.command, self.hosts = folder, command, hosts
        self.agents = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = "10.213.7.1:29400" if hosts else f"127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for agent in self.agents:
            kill_all(self.folder, agent)

    def start(self):
        """Start one more machine; returns its number."""
        number = len(self.agents)
        options = ["--nproc-per-node", "1", "--rdzv-endpoint", self.endpoint, str(JOB)]
        if self.command[0] == "torchrun":  # it guesses from the host's name who holds the store, and which address
            address = f"10.213.7.{number + 1}" if self.hosts else "127.0.0.1"
            options = ["--rdzv-backend", "c10d", "--local-addr", address, *options]
        prefix = ["ip", "netns", "exec", self.hosts[number]] if self.hosts else []
        interface = self.link(number) if self.hosts else "lo"
        env = clean_environment({"GLOO_SOCKET_IFNAME": interface, "TREADLE_TEST_MACHINE": str(number)})
        env["PATH"] = f"{programs()}{os.pathsep}{env['PATH']}"
        program = str(programs() / self.command[0])
        with (self.folder / f"output-{number}").open("w") as output:
            self.agents.append(
                subprocess.Popen(
                    [*prefix, program, *self.command[1:], *options],
                    cwd=self.folder,
                    env=env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        if number == 0 and not self.hosts:
            self._await_store()  # of two that try, the first to get the port would hold it
        return number

    def _await_store(self):
        host, _, port = self.endpoint.partition(":")
        with socket.socket() as probe:
            wait_for(lambda: probe.connect_ex((host, int(port))) == 0, 60, self.outputs)

    def link(self, number):
        return f"tr{os.getpid()}{'ab'[number]}"

    def kill(self, number):
        """Kill everything on one machine at once."""
        if self.hosts:
            pids = subprocess.run(
                ["ip", "netns", "pids", self.hosts[number]], capture_output=True, text=True, check=True
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        else:
            event = self.find_start(number)
            for pid in (event["launcher"], event["pid"]):
                os.kill(pid, signal.SIGKILL)

    def terminate(self, number):
        """Tell one machine, started by our launcher, to leave."""
        os.kill(self.find_start(number)["launcher"], signal.SIGTERM)

    def find_start(self, number):
        """Return what a machine's latest rank told first; whatever was started by the test may only stand for it."""
        return [event for event in read_events(self.folder) if event.get("machine") == number][-1]

    def cut(self, number):
        """Cut the machine's network off."""
        ip("-n", self.hosts[number], "link", "set", self.link(number), "down")

    def wait(self, number, limit=120):
        """Return the exit status of a machine's launcher."""
        return self.agents[number].wait(limit)

    def outputs(self):
        return "\n".join((self.folder / f"output-{number}").read_text() for number in range(len(self.agents)))

    def await_events(self, wanted, count, limit=120):
        """Wait until the ranks have told so many events of a kind."""
        wait_for(lambda: sum(map(wanted, read_events(self.folder))) >= count, limit, self.outputs)
