"""Host names of this coordinator, as protection against DNS rebinding.

The domain of a malicious web page can resolve to this machine's address. Its calls, which the browser then allows, have
the page's domain as ``Host``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d*)?")


class Hosts:
    """Names of this coordinator: IP addresses, this machine's names, and ``others``, separated by commas."""

    def __init__(self, others: str) -> None:
        names = {_plain(name.strip()) for name in others.split(",")} - {""}
        self._any = "*" in names
        own = _plain(socket.gethostname())
        self._names = names | {"localhost", own, f"{own.partition('.')[0]}.local"}

    def learn(self) -> None:
        """Look up this machine's full name in the background."""
        threading.Thread(target=lambda: self._names.add(_plain(socket.getfqdn())), daemon=True).start()

    def include(self, host: str | None, server: str | None = None) -> bool:
        """Return True if ``host`` is a name of this coordinator; browsers always send a host.

        server: the name under which the server was called, if it is known without a network.
        """
        if host is None or self._any:
            return True
        found = HOST.fullmatch(host.strip().lower())
        if found is None:
            return False
        name = _plain(found[1])
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names or name == server
        return True


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
