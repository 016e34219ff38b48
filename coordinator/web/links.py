"""The link with which a phone becomes a device of a federation, and its QR code.

The enrolment token is in the link's fragment, which browsers send to no server; it is not stored or logged here. For a
signed model, the fragment also names the publisher, and the page accepts no other.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import segno

from sparrow.protocol.addresses import in_network, in_url, means_caller
from sparrow.protocol.fields import LONGEST_LINK
from sparrow.protocol.messages import FederationInfo, JoinLink
from sparrow.protocol.signatures import fingerprint

from ..errors import BadContent, NotAllowed, NotFound
from ..fleet.access import Tokens
from . import runtime


def make(info: FederationInfo, server: str, token: str | None) -> JoinLink:
    """Return the join link of a federation at the coordinator's address ``server``, with hints.

    An address such as localhost is replaced by this machine's address in its network. Raises NotFound if no page can
    take part, BadContent for the address.
    """
    if "page" not in info.device_kinds:
        raise NotFound(f"pages cannot take part in {info.name}: {info.no_pages_because}; use sparrow join")
    address, own = _reachable(server)
    link = f"{address}/join/{info.name}"
    fragment = []
    if token is not None:
        fragment.append(f"token={quote(token, safe='')}")
    if info.publisher is not None:
        fragment.append(f"publisher={fingerprint(info.publisher).replace('-', '')}")
    if fragment:
        link += f"#{'&'.join(fragment)}"
    if len(link) > LONGEST_LINK:
        raise BadContent(f"the link has more than {LONGEST_LINK} characters; give a shorter address or token")
    svg = io.BytesIO()
    segno.make_qr(link).save(svg, kind="svg", xmldecl=False, omitsize=True, light="#fff", nl=False)
    return JoinLink(link=link, svg=svg.getvalue().decode(), hints=tuple(_hints(link, own)))


def command(info: FederationInfo, server: str, token: str | None) -> str:
    """Return the command with which another device joins."""
    address, _ = _reachable(server)
    words = ["sparrow", "join", "--server", address, "--federation", info.name]
    if info.publisher is not None:
        words += ["--publisher", fingerprint(info.publisher)]
    given = "" if token is None else f"SPARROW_ENROLMENT_TOKEN={shlex.quote(token)} "
    return given + shlex.join(words)


def checked(token: str | None, federation: str, tokens: Tokens) -> str | None:
    """Return the token if it only permits enrolling in this federation; None if devices need none.

    Raises NotAllowed.
    """
    # A wrong token gets 403 instead of 401, on which a browser would forget its user's own token.
    if "enrolment" not in tokens.guarded():
        return None
    another = f"sparrow token create enrolment --federation {federation} makes one"
    if token is None:
        raise NotAllowed(
            f"the link needs an enrolment token, with which devices join {federation}: set "
            f"SPARROW_ENROLMENT_TOKEN; {another}"
        )
    holder = tokens.find(token)
    if holder is None or not holder.reaches(federation):
        raise NotAllowed(
            f"the token for the link is not valid for {federation}: it is unknown, revoked, expired or for another "
            f"federation; {another}"
        )
    if holder.kind != "enrolment":
        raise NotAllowed(
            f"the token for the link is an {holder.kind} token, which permits more than joining; give an enrolment "
            f"token: {another}"
        )
    return token


def _reachable(server: str) -> tuple[str, str | None]:
    """Return the address for phones, and this machine's if it replaced the host."""
    wrong = BadContent("server: give the coordinator's address as http://HOST:PORT or https://HOST")
    if not server.isascii() or not server.isprintable() or set(server) & set(' "<>\\^`{|}@?#'):
        raise wrong
    try:
        parts = urlsplit(server)
        host = parts.hostname
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    if not means_caller(host):
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", None
    own = in_network()
    if own is None:
        raise BadContent(
            f"phones cannot reach {host}, and this machine is not connected to a network; connect it, or give "
            "an address that phones can reach"
        )
    netloc = in_url(own) if port is None else f"{in_url(own)}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}", own


def _hints(link: str, own: str | None) -> Iterator[str]:
    """Yield hints for the user who shares the link."""
    if own is not None:
        yield (
            f"The link has {own}, this machine's address in its network, because phones cannot reach localhost; "
            f"let the coordinator listen there: sparrow serve --host 0.0.0.0"
        )
    if link.startswith("http://"):
        yield (
            "Over plain http, phones cannot keep their screen on or use camera, motion sensors and threads, which need "
            "HTTPS: give the coordinator a certificate, or use a TLS proxy"
        )
    lacking = runtime.why_not_there()
    if lacking is not None:
        yield lacking
