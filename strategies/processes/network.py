"""Addresses and network interfaces of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys

_ELSEWHERE = "192.0.2.1"  # reserved for documents (RFC 5737): the default route leads there, and no packet is sent


def open_datagram_socket(address: str) -> socket.socket:
    """Return a UDP socket for the address's family."""
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def find_source_address(target: str, port: int = 9) -> str:
    """Return the address from which this machine reaches ``target``, without sending a packet."""
    with open_datagram_socket(target) as probe:
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has ``address``; None if no interface matches.

    An IPv4 address must be the first one of its interface.
    """
    import fcntl

    if ":" in address:
        with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            packed = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
            return next((line.split()[-1] for line in table if line.startswith(packed)), None)
        return None
    get_address = 0x8915  # SIOCGIFADDR of linux/sockios.h
    with open_datagram_socket(address) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface is down, or has no address
                response = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(response[20:24]) == address:
                    return name
    return None


def is_named_loopback() -> bool:
    """Return whether this machine's name resolves to a loopback address or to no address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(socket.gethostname())).is_loopback
    except OSError:
        return True


def name_gloo_interface(meeting_host: str) -> None:
    """Set gloo's network interface to the one that reaches the other machines, if gloo would use a loopback address."""
    alone = meeting_host == "localhost" or meeting_host.startswith("127.") or meeting_host == "::1"
    if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ or alone or not is_named_loopback():
        return
    for target in (meeting_host, _ELSEWHERE):  # on the machine with that name it may again be a loopback address
        with contextlib.suppress(OSError):
            address = str(socket.getaddrinfo(target, None, type=socket.SOCK_DGRAM)[0][4][0])
            source = find_source_address(address)
            interface = None if ipaddress.ip_address(source.partition("%")[0]).is_loopback else interface_of(source)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
                return
