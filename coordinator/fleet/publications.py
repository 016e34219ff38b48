"""Signed publications of models. Devices check them; the coordinator's check only refuses invalid ones early."""

from __future__ import annotations

from importlib.util import find_spec

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.publication import Terms
from sparrow.protocol.ranges import faults
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import Publication, Published, check_signature, fingerprint

from ..errors import BadContent, NotFound, Unreadable
from ..storage.tables import Federation


def checked(
    publication: Publication, name: str, original: Manifest, manifest: Manifest, settings: FederationSettings
) -> Published:
    """Return a publication for devices. Raises BadContent if devices would refuse it.

    manifest: the federation's, which the method may have changed.
    """
    try:
        terms = Terms.of(publication)
        if find_spec("cryptography") is not None:
            check_signature(publication)
    except ProtocolError as error:
        raise BadContent(f"publication: {error}") from None
    if terms.federation != name:
        raise BadContent(
            f"publication: it is signed for the federation {terms.federation}, not for {name}; sign it again"
        )
    if terms.manifest != original.digest:
        raise BadContent("publication: it is signed for another manifest; publish with sparrow publish")
    for graph, digest in manifest.graphs.items():
        if terms.graphs.get(graph) != digest:
            raise BadContent(
                f"publication: the {graph} differs from the signed one; publish with the coordinator's version of onnx"
            )
    wrong = faults(terms.settings, settings)
    if wrong:
        raise BadContent(f"publication: settings outside the signed ranges: {'; '.join(wrong)}")
    return Published(publication=publication, manifest=None if original.digest == manifest.digest else original.text)


def read(db: Session, federation: Federation) -> Published:
    """Return a federation's publication. Raises NotFound if its model is not signed."""
    text = db.scalar(select(Federation.publication).where(Federation.id == federation.id))
    if text is None:
        raise NotFound(f"the model of {federation.name} is not signed: it is built in or was published unsigned")
    try:
        return Published.model_validate_json(text)
    except ValueError as error:
        raise Unreadable(f"the publication of {federation.name} cannot be read: {error}") from None


def check_changed(db: Session, federation: Federation, settings: FederationSettings) -> None:
    """Raise BadContent for changed settings that devices would refuse."""
    if federation.publisher is None:
        return
    publication = read(db, federation).publication
    wrong = faults(Terms.of(publication).settings, settings)
    if wrong:
        raise BadContent(
            f"{'; '.join(wrong)}: the publisher of the model ({publication.fingerprint}) has signed this range, and "
            f"devices refuse other values; stay within it, or ask the publisher to publish again"
        )


def check_replaced(federation: Federation, publication: Publication | None) -> None:
    """Raise BadContent for an unsigned version of a signed model."""
    if federation.publisher is not None and publication is None:
        raise BadContent(
            f"publication: the model of {federation.name} is signed by {fingerprint(federation.publisher)}, and "
            f"devices refuse an unsigned version; publish with sparrow publish"
        )
