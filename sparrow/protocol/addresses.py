"""Addresses of this machine: those that mean another machine elsewhere, and the one by which its network calls it."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

ELSEWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Addresses of nobody (RFC 5737, RFC 3849): the way there begins at this machine's own address. Nothing is sent."""


def is_loopback(host: str) -> bool:
    """Return whether calls to this host never leave the machine that makes them."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_unspecified(host: str) -> bool:
    """Return whether this host stands for all addresses of a machine, on which a server listens: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def means_caller(host: str) -> bool:
    """Return whether this host is to each machine the machine itself, so that nobody else is reached by it."""
    return is_loopback(host) or is_unspecified(host)


def in_network(*versions: int) -> str | None:
    """Return the address of this machine in its network, of the first of these versions of IP that it has; None without
    one."""
    for version in versions or (4, 6):
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:  # no network, or none of this kind
            way.connect((ELSEWHERE[version], 9))
            found: str = way.getsockname()[0]
            if not means_caller(found):
                return found
    return None


def in_url(host: str) -> str:
    """Return a host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
