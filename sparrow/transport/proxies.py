"""The proxy of a client, from the environment.

http_proxy, https_proxy, all_proxy     the proxy, for addresses of this scheme or of both; also in capitals
no_proxy                               hosts that need none: names and the names below them, addresses, networks
                                       such as 10.0.0.0/8 or fe80::/10, each with or without a port; * for all
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.request import getproxies_environment

from ..protocol.addresses import in_url
from ..protocol.errors import BadArgument
from . import tls
from .library import httpx
from .variables import Setting, without_password

SCHEMES = ("http", "https", "socks5", "socks5h")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ProxySetting(Setting):
    """The proxy for calls to ``host``."""

    host: str

    @property
    def url(self) -> str:
        """The proxy's URL; http is the scheme of a value without one."""
        return self.value if "://" in self.value else f"http://{self.value}"

    def proxy(self) -> httpx.Proxy:
        """Return the proxy. Raises BadArgument if its URL is invalid."""
        try:
            url = httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError) as error:
            raise self.unusable(without_password(str(error))) from None
        if url.scheme not in SCHEMES:
            raise self.unusable(f"{url.scheme} is none of the schemes {', '.join(SCHEMES)}")
        if not url.host:
            raise self.unusable("it names no host")
        if url.port is not None and not 0 < url.port < 65536:
            raise self.unusable(f"{url.port} is no port from 1 to 65535")
        return httpx.Proxy(url, ssl_context=tls.Tls().context() if url.scheme == "https" else None)

    def unusable(self, reason: str) -> BadArgument:
        """Return the error for a proxy that cannot be used."""
        return BadArgument(f"{self} cannot be used ({reason}); {self.remedy}, or set it to http://HOST:PORT")

    @property
    def remedy(self) -> str:
        """The setting that reaches the host without the proxy."""
        return f"add {in_url(self.host)} to no_proxy if it needs no proxy"


def proxy_for(url: httpx.URL) -> ProxySetting | None:
    """Return the proxy for calls to this URL, or None."""
    found = getproxies_environment()
    key = url.scheme if url.scheme in found else "all"
    if key not in found or covers(found.get("no", ""), url):
        return None
    value = found[key]
    # Lower case has priority, as in getproxies_environment.
    names = sorted((name for name in os.environ if name.lower() == f"{key}_proxy"), reverse=True)
    return ProxySetting(next(name for name in names if os.environ[name] == value), value.strip(), url.host)


def covers(no_proxy: str, url: httpx.URL) -> bool:
    """Return True if this value of ``no_proxy`` includes the URL's host. Entries of an unknown form are ignored."""
    names = {_name(url.host), _name(url.raw_host.decode("ascii"))}
    addresses = _addresses(url.host)
    port = url.port or DEFAULT_PORTS.get(url.scheme)
    for entry in re.split(r"[\s,]+", no_proxy.lower()):
        scheme, _, rest = entry.rpartition("://")
        if scheme not in ("", "all", url.scheme):
            continue
        if rest == "*":
            return True
        host, wanted = _split(rest)
        if host and wanted in (None, port) and _matches(host, names, addresses):
            return True
    return False


def _split(entry: str) -> tuple[str, int | None]:
    """Return the host or network of an entry without brackets, and its port."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*):([0-9]{1,5})", entry)
    host, port = (found[1], int(found[2])) if found else (entry, None)
    return re.sub(r"[\[\]]", "", host), port


def _matches(entry: str, names: set[str], addresses: list[IPv4Address | IPv6Address]) -> bool:
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        wanted = _name(entry.lstrip("*").lstrip("."))
        return bool(wanted) and any(name == wanted or name.endswith(f".{wanted}") for name in names)
    return any(address.version == network.version and address in network for address in addresses)


def _name(host: str) -> str:
    return host.lower().rstrip(".")


def _addresses(host: str) -> list[IPv4Address | IPv6Address]:
    """Return the addresses of a host without a look-up of its name."""
    if _name(host) == "localhost":
        return [IPv4Address("127.0.0.1"), IPv6Address("::1")]
    try:
        address = ip_address(host)
    except ValueError:
        return []
    mapped = getattr(address, "ipv4_mapped", None)
    return [address] if mapped is None else [address, mapped]
