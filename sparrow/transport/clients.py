"""Clients of one server: its address, its proxy, its certificates."""

from __future__ import annotations

import http.cookiejar
import logging
import ssl
from collections.abc import Callable
from typing import Any

from ..protocol.addresses import is_loopback
from ..protocol.errors import BadArgument
from . import tls
from .library import httpx
from .proxies import ProxySetting, proxy_for

log = logging.getLogger(__name__)

TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class Client(httpx.Client):
    """A client of one server. through: the environment variable with its proxy, if it uses one."""

    through: ProxySetting | None = None


def connect(server: str, trust: tls.Tls | None = None, *, timeout: httpx.Timeout | float = TIMEOUT) -> Client:
    """Return a client for the server at this address.

    Raises BadArgument for an invalid address or proxy, BadCertificate.
    """
    url = address(server)
    through = proxy_for(url)
    if trust is not None and trust != tls.Tls():
        verify = trust.context()
    elif url.scheme == "http":
        # Without TLS, skip loading the public authorities.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        verify = tls.Tls().context()
    # Otherwise the client would keep any number of cookies for its whole life.
    no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=()))
    try:
        client = Client(
            base_url=server,
            timeout=timeout,
            verify=verify,
            cookies=no_cookies,
            trust_env=False,
            proxy=None if through is None else through.proxy(),
            event_hooks={"request": [_warn_of_plain_http(url)]},
        )
    except ImportError:
        assert through is not None, "only SOCKS needs another package"
        raise BadArgument(f"{through} needs the package socksio: pip install socksio; {through.remedy}") from None
    client.through = through
    return client


def address(server: str) -> httpx.URL:
    """Return a server's URL. Raises BadArgument if it is invalid or holds a password."""
    # Checked first, so that no message repeats a password.
    if "@" in str(server):
        raise bad_address("The address", "holds a name or password, but tokens are given as SPARROW_..._TOKEN")
    named = f"The address {server}"
    try:
        url = httpx.URL(server)
    except (httpx.InvalidURL, TypeError) as error:
        raise bad_address(named, f"cannot be read ({error})") from error
    if url.scheme not in ("http", "https"):
        raise bad_address(named, "has no scheme")
    if not url.host:
        raise bad_address(named, "names no host")
    if url.port is not None and not 0 < url.port < 65536:
        raise bad_address(named, f"has the port {url.port}, but ports go from 1 to 65535")
    if url.query or url.fragment:
        raise bad_address(named, "continues after its path")
    return url


def bad_address(named: str, fault: str) -> BadArgument:
    """Return the error for an invalid address. named: ``The address ...``."""
    return BadArgument(f"{named} {fault}; give http://HOST:PORT or https://HOST")


def refuse_foreign(client: Any) -> None:
    """Raise BadArgument for a client of another library, whose errors would not be recognised."""
    if client is not None and not isinstance(client, httpx.Client):
        given = f"{type(client).__module__.partition('.')[0]}.{type(client).__name__}"
        raise BadArgument(f"client is a {given}; give a Client of {httpx.__name__}, or of sparrow.transport.httpx")


def _warn_of_plain_http(url: httpx.URL) -> Callable[[httpx.Request], None]:
    """Return a hook that warns once if a token is sent unencrypted over a network."""
    plain = url.scheme == "http" and not is_loopback(url.host)

    def warn(request: httpx.Request) -> None:
        nonlocal plain
        if plain and "Authorization" in request.headers:
            plain = False
            log.warning(
                "tokens go to %s over plain http: anyone who can listen on the network can take them; use https://, "
                "and --ca FILE if its certificate is from your own authority",
                url.host,
            )

    return warn
