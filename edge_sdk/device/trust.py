"""Acceptance of a federation by a device: its publisher, its model, and the settings of each round.

The first publisher of a federation that a device meets is remembered with it (trust on first use); another one is
refused until the device's owner accepts it (``sparrow trust``). Rounds must keep to the ranges that the publisher has
signed, and to those that the owner demands. If nothing is signed, settings that change the content of an update must
stay as they were when the device joined. A federation that was secure stays secure.

``trust.json`` in the state folder holds the accepted publication.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.messages import FederationInfo
from sparrow.protocol.publication import Terms, check_terms, check_weights, differs
from sparrow.protocol.ranges import OPERATORS, Ranges, binding, faults, least_of, shown
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import (
    BadPublication,
    Publication,
    Published,
    check_signature,
    is_fingerprint,
    same_fingerprint,
)

from ..errors import StateError
from ..methods import DeviceMethod, load_method
from .demands import Demands
from .state import StateFolder

log = logging.getLogger(__name__)

TRUST = "trust.json"


class Accepted(BaseModel):
    """The record of one accepted federation.

    publication: the last one; None if nothing is signed. publisher: the fingerprint of the one to accept next, after
    ``sparrow trust``. model: the digest of the manifest that it was compared with. settings: the binding settings as
    first met. secure: whether they were secure.
    """

    model_config = ConfigDict(frozen=True)

    uid: str
    publication: Publication | None = None
    publisher: str | None = None
    model: str = ""
    settings: dict[str, Any] = {}
    secure: bool = False


@dataclass(frozen=True)
class Admitted:
    """A federation that was admitted: its record, the signed terms, if any, and whether its model is built in."""

    accepted: Accepted
    terms: Terms | None
    built_in: bool

    @property
    def ranges(self) -> Ranges:
        """The signed ranges; none if nothing is signed."""
        return {} if self.terms is None else self.terms.settings


class Trust:
    """The rules by which one device, or one fleet, accepts a federation and its rounds.

    folder: where it is kept; None: in memory. demands: the owner's.
    """

    def __init__(self, federation: str, demands: Demands, folder: StateFolder | None = None) -> None:
        self._federation = federation
        self._demands = demands
        self._folder = folder
        self._accepted = None if folder is None else read(folder)
        self._checked: FederationSettings | None = None
        self.admitted: Admitted | None = None

    def admit(self, info: FederationInfo, manifest: Manifest, fetch: Callable[[], Published]) -> None:
        """Accept a federation as it is described, or raise BadPublication.

        fetch: gets its publication.
        """
        before = self._accepted
        if before is not None and before.uid != info.uid:
            before = None
        publication = self._publication(info, manifest, fetch, before)
        accepted = Accepted(
            uid=info.uid,
            publication=publication,
            model=manifest.digest,
            settings=before.settings if before is not None and before.settings else binding(info.settings),
            secure=info.settings.secure or (before is not None and before.secure),
        )
        terms = None if publication is None else Terms.of(publication)
        admitted = Admitted(accepted, terms, _is_built_in(info, manifest))
        self._check(info.settings, admitted)
        self._keep(accepted)
        self.admitted = admitted
        self._checked = None

    def _publication(
        self, info: FederationInfo, manifest: Manifest, fetch: Callable[[], Published], before: Accepted | None
    ) -> Publication | None:
        """Return the checked publication of a federation; None if it has none, and need not have one."""
        known = None if before is None else before.publication
        wanted = self._demands.publisher
        if info.publisher is None:
            if wanted is not None:
                raise BadPublication(
                    f"the model of {self._federation} is not signed, and this device accepts only the publisher "
                    f"{wanted}; ask its operator for a signed one"
                )
            if known is not None:
                raise BadPublication(
                    f"the model of {self._federation} was signed by {known.fingerprint} and is no longer signed; the "
                    f"coordinator may have replaced it. Nothing is trained"
                )
            return None
        met = None if known is None else (known.publisher, known.digest)
        unchanged = before is not None and before.model == manifest.digest
        if known is not None and unchanged and met == (info.publisher, info.publication):
            self._check_publisher(known, before, known)
            return known
        published = fetch()
        publication = published.publication
        check_signature(publication)
        self._check_publisher(publication, before, known)
        terms = Terms.of(publication)
        self._check_model(info, manifest, published, terms)
        if known is not None and known.digest != publication.digest:
            self._check_edition(Terms.of(known), terms)
        return publication

    def _check_publisher(self, publication: Publication, before: Accepted | None, known: Publication | None) -> None:
        wanted = self._demands.publisher
        if wanted is not None and not same_fingerprint(wanted, publication.fingerprint):
            raise BadPublication(
                f"the model of {self._federation} is signed by {publication.fingerprint}, and this device accepts only "
                f"{wanted} (--publisher)"
            )
        accepted = before.publisher if before is not None else None
        trusted = accepted is not None and same_fingerprint(accepted, publication.fingerprint)
        if known is not None and known.publisher != publication.publisher and not trusted and wanted is None:
            raise BadPublication(
                f"the model of {self._federation} is signed by another publisher: {publication.fingerprint} in place "
                f"of {known.fingerprint}. If its author says so, accept it: sparrow trust {publication.fingerprint}"
            )

    def _check_model(self, info: FederationInfo, manifest: Manifest, published: Published, terms: Terms) -> None:
        original = manifest
        if published.manifest is not None:
            try:
                original = Manifest.model_validate_json(published.manifest)
            except ValidationError:
                raise BadPublication("the published manifest cannot be read; publish again") from None
        if original.digest != terms.manifest:
            raise BadPublication(f"the manifest of {self._federation} is not the one that its publisher has signed")
        expected = composed(load_method(info.method), original, info.settings)
        check_terms(terms, self._federation, manifest, expected)

    def _check_edition(self, before: Terms, terms: Terms) -> None:
        """Look at a publication that takes the place of another one of the same publisher."""
        if terms.edition < before.edition:
            raise BadPublication(
                f"the coordinator has gone back from edition {before.edition} of the model to {terms.edition}; nothing "
                f"is trained"
            )
        same = (terms.manifest, terms.graphs) == (before.manifest, before.graphs)
        if self._demands.pin_model and not same:
            raise BadPublication(
                f"the publisher has replaced the model of {self._federation} (edition {terms.edition}), and this "
                f"device keeps to the one it has met (--pin-model)"
            )
        log.warning(
            "the publisher has replaced the publication of %s: edition %s, model %s",
            self._federation,
            terms.edition,
            "unchanged" if same else terms.manifest[:12],
        )

    def check(self, settings: FederationSettings) -> None:
        """Raise BadPublication for settings of a round that the publisher or this device's owner does not allow."""
        assert self.admitted is not None, "a federation is admitted before its work is done"
        if settings != self._checked:
            self._check(settings, self.admitted)
            self._checked = settings

    def _check(self, settings: FederationSettings, admitted: Admitted) -> None:
        if admitted.accepted.secure and not settings.secure:
            raise BadPublication(
                "the coordinator asks for an update without masks (secure=false), and this federation is secure; "
                "nothing is sent"
            )
        wrong = faults(self._demands.ranges, settings)
        if wrong:
            raise BadPublication(f"the owner of this device does not allow it: {'; '.join(wrong)} (--require)")
        wrong = faults(admitted.ranges, settings)
        if wrong:
            raise BadPublication(f"the publisher of the model has not signed this: {'; '.join(wrong)}")
        now = binding(settings)
        changed = [
            f"{name} is {shown(now.get(name))}, was {shown(first)}"
            for name, first in admitted.accepted.settings.items()
            if name not in (*OPERATORS, *admitted.ranges)
            and now.get(name) != first
            and not _more_private(name, first, now.get(name))
        ]
        if changed:
            raise BadPublication(f"the coordinator has changed settings since this device joined: {'; '.join(changed)}")

    def check_steps(self, steps: int) -> None:
        """Raise BadPublication for fewer local steps than the publisher or the owner allows."""
        least = max(least_of(ranges, "local_steps") for ranges in self._ranges())
        if steps < least:
            raise BadPublication(
                f"a round would take {steps} local steps on this device's data, and at least {least} are allowed; give "
                f"it more samples, or ask for more epochs"
            )

    def check_cohort(self, devices: int) -> None:
        """Raise BadPublication for a secure round of fewer devices than the publisher or the owner allows."""
        least = max(least_of(ranges, "cohort") for ranges in self._ranges())
        if devices < least:
            raise BadPublication(f"the secure round has {devices} devices, and at least {least} are allowed")

    def check_first_weights(self, tensors: Tensors) -> None:
        """Raise BadPublication unless tensors of the first round begin as they were published."""
        if self.admitted is not None and self.admitted.terms is not None:
            check_weights(self.admitted.terms, tensors)

    def _ranges(self) -> list[Ranges]:
        return [{} if self.admitted is None else self.admitted.ranges, self._demands.ranges]

    @property
    def built_in(self) -> bool:
        """True if the model is one of this SDK's own."""
        return self.admitted is not None and self.admitted.built_in

    @property
    def line(self) -> str:
        """The line for the device's user that names the publisher."""
        admitted = self.admitted
        assert admitted is not None, "a federation is admitted first"
        publication = admitted.accepted.publication
        if publication is not None:
            how = "pinned" if self._demands.publisher is not None else "remembered for this federation"
            return f"the model of {self._federation} is signed by {publication.fingerprint} ({how})"
        if admitted.built_in:
            return f"the model of {self._federation} is built in, known by its digest"
        return f"warning: the model of {self._federation} is not signed; its coordinator can replace it unseen"

    def _keep(self, accepted: Accepted) -> None:
        if accepted != self._accepted and self._folder is not None:
            self._folder.cache(TRUST, accepted.model_dump_json().encode())
        self._accepted = accepted


def _more_private(name: str, first: object, now: object) -> bool:
    """Return whether a setting has changed to one under which an update reveals less."""
    return name in ("secure", "secure_metrics") and now is True and not first


def composed(method: DeviceMethod, published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest that a method makes of the published one, without the digests of its graphs."""
    return published if method.compose is None else method.compose(published, {}, settings)[0]


def _is_built_in(info: FederationInfo, manifest: Manifest) -> bool:
    """Return whether a federation's model is the built-in one of its task."""
    if info.task not in builtin_tasks():
        return False
    known = load_builtin(info.task)
    expected = known.manifest
    graphs = expected.graphs
    compose = load_method(info.method).compose
    if compose is not None:
        expected, made = compose(known.manifest, known.graphs, info.settings)
        graphs = expected.with_graphs(made).graphs
    alike = all(graphs.get(name) == digest for name, digest in manifest.graphs.items())
    return alike and differs(expected, manifest) is None


def read(folder: StateFolder) -> Accepted | None:
    """Return the record of a device. Raises StateError for a file that cannot be read: forgetting would trust."""
    data = folder.cached(TRUST)
    if data is None:
        return None
    try:
        return Accepted.model_validate(json.loads(data))
    except ValueError:
        raise StateError(
            f"{folder.path / TRUST} is damaged, which says whose model this device trains; delete it only if you trust "
            f"the coordinator now"
        ) from None


def accept(folder: StateFolder, publisher: str) -> Accepted:
    """Accept another publisher, by fingerprint, from the next start on. Raises BadPublication for any other text."""
    if not is_fingerprint(publisher):
        raise BadPublication(f"{publisher!r} is no fingerprint: eight groups of four hexadecimal digits")
    before = read(folder)
    if before is None:
        raise BadPublication(f"{folder.path} has met no federation yet; join with --publisher {publisher}")
    accepted = before.model_copy(update={"publisher": publisher})
    folder.cache(TRUST, accepted.model_dump_json().encode())
    return before
