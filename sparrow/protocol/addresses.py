"""Addresses of this machine: loopback and wildcard addresses, and its address in the local network."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

ELSEWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Unused addresses (RFC 5737, RFC 3849): a route to them starts at this machine's own address. Nothing is sent."""


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_unspecified(host: str) -> bool:
    """Return whether a host is a wildcard address: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def means_caller(host: str) -> bool:
    """Return whether a host always refers to the calling machine."""
    return is_loopback(host) or is_unspecified(host)


def in_network(*versions: int) -> str | None:
    """Return this machine's address in its network, of the first available IP version, or None."""
    for version in versions or (4, 6):
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        # OSError: there is no network, or none of this version.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((ELSEWHERE[version], 9))
            found: str = way.getsockname()[0]
            if not means_caller(found):
                return found
    return None


def in_url(host: str) -> str:
    """Return a host for use in a URL, with IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
