"""POST to an address that an operator configured, for webhooks.

The host name is resolved once per call, all its addresses are checked, and the call is sent to a checked address, which
prevents DNS rebinding. Proxies, redirects and cookies are not used. TLS verifies the certificate against the host name.
Non-public addresses are refused unless the operator lists their network: an external name must not give access to
services in the operator's network.
"""

from __future__ import annotations

import http.cookiejar
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..protocol.addresses import is_loopback
from ..protocol.errors import BadArgument, SdkError
from .clients import Client
from .library import httpx
from .tls import Tls

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Iterable[str]]

TIMEOUT = httpx.Timeout(10.0, connect=5.0)
MOST_TRIED = 3
"""Largest number of a name's addresses that a call tries."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotDelivered(SdkError):
    """The call was not made, or not accepted; the text has the reason."""


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if it cannot be resolved."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@dataclass(frozen=True)
class Destination:
    """An address for calls. networks: non-public networks that are allowed."""

    url: httpx.URL
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, url: str, networks: str = "") -> Destination:
        """Return the destination of a URL and of networks in CIDR notation, separated by commas. Raises BadArgument if
        one of them is invalid.

        No message repeats the URL, whose path may be a secret.
        """
        try:
            found = httpx.URL(url)
        except httpx.InvalidURL:
            raise BadArgument("is no URL; give https://HOST/PATH") from None
        if found.scheme not in ("http", "https") or not found.host:
            raise BadArgument("is no URL; give https://HOST/PATH")
        if found.scheme == "http" and not is_loopback(found.host):
            raise BadArgument("http:// is only for this machine; give https://HOST/PATH")
        if found.port is not None and not 0 < found.port < 65536:
            raise BadArgument(f"has the port {found.port}, but ports go from 1 to 65535")
        if found.userinfo or found.fragment:
            raise BadArgument("holds a name, a password or a fragment; leave them out")
        return cls(found, tuple(_network(each.strip()) for each in networks.split(",") if each.strip()))

    def addresses(self, resolve: Resolve = resolve) -> list[str]:
        """Return the host's addresses, resolved now. Raises NotDelivered if one of them is not allowed."""
        host = self.url.host
        port = self.url.port or (443 if self.url.scheme == "https" else 80)
        try:
            found = list(resolve(host, port))
        except OSError as error:
            raise NotDelivered(f"{host} cannot be resolved ({error})") from None
        for each in found:
            # Without a zone, as in fe80::1%eth0.
            if not self._allows(ipaddress.ip_address(each.partition("%")[0])):
                raise NotDelivered(f"{host} has the address {each}, which is not public and in no listed network")
        if not found:
            raise NotDelivered(f"{host} has no address")
        return found

    def post(self, body: bytes, headers: Mapping[str, str], resolve: Resolve = resolve) -> None:
        """Post a body. Raises NotDelivered unless the answer's status is 2xx; the answer's body is not read."""
        addresses = self.addresses(resolve)[:MOST_TRIED]
        secure = self.url.scheme == "https"
        verify = Tls().context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=()))
        with Client(verify=verify, trust_env=False, cookies=no_cookies, timeout=TIMEOUT) as client:
            for address in addresses:
                try:
                    return self._post(client, address, body, headers)
                except httpx.ConnectError as error:
                    failure = NotDelivered(f"{self.url.host} does not answer ({error})")
                except httpx.HTTPError as error:
                    raise NotDelivered(f"{self.url.host} broke off ({type(error).__name__}: {error})") from None
        raise failure

    def _post(self, client: Client, address: str, body: bytes, headers: Mapping[str, str]) -> None:
        pinned = self.url.copy_with(host=address)
        named = {**headers, "Host": self.url.netloc.decode()}
        # TLS sends this name, and the certificate is checked against it.
        extensions = {"sni_hostname": self.url.host}
        with client.stream(
            "POST", pinned, content=body, headers=named, extensions=extensions, follow_redirects=False
        ) as answer:
            if answer.is_redirect:
                raise NotDelivered(f"{self.url.host} redirects, which is not followed; configure the final address")
            if not answer.is_success:
                raise NotDelivered(f"{self.url.host} answered {answer.status_code}")

    def _allows(self, address: Address) -> bool:
        inner = _inner(address)
        if self.url.scheme == "http":
            return inner.is_loopback
        if any(each.version == net.version and each in net for each in (address, inner) for net in self.networks):
            return True
        if inner.is_loopback:
            return is_loopback(self.url.host)
        return inner.is_global and not (inner.is_multicast or inner.is_reserved or inner.is_unspecified)


def _inner(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address, to which packets may be forwarded, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise BadArgument(f"{error}; give networks such as 10.1.2.0/24, separated by commas") from None
