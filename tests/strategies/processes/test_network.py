"""The network interface that other machines reach this one by."""

import os
import socket

import pytest
from treadle.strategies.processes import interface_of, name_gloo_interface, network


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A machine whose name is a loopback address, with a route to the others through the interface eth7."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    hosts = {"leader": "127.0.1.1", "other": "10.0.0.9", "192.0.2.1": "192.0.2.1", socket.gethostname(): "127.0.1.1"}
    sources = {"127.0.1.1": "127.0.0.1", "10.0.0.9": "10.0.0.2", "192.0.2.1": "172.16.0.2"}

    def find(host, *_, **__):
        if host not in hosts:
            raise socket.gaierror(f"no host {host}")
        return [(0, 0, 0, "", (hosts[host], 0))]

    monkeypatch.setattr(socket, "gethostbyname", lambda name: find(name)[0][4][0])
    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(network, "find_source_address", lambda target, port=9: sources[target])
    monkeypatch.setattr(network, "interface_of", {"10.0.0.2": "eth7", "172.16.0.2": "eth8"}.get)
    return hosts


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("other", "eth7"),
        ("leader", "eth8"),  # on the leader itself, whose name leads back to it
        ("unknown", "eth8"),
        ("127.0.0.1", None),  # all processes are on this machine
        ("localhost", None),
    ],
)
def test_gloo_takes_the_interface_that_others_reach(host, expected):
    name_gloo_interface(host)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    name_gloo_interface("other")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_name_that_others_can_use_is_left_to_gloo(names):
    names[socket.gethostname()] = "10.0.0.2"
    name_gloo_interface("other")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_interface_of_an_address(monkeypatch):
    monkeypatch.undo()
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
