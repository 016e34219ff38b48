"""The link with which a phone becomes a device of a federation, and its QR code.

The enrolment token is in the link's fragment, which browsers send to no server. It is neither kept nor logged here, and
a token that permits more than to enrol gets no link. If the model is signed, the fragment names its publisher, too, and
the page accepts no other one.
"""

from __future__ import annotations

import io
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


def make(info: FederationInfo, server: str, token: str | None, tokens: Tokens) -> JoinLink:
    """Return the link to a federation at the coordinator's address ``server``, with what to know of it.

    An address that each machine has for itself, such as localhost, is replaced by this machine's in its network. Raises
    NotFound where no page can take part, NotAllowed for the token, BadContent for the address.
    """
    if "page" not in info.device_kinds:
        raise NotFound(f"no page can take part in {info.name}: {info.no_pages_because}; use sparrow join")
    address, own = _reachable(server)
    link = f"{address}/join/{info.name}"
    fragment = []
    if "enrolment" in tokens.guarded():
        fragment.append(f"token={quote(_checked(token, info.name, tokens), safe='')}")
    if info.publisher is not None:
        fragment.append(f"publisher={fingerprint(info.publisher).replace('-', '')}")
    if fragment:
        link += f"#{'&'.join(fragment)}"
    if len(link) > LONGEST_LINK:
        raise BadContent(f"the link has more than {LONGEST_LINK} characters; give a shorter address or token")
    svg = io.BytesIO()
    segno.make_qr(link).save(svg, kind="svg", xmldecl=False, omitsize=True, light="#fff", nl=False)
    return JoinLink(link=link, svg=svg.getvalue().decode(), hints=tuple(_hints(link, own)))


def _checked(token: str | None, federation: str, tokens: Tokens) -> str:
    """Return the token if it is for enrolling in this federation, and for nothing else.

    Refused is what the caller gives, not the caller: a browser that is answered 401 forgets its user's own token.
    """
    another = f"sparrow token create enrolment --federation {federation} makes one"
    if token is None:
        raise NotAllowed(
            f"devices need an enrolment token to join {federation}, and the link is to have it: set "
            f"SPARROW_ENROLMENT_TOKEN; {another}"
        )
    holder = tokens.find(token)
    if holder is None or not holder.reaches(federation):
        raise NotAllowed(
            f"the token for the link is not valid for {federation}: it is unknown, revoked, expired or another "
            f"federation's; {another}"
        )
    if holder.kind != "enrolment":
        raise NotAllowed(
            f"the token for the link is an {holder.kind} token, with which phones could do more than join; give an "
            f"enrolment token: {another}"
        )
    return token


def _reachable(server: str) -> tuple[str, str | None]:
    """Return the address as phones can call it, without a slash at its end; and this machine's own, if it took the
    place of the host."""
    wrong = BadContent("server: give the coordinator's address as http://HOST:PORT or https://HOST, and nothing more")
    if not server.isascii() or not server.isprintable() or set(server) & set(' "<>\\^`{|}@?#'):
        raise wrong
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    if not means_caller(host):
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", None
    own = in_network()
    if own is None:
        raise BadContent(
            f"phones cannot reach {host}, and this machine is in no network; connect it, or give the address by which "
            f"phones reach the coordinator"
        )
    place = in_url(own) if port is None else f"{in_url(own)}:{port}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}", own


def _hints(link: str, own: str | None) -> Iterator[str]:
    """Yield what whoever hands out the link should know."""
    if own is not None:
        yield (
            f"The link has {own}, this machine's address in its network, because phones cannot reach localhost; the "
            f"coordinator must listen there: sparrow serve --host 0.0.0.0"
        )
    if link.startswith("http://"):
        yield (
            "Over plain http phones may go dark while they train, and have no camera, motion sensors or threads: wake "
            "lock and these need HTTPS: give the coordinator a certificate, or put a proxy with one before it"
        )
    lacking = runtime.why_not_there()
    if lacking is not None:
        yield lacking
