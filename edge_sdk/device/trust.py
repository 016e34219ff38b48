"""A device's checks on a federation: its publisher, its model, and the settings of each round.

A device remembers a federation's first publisher (trust on first use), and refuses another until its owner accepts it
(``sparrow trust``). Rounds must keep the ranges that the publisher signed and that the owner demands. Without a
signature, settings that change the content of an update must not change. A secure federation must stay secure.
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
    """The record of an accepted federation."""

    model_config = ConfigDict(frozen=True)

    uid: str
    # The last one; None if unsigned.
    publication: Publication | None = None
    # Fingerprint accepted next (``sparrow trust``).
    publisher: str | None = None
    # Digest of the checked manifest.
    model: str = ""
    # The first binding settings.
    settings: dict[str, Any] = {}
    # Whether they were secure.
    secure: bool = False


@dataclass(frozen=True)
class Admitted:
    """An admitted federation."""

    accepted: Accepted
    terms: Terms | None
    built_in: bool

    @property
    def ranges(self) -> Ranges:
        """The signed ranges; empty if unsigned."""
        return {} if self.terms is None else self.terms.settings


class Trust:
    """The checks of one device or fleet. folder: stores the record; None: in memory."""

    def __init__(self, federation: str, demands: Demands, folder: StateFolder | None = None) -> None:
        self._federation = federation
        self._demands = demands
        self._folder = folder
        self._accepted = None if folder is None else read(folder)
        self._checked: FederationSettings | None = None
        self.admitted: Admitted | None = None

    def admit(self, info: FederationInfo, manifest: Manifest, fetch: Callable[[], Published]) -> None:
        """Accept a federation, or raise BadPublication. fetch: downloads its publication."""
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
        known = None if before is None else before.publication
        wanted = self._demands.publisher
        if info.publisher is None:
            if wanted is not None:
                raise BadPublication(
                    f"the model of {self._federation} is not signed, but this device accepts only the publisher "
                    f"{wanted}; ask its operator for a signed one"
                )
            if known is not None:
                raise BadPublication(
                    f"the model of {self._federation} was signed by {known.fingerprint} and is no longer signed; the "
                    f"coordinator may have replaced it, and this device does not train it"
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
                f"the model of {self._federation} is signed by {publication.fingerprint}, but this device accepts only "
                f"{wanted} (--publisher)"
            )
        accepted = before.publisher if before is not None else None
        trusted = accepted is not None and same_fingerprint(accepted, publication.fingerprint)
        if known is not None and known.publisher != publication.publisher and not trusted and wanted is None:
            raise BadPublication(
                f"the model of {self._federation} is signed by another publisher: {publication.fingerprint} instead "
                f"of {known.fingerprint}. If its author confirms this, run sparrow trust {publication.fingerprint}"
            )

    def _check_model(self, info: FederationInfo, manifest: Manifest, published: Published, terms: Terms) -> None:
        original = manifest
        if published.manifest is not None:
            try:
                original = Manifest.model_validate_json(published.manifest)
            except ValidationError:
                raise BadPublication("the published manifest cannot be read; publish again") from None
        if original.digest != terms.manifest:
            raise BadPublication(f"the manifest of {self._federation} is not the one that its publisher signed")
        expected = composed(load_method(info.method), original, info.settings)
        check_terms(terms, self._federation, manifest, expected)

    def _check_edition(self, before: Terms, terms: Terms) -> None:
        """Check a publication that replaces an earlier one."""
        if terms.edition < before.edition:
            raise BadPublication(
                f"the coordinator has replaced edition {before.edition} of the model by edition {terms.edition}; this "
                f"device does not train it"
            )
        same = (terms.manifest, terms.graphs) == (before.manifest, before.graphs)
        if self._demands.pin_model and not same:
            raise BadPublication(
                f"the publisher has replaced the model of {self._federation} (edition {terms.edition}), and this "
                f"device accepts only the first one (--pin-model)"
            )
        log.warning(
            "the publisher has replaced the publication of %s: edition %s, model %s",
            self._federation,
            terms.edition,
            "unchanged" if same else terms.manifest[:12],
        )

    def check(self, settings: FederationSettings) -> None:
        """Raise BadPublication for a round's settings that publisher or owner do not allow."""
        assert self.admitted is not None, "a federation is admitted before its work is done"
        if settings != self._checked:
            self._check(settings, self.admitted)
            self._checked = settings

    def _check(self, settings: FederationSettings, admitted: Admitted) -> None:
        if admitted.accepted.secure and not settings.secure:
            raise BadPublication(
                "the coordinator asks for an unmasked update (secure=false) in a secure federation; this device sends "
                "no update"
            )
        wrong = faults(self._demands.ranges, settings)
        if wrong:
            raise BadPublication(f"the owner of this device does not allow it: {'; '.join(wrong)} (--require)")
        wrong = faults(admitted.ranges, settings)
        if wrong:
            raise BadPublication(f"the publisher of the model did not sign this: {'; '.join(wrong)}")
        now = binding(settings)
        changed = [
            f"{name} is {shown(now.get(name))}, was {shown(first)}"
            for name, first in admitted.accepted.settings.items()
            if name not in (*OPERATORS, *admitted.ranges)
            and now.get(name) != first
            and not _more_private(name, first, now.get(name))
        ]
        if changed:
            raise BadPublication(f"the coordinator changed settings since this device joined: {'; '.join(changed)}")

    def check_steps(self, steps: int) -> None:
        """Raise BadPublication for fewer local steps than publisher or owner allow."""
        least = max(least_of(ranges, "local_steps") for ranges in self._ranges())
        if steps < least:
            raise BadPublication(
                f"a round would have {steps} local steps on this device's data, but at least {least} are required; "
                f"give it more samples, or ask the operator for more epochs"
            )

    def check_cohort(self, devices: int) -> None:
        """Raise BadPublication for a secure round of fewer devices than publisher or owner allow."""
        least = max(least_of(ranges, "cohort") for ranges in self._ranges())
        if devices < least:
            raise BadPublication(f"the secure round has {devices} devices, and at least {least} are required")

    def check_first_weights(self, tensors: Tensors) -> None:
        """Raise BadPublication unless the first round's tensors are the published ones."""
        if self.admitted is not None and self.admitted.terms is not None:
            check_weights(self.admitted.terms, tensors)

    def _ranges(self) -> list[Ranges]:
        return [{} if self.admitted is None else self.admitted.ranges, self._demands.ranges]

    @property
    def built_in(self) -> bool:
        """Whether the model is built into this SDK."""
        return self.admitted is not None and self.admitted.built_in

    @property
    def line(self) -> str:
        """A message for the user that names the publisher."""
        admitted = self.admitted
        assert admitted is not None, "a federation is admitted first"
        publication = admitted.accepted.publication
        if publication is not None:
            how = "pinned" if self._demands.publisher is not None else "remembered for this federation"
            return f"the model of {self._federation} is signed by {publication.fingerprint} ({how})"
        if admitted.built_in:
            return f"the model of {self._federation} is built in, known by its digest"
        return f"warning: the model of {self._federation} is not signed; its coordinator can replace it unnoticed"

    def _keep(self, accepted: Accepted) -> None:
        if accepted != self._accepted and self._folder is not None:
            self._folder.cache(TRUST, accepted.model_dump_json().encode())
        self._accepted = accepted


def _more_private(name: str, first: object, now: object) -> bool:
    return name in ("secure", "secure_metrics") and now is True and not first


def composed(method: DeviceMethod, published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the method's manifest for a published one, without digests of graphs."""
    return published if method.compose is None else method.compose(published, {}, settings)[0]


def _is_built_in(info: FederationInfo, manifest: Manifest) -> bool:
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
    """Return the stored record. Raises StateError if it is damaged, because any publisher would then be trusted."""
    data = folder.cached(TRUST)
    if data is None:
        return None
    try:
        return Accepted.model_validate(json.loads(data))
    except ValueError:
        raise StateError(
            f"{folder.path / TRUST}, the record of the trusted publisher, is damaged; delete it only if you trust the "
            f"coordinator now"
        ) from None


def accept(folder: StateFolder, publisher: str) -> Accepted:
    """Accept another publisher's fingerprint from the next start.

    Raises BadPublication if it is not a fingerprint, or the folder has no federation.
    """
    if not is_fingerprint(publisher):
        raise BadPublication(f"{publisher!r} is not a fingerprint; give eight groups of four hexadecimal digits")
    before = read(folder)
    if before is None:
        raise BadPublication(f"{folder.path} has no record of a federation; join with --publisher {publisher}")
    accepted = before.model_copy(update={"publisher": publisher})
    folder.cache(TRUST, accepted.model_dump_json().encode())
    return before
