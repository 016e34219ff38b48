"""What has come of an open round: its updates, read from the disk once each, folded into running sums.

The sums are only memory: after a restart they are made again from the stored updates, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from edge_sdk.protocol import bundle
from edge_sdk.protocol.masks import pack
from edge_sdk.protocol.messages import UpdateReport
from sparrow.coordinator.methods import Situation, load_method
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.assignments import BUNDLE_KINDS, Member, update_key
from sparrow.coordinator.rounds.buffered import Arrival, bring_forward, staleness_weight
from sparrow.coordinator.rounds.intake import Intake, Update, sums_of
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Federation


class Folding:
    """The sums of one open round.

    round: its number. position: how many of its assignments, in the cohort's order, were looked at. taken: how many
    updates were taken in. last: in a buffered round the number of the last arrival among them, and behind: how many
    models old each was. parts: bytes of the updates' bundles by part. intact: that this process itself has checked
    their digests when they came, and nobody else stores any.
    """

    def __init__(
        self, store: Store, models: Models, federation: Federation, situation: Situation, *, intact: bool
    ) -> None:
        self._store = store
        self._models = models
        self._federation = federation
        self._model = models.model(federation, federation.model_version)
        self._manifest = situation.manifest
        self._intact = intact
        self._exponent = situation.settings.staleness_exponent
        self.round = situation.round
        self.intake = Intake(
            sums_of(load_method(federation.method), self._model, situation, store.folder),
            situation.settings,
            situation.manifest,
            self._model.tensors,
            lambda key: self._read(key, self._versions.get(key))[0],
        )
        self.position = self.taken = self.last = 0
        self.behind: list[int] = []
        self.parts: Counter[str] = Counter()
        self._versions: dict[str, int] = {}

    def take_in_order(self, cohort: Sequence[Member]) -> None:
        """Fold what is next in the cohort's order and there; stop at the first that is still awaited."""
        while self.position < len(cohort) and cohort[self.position].status != "open":
            member = cohort[self.position]
            if member.status == "done" and member.kind in BUNDLE_KINDS:
                self._take(member.id, update_key(self._federation.id, member.id, member.update_sha256 or ""))
            self.position += 1

    def take_arrivals(self, arrived: Sequence[Arrival]) -> None:
        """Fold updates in the order in which they came, each brought forward to today's model."""
        for each in arrived:
            key = update_key(self._federation.id, each.assignment_id, each.update_sha256)
            behind = self._federation.model_version - each.model_version
            if behind:
                self._versions[key] = each.model_version
            self._take(each.assignment_id, key)
            self.behind.append(behind)
            self.last = each.number

    def _take(self, assignment_id: str, key: str) -> None:
        update, parts = self._read(key, self._versions.get(key))
        self.intake.take(assignment_id, key, update)
        self.parts.update(parts)
        self.taken += 1

    def _read(self, key: str, version: int | None) -> tuple[Update, Mapping[str, int]]:
        """A stored update, and the bytes of its parts. version: of the model it was trained on, where not today's."""
        body = self._store.blobs.load(key)
        decoded = bundle.decode(body, self._manifest, self._model.mask, intact=self._intact)
        report = UpdateReport.model_validate_json(decoded.report)
        began = self._model if version is None else self._models.model(self._federation, version)
        values = decoded.values
        if decoded.precision == "int8":  # a difference from what was sent
            values = values + pack(self._manifest, began.tensors, decoded.mask)
        if version is not None:
            weight = staleness_weight(self._federation.model_version - version, self._exponent)
            values = bring_forward(self._manifest, values, decoded.mask, began.tensors, self._model.tensors, weight)
        return Update(values, decoded.mask, report.num_examples, decoded.gradients), decoded.parts
