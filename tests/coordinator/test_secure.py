"""Secure rounds: phases, vanishing devices, restarts, and what is refused; training is a draw."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import pytest
import safetensors.numpy
from sqlalchemy import update

from sparrow.coordinator.errors import BadContent, Finished, NameTaken
from sparrow.coordinator.rounds.privacy import epsilon
from sparrow.coordinator.storage.tables import Device
from sparrow.coordinator.sums import private as noise
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.evidence import CANDIDATES, GLOBAL, Evidence, Pool, pool_of
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, pack
from sparrow.protocol.messages import (
    ChangeDevice,
    Conditions,
    Enrol,
    Evaluation,
    PauseReason,
    Receipt,
    UpdateReport,
)
from sparrow.protocol.secure import device as secure
from sparrow.protocol.secure import pads
from sparrow.protocol.secure.fine import hide_extras, statistics
from sparrow.protocol.secure.groups import choose_sharing
from sparrow.protocol.secure.numbers import Scale
from sparrow.protocol.skew import ADJUSTS, LabelSketch, skew_of

from .fakes import DIGITS, LocalCoordinator, next_assignment

SETTINGS = {
    "method": "fedavg",
    "secure": True,
    "secure_metrics": False,
    "rounds": 1,
    "cohort": 8,
    "min_devices": 8,
    "early_stopping": "off",
    "deadline_seconds": 100,
    "secure_phase_seconds": 50,
    "silence_seconds": 3600,
}
MNIST = load_builtin("mnist").manifest
PHASES = ("keys", "shares", "train", "agree", "unmask")


@dataclass
class SecureDevice:
    """A device that trains nothing: its change of the model is drawn from its name."""

    coordinator: LocalCoordinator
    name: str
    budget: float = 1.0
    examples: int = 10
    identity: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    kept: secure.RoundSecrets | None = None
    base: str = "the same model"
    manifest: Manifest = DIGITS
    metrics: dict | None = None
    tells: dict = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)

    def enrol(self):
        public = pads.public_identity(self.identity).hex()
        key = self.name.ljust(32, "k")
        told = {"budget": self.budget, "num_examples": self.examples, "identity_key": public}
        enrolled = self.coordinator.devices.enrol("f", Enrol(name=self.name, enrolment_key=key, **told))
        self.id = enrolled.device_id
        return self

    def ask(self):
        self.coordinator.last_seen.note(self.id)
        return next_assignment(self.coordinator, self.id).assignment

    def send(self, assignment, body):
        media_type = bundle.MEDIA_TYPE if assignment.kind == "train" else "application/json"
        return self.coordinator.acceptance.accept_update(assignment.assignment_id, self.id, body, media_type)

    def change(self, count):
        return np.random.default_rng(sum(self.name.encode())).uniform(-0.1, 0.1, count).astype(np.float32)

    def body(self, assignment):
        work = assignment.secure
        match assignment.kind:
            case "keys":
                self.kept, said = secure.begin(work.context, self.identity)
            case "shares":
                self.kept, said = secure.share(self.kept, self.name, work, {})
            case "agree":
                self.kept, said = secure.agree(self.kept, self.name, work, self.identity)
            case "unmask":
                self.kept, said = secure.unmask(self.kept, self.name, work)
            case "train":
                return self.masked(assignment)
            case _:
                found = Evaluation(num_examples=10, loss=0.5, accuracy=0.5)
                said = Receipt() if self.metrics else Receipt(personal=found, global_model=found)
        return said.model_dump_json().encode()

    def masked(self, assignment):
        work, draw = assignment.secure, assignment.work and NeuronDraw(**assignment.work.model_dump())
        mask = draw and draw_neurons(self.manifest, draw)
        scale = Scale(work.bits, len(work.cell), work.value_range, work.largest_weight)
        change, chance = self.change(count_values(self.manifest, mask)), np.random.default_rng(0)
        places = statistics(self.manifest, mask)
        moved, change[places] = change[places].astype(np.float64), 0
        words, _ = scale.round(change, work.weight, chance)
        base = pack(self.manifest, initial_values(self.manifest, 0), mask)[places]
        extras, _ = hide_extras(moved, base, self.metrics, scale, work.weight, chance)
        self.kept, masked = secure.mask(self.kept, self.name, work, np.concatenate([words, extras]), self.base)
        values, extras = np.split(masked, [len(words)])
        return bundle.encode(self.manifest, values, mask, draw=draw, report=self.report(), extras=extras)

    def report(self, **changes):
        stated = {"secure": secure.state(self.kept, self.identity), **changes}
        told = {"num_examples": self.examples, "steps": 1, "train_loss": 1.0, **self.tells, **stated}
        return UpdateReport(**told).model_dump_json(exclude_defaults=True)

    def answer(self):
        assignment = self.ask()
        if assignment is None:
            return None
        assert self.send(assignment, self.body(assignment))
        self.answered.append(assignment.kind.value)
        return assignment


@pytest.fixture
def begin(open_coordinator):
    """Makes a coordinator with a secure federation, and its devices."""

    def make(count=8, budgets=(1.0,), examples=(10,), **settings):
        coordinator = open_coordinator()
        coordinator.create(**{**SETTINGS, "cohort": count, "min_devices": count, **settings})
        return coordinator, [
            SecureDevice(coordinator, f"d{n:02}", budgets[n % len(budgets)], examples[n % len(examples)]).enrol()
            for n in range(count)
        ]

    return make


def play(coordinator, devices, vanish=(), phase=None):
    """Play until nobody is asked any more. vanish: names of those who answer no more from ``phase`` on."""
    gone, moved = set(), True
    while moved:
        coordinator.rounds.advance()
        moved = False
        for device in devices:
            if device.name in gone:
                continue
            try:
                asked = device.ask()
                if asked is not None and asked.kind == phase and device.name in vanish:
                    gone.add(device.name)
                    continue
                moved = device.answer() is not None or moved
            except Finished:
                continue
        if not moved and gone and coordinator.info().status == "running" and coordinator.info().round == 0:
            coordinator.clock.now += 101
            coordinator.rounds.advance()
            moved = True


def moved(coordinator):
    """What the rounds have moved, packed."""
    after = safetensors.numpy.load(coordinator.model())
    return pack(DIGITS, after, None) - pack(DIGITS, initial_values(DIGITS, 0), None)


def mean_of(devices):
    weight = sum(device.examples for device in devices)
    count = DIGITS.shared_values
    return sum(device.examples * device.change(count).astype(np.float64) for device in devices) / weight


def rounding(devices, count):
    """The largest error that rounding makes of a weighted mean, and float32 of the model."""
    scale = Scale(16, count, 0.5, max(device.examples for device in devices))
    return len(devices) * scale.step / sum(device.examples for device in devices) + 1e-6


@pytest.mark.integration
def test_the_model_moves_by_the_weighted_mean_of_masked_updates(begin):
    coordinator, devices = begin(examples=(10, 20, 40))
    play(coordinator, devices)
    assert coordinator.info().status == "finished"
    assert all(device.answered[:5] == list(PHASES) for device in devices)
    np.testing.assert_allclose(moved(coordinator), mean_of(devices), atol=rounding(devices, 8))
    record = coordinator.record(1)
    assert record.updates == 8
    assert (record.notes["secure_cells"], record.notes["secure_cells_without_sum"]) == (1, 0)
    assert [record.notes[f"secure_{phase}_vanished"] for phase in PHASES] == [0, 0, 0, 0, 0]


def test_a_single_masked_update_says_nothing(begin):
    """Every value of an update is uniform: what is stored is no device's."""
    coordinator, devices = begin()
    coordinator.rounds.advance()
    bodies = []
    for _ in range(3):
        for device in devices:
            assignment = device.ask()
            body = device.body(assignment)
            device.send(assignment, body)
            bodies += [body] if assignment.kind == "train" else []
        coordinator.rounds.advance()
    for body in bodies:
        values = bundle.decode(body, DIGITS).masked
        share = np.bincount(values >> 12, minlength=16) / len(values)
        assert abs(share - 1 / 16).max() < 0.01


@pytest.mark.integration
@pytest.mark.parametrize("phase", PHASES)
def test_who_vanishes_costs_the_round_its_own_update_and_no_more(begin, phase):
    coordinator, devices = begin()
    play(coordinator, devices, {"d01", "d04"}, phase)
    record = coordinator.record(1)
    there = devices if phase in ("agree", "unmask") else [each for each in devices if each.name not in ("d01", "d04")]
    np.testing.assert_allclose(moved(coordinator), mean_of(there), atol=rounding(there, 8))
    assert record.updates == len(there)
    assert record.notes[f"secure_{phase}_vanished"] == 2


def test_too_few_survivors_are_not_unmasked(begin):
    coordinator, devices = begin(secure_colluders=1)
    play(coordinator, devices, {each.name for each in devices[2:]}, "train")
    record = coordinator.record(1)
    assert record.notes["secure_without_sum"] == 1
    assert record.model_version == record.base_version == 0
    assert len(record.left_out) == 2
    assert all("so no sum is unmasked" in why for why in record.left_out.values())
    assert all("unmask" not in device.answered for device in devices)


@pytest.mark.integration
def test_devices_of_one_budget_share_a_draw_and_a_sum(begin):
    coordinator, devices = begin(16, method="fedspu", budgets=(0.25, 0.5), secure_dropouts=0.1)
    coordinator.rounds.advance()
    drawn = {}
    for _ in range(3):
        for device in devices:
            assignment = device.ask()
            if assignment.kind == "train":
                drawn.setdefault(device.budget, set()).add((assignment.work.key, assignment.work.ratio))
            device.send(assignment, device.body(assignment))
        coordinator.rounds.advance()
    assert {budget: {ratio for _, ratio in draws} for budget, draws in drawn.items()} == {0.25: {0.25}, 0.5: {0.5}}
    assert all(len(draws) == 1 for draws in drawn.values())
    play(coordinator, devices)
    assert coordinator.record(1).notes["secure_cells"] == 2


def test_metrics_go_through_the_masks(begin):
    """Of a loss and an accuracy the record has the mean, weighted with samples, and no device's is told."""
    coordinator, devices = begin(examples=(10, 20, 40), secure_metrics=True)
    for number, device in enumerate(devices):
        device.metrics = {"train_loss": float(number), "accuracy_global": number / 10 if number else None}
        device.tells = {"train_loss": None}
    play(coordinator, devices)
    record, weights = coordinator.record(1), np.array([device.examples for device in devices])
    assert record.train_loss == pytest.approx(np.average(np.arange(8), weights=weights), abs=1e-3)
    assert record.accuracy_global == pytest.approx(np.average(np.arange(1, 8) / 10, weights=weights[1:]), abs=1e-5)
    assert (record.loss_personal, record.notes["secure_cells"]) == (None, 1)
    np.testing.assert_allclose(moved(coordinator), mean_of(devices), atol=rounding(devices, 8))


def test_what_devices_find_of_their_candidates_and_labels_goes_through_the_masks(begin):
    """The evaluation at the end brings the pool of all, of whom none has told anything in clear."""
    settings = {"method": "fedspu", "personal_model": "fleet", "finetune_epochs": 1, "secure_metrics": True}
    coordinator, devices = begin(**settings, logit_adjustment=1.0, logit_adjustment_from=0.1)
    chance, found, labels = np.random.default_rng(0), [], []
    for number, device in enumerate(devices):
        losses = {name: chance.normal(1, 0.3, 8) for name in (GLOBAL, *CANDIDATES)}
        found.append(Evidence.of(losses))
        labels.append(LabelSketch.of(20 * np.eye(10, dtype=int)[number]))
        device.metrics = {**found[-1].told(), **labels[-1].told()}
        device.tells = {"train_loss": None}
    plans = {}
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for device in devices:
            assignment = device.answer() if coordinator.info().status != "finished" else None
            if assignment is not None:
                plans.setdefault(assignment.kind.value, []).append(assignment.plan)
    assert "compare" not in plans, "nothing is asked for in clear"
    assert [ADJUSTS in plan for plan in plans["train"]] == [False] * 8
    pool = pool_of(found)
    for plan in plans["evaluate"]:
        told = Pool.from_plan(plan)
        assert told.devices == 8
        np.testing.assert_allclose(told.mean, pool.mean, atol=1e-4)
        np.testing.assert_allclose(told.between, pool.between, atol=1e-3)
        assert plan[ADJUSTS] is True
    assert coordinator.record(1).notes["label_skew_permille"] == pytest.approx(1000 * skew_of(labels), abs=2)


def test_words_that_are_not_those_of_the_model_and_metrics_are_refused(begin):
    coordinator, devices = begin(secure_metrics=True)
    reach(coordinator, devices, "train")
    assignment = devices[0].ask()
    with pytest.raises(BadContent, match="words must follow the masked values"):
        devices[0].send(assignment, devices[0].body(assignment))


@pytest.mark.integration
def test_differential_privacy_adds_its_noise_to_sums(begin, monkeypatch):
    """Whoever has more samples counts no more; the noise is that of the setting, and each draw is accounted for."""
    asked = []
    monkeypatch.setattr(noise, "noise_of", lambda key, number, sums: asked.append(sums.copy()) or np.zeros(len(sums)))
    private = {"noise_multiplier": 2.0, "update_clip": 100.0, "task": "mnist"}
    coordinator, devices = begin(examples=(10, 40), secure_bits=32, **private)
    for device in devices:
        device.manifest = MNIST
    play(coordinator, devices)
    record = coordinator.record(1)
    (total,) = asked
    there = [device for device in devices if "unmask" in device.answered]
    assert record.updates == len(there) > 2
    np.testing.assert_allclose(total, sum(each.change(len(total)).astype(np.float64) for each in there), atol=1e-6)
    assert record.privacy.most_draws == 1
    assert record.privacy.epsilon == epsilon(coordinator.info().settings, 1)


def test_a_cohort_too_small_to_hide_anybody_still_gets_noise(begin):
    private = {"noise_multiplier": 2.0, "update_clip": 100.0, "task": "mnist"}
    coordinator, devices = begin(secure_bits=32, **private)
    for device in devices:
        device.manifest = MNIST
    play(coordinator, devices, {each.name for each in devices[2:]}, "train")
    record = coordinator.record(1)
    assert record.notes["secure_without_sum"] == 1
    assert record.model_version > record.base_version
    assert record.privacy.epsilon > 0


@pytest.mark.integration
def test_rounds_that_draw_few_or_nobody_close(begin):
    """Under noise each device is drawn by itself: a cohort of four of sixteen may be any number."""
    private = {"noise_multiplier": 2.0, "update_clip": 100.0, "task": "mnist", "rounds": 6}
    coordinator, devices = begin(12, secure_bits=32, **private, cohort=4, secure_dropouts=0.0)
    for device in devices:
        device.manifest = MNIST
    play(coordinator, devices)
    assert coordinator.info().status == "finished"
    records = [coordinator.record(number) for number in range(1, 7)]
    assert {record.notes.get("secure_without_sum", 0) for record in records} == {0, 1}
    drew = [record for record in records if record.cohort]
    assert all(record.model_version > record.base_version for record in drew)


@pytest.mark.integration
@pytest.mark.parametrize("phase", PHASES)
def test_a_coordinator_that_is_killed_in_a_phase_goes_on(begin, open_coordinator, phase):
    coordinator, devices = begin()
    coordinator.rounds.advance()
    while True:
        first = devices[0].ask()
        if first.kind == phase:
            break
        for device in devices:
            device.answer()
        coordinator.rounds.advance()
    for device in devices[:3]:
        device.answer()
    again = open_coordinator()
    again.rounds.resume_after_restart()
    for device in devices:
        device.coordinator = again
    play(again, devices)
    np.testing.assert_allclose(moved(again), mean_of(devices), atol=rounding(devices, 8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"robust": "median"}, "robust: not in a secure federation"),
        ({"update_norm_limit": 1.0}, "update_norm_limit: not in a secure federation"),
        ({"outlier_mads": 5.0}, "outlier_mads: not in a secure federation"),
        ({"buffer": 2}, "buffer: not in a secure federation"),
        (
            {"task": "mnist", "noise_multiplier": 1.0, "update_clip": 0.01, "cohort": 100, "min_devices": 100},
            "secure_bits: rounding to 16 bits can lengthen an update by",
        ),
        ({"method": "pfedgate"}, "secure: pfedgate does not support it"),
        ({"method": "local"}, "devices send no model"),
        ({"method": "heterofl"}, "set method_settings.rows = all"),
        ({"method": "fedsgc", "rounds": 20}, "set method_settings.adjust_interval = 0"),
        ({"method": "lgfedavg", "rounds": 20, "method_settings": {"fedavg_share": 0.5}}, "set method_settings.fedavg"),
        ({"cohort": 2, "min_devices": 3}, "set cohort to 3$"),
        ({"cohort": 5, "secure_colluders": 2}, "set cohort to 6$"),
        ({"cohort": 4, "secure_dropouts": 0.5}, "lower secure_dropouts or secure_colluders$"),
        ({"cohort": 8, "min_devices": 2}, "set min_devices to at least 3"),
        ({"over_selection": 0.5}, "over_selection and extensions would add devices after the keys were exchanged"),
    ],
)
def test_what_cannot_be_secure_is_refused_by_name(open_coordinator, settings, said):
    coordinator = open_coordinator()
    with pytest.raises(BadContent, match=said):
        coordinator.create(**{**SETTINGS, **settings})


@pytest.mark.parametrize("colluders", [0, 1, 3, 5, 20])
def test_a_secure_federation_without_numbers_begins_with_enough_devices(open_coordinator, colluders):
    coordinator = open_coordinator()
    coordinator.create(method="fedavg", secure=True, secure_colluders=colluders)
    settings = coordinator.info().settings
    assert settings.min_devices == colluders + 2 == coordinator.info().smallest_sum
    assert choose_sharing(settings.cohort, colluders, settings.secure_dropouts)
    # The advice for a new federation is accepted.
    assert "set update_clip" in coordinator.info().notice
    coordinator.create("again", method="fedavg", secure=True, secure_colluders=colluders, update_clip=1.0)
    assert coordinator.info("again").notice is None


def notices(coordinator):
    return [(each.text, each.since) for each in coordinator.overviews.look("f").notices if each.kind == "no_sum"]


def test_rounds_wait_for_enough_devices_and_are_not_lost(begin):
    coordinator, devices = begin(3, rounds=3, cohort=8)
    hot = Conditions(available=False, reason=PauseReason.heat)
    coordinator.devices.change(devices[0].id, ChangeDevice(conditions=hot))
    assert play_phases(coordinator, devices[1:]) == 0
    assert coordinator.info().waiting_for == "the 3 devices of a secure sum (ready: 2, paused: 1 heat)"
    assert notices(coordinator) == []
    # Four devices tolerate no dropout, but have a sum.
    devices += [SecureDevice(coordinator, f"e{n}").enrol() for n in range(2)]
    assert play_phases(coordinator, devices[1:]) == 1
    assert coordinator.info().waiting_for is None
    assert coordinator.record(1).notes["secure_cells"] == 1
    assert len(coordinator.record(1).cohort) == 4


def play_phases(coordinator, devices):
    """Play until the round of these devices has closed, or no round opens; return the number of closed rounds."""
    before = coordinator.info().round
    while coordinator.info().round == before:
        coordinator.rounds.advance()
        answers = [device.answer() for device in devices]
        if not any(answers):
            break
    coordinator.rounds.advance()
    return coordinator.info().round


def test_a_round_without_a_sum_is_a_notice_until_one_has_a_sum(begin):
    coordinator, devices = begin(5, rounds=4)
    for number in (1, 2):
        reach(coordinator, devices, "train")
        for device in devices:
            assert device.ask().round == number
        coordinator.clock.now += 101
        coordinator.rounds.advance()
        for device in devices:
            device.ask()
    assert coordinator.info().round == 2
    ((text, since),) = notices(coordinator)
    assert text.startswith("Rounds 1 to 2: no secure sum (no cell has 3 updates")
    assert since == coordinator.record(1).closed_at
    assert play_phases(coordinator, devices) == 3
    assert notices(coordinator) == []


def test_a_federation_ends_if_too_few_devices_still_train(begin):
    coordinator, devices = begin(5, rounds=9)
    with coordinator.store.writing() as db:
        stopped = [device.id for device in devices[2:]]
        db.execute(update(Device).where(Device.id.in_(stopped)).values(status="stopped", stopped_round=0))
    coordinator.rounds.advance()
    assert (coordinator.info().status, coordinator.info().reason) == ("finished", "too_few")
    # Devices that stopped early train again.
    assert coordinator.change(action="reopen").devices_stopped == 0
    for device in devices:
        assert device.ask() is None
    assert coordinator.rounds.advance()


def test_an_update_that_is_not_masked_is_refused(begin):
    coordinator, devices = begin()
    coordinator.rounds.advance()
    for _ in range(2):
        for device in devices:
            device.answer()
        coordinator.rounds.advance()
    assignment = devices[0].ask()
    report = UpdateReport(num_examples=10, steps=1, train_loss=1.0).model_dump_json()
    body = bundle.encode(DIGITS, np.zeros(DIGITS.shared_values, np.float32), None, report=report)
    with pytest.raises(BadContent, match="must be masked"):
        devices[0].send(assignment, body)
    wide = np.zeros(DIGITS.shared_values, np.uint32)
    with pytest.raises(BadContent, match="masked values have 16 bits here"):
        devices[0].send(assignment, bundle.encode(DIGITS, wide, None, report=report))


def reach(coordinator, devices, phase):
    """Play the phases before this one."""
    coordinator.rounds.advance()
    for _ in PHASES[: PHASES.index(phase)]:
        for device in devices:
            device.answer()
        coordinator.rounds.advance()


@pytest.mark.integration
def test_an_update_without_a_true_statement_is_refused(begin, without_rest):
    coordinator, devices = begin()
    reach(coordinator, devices, "train")
    one, other = devices[:2]
    assignment = one.ask()
    body = one.body(assignment)
    other.body(other.ask())
    decoded = bundle.decode(body, DIGITS)
    values, extras = decoded.masked, decoded.extras
    own, others = (secure.state(each.kept, each.identity) for each in (one, other))
    said = own.said() | {"present": 64 * "1"}
    signature = pads.sign(one.identity, one.kept.context, said).hex()
    before = pads.sign(one.identity, "another round", own.said()).hex()
    for stated, match in [
        (None, "secure.*is missing"),
        (others, r"d00: .* not signed"),
        (own.model_copy(update={"scale": 64 * "1"}), r"d00: .* not signed"),
        (own.model_copy(update={"signature": before}), r"d00: .* not signed"),
        (secure.Statement(**said, signature=signature), "names other devices"),
    ]:
        with pytest.raises(BadContent, match=match):
            one.send(assignment, bundle.encode(DIGITS, values, None, report=one.report(secure=stated), extras=extras))
    assert one.send(assignment, body)


def test_a_signature_of_something_else_is_refused(begin):
    coordinator, devices = begin()
    reach(coordinator, devices, "agree")
    one, other = devices[:2]
    assignment = one.ask()
    body = one.body(assignment)
    stated = secure.Agree(signature=secure.state(one.kept, one.identity).signature).model_dump_json().encode()
    for wrong in (other.body(other.ask()), stated):
        with pytest.raises(BadContent, match=r"d00: .* not signed"):
            one.send(assignment, wrong)
    assert one.send(assignment, body)
    play(coordinator, devices)
    np.testing.assert_allclose(moved(coordinator), mean_of(devices), atol=rounding(devices, 8))


@pytest.mark.integration
def test_who_states_another_model_costs_the_round_its_own_update_and_no_more(begin):
    coordinator, devices = begin()
    devices[3].base = "another model"
    play(coordinator, devices)
    there = [each for each in devices if each.name != "d03"]
    np.testing.assert_allclose(moved(coordinator), mean_of(there), atol=rounding(there, 8))
    record = coordinator.record(1)
    assert "its scale or model differs" in record.left_out["d03"]
    assert devices[3].answered[:3] == ["keys", "shares", "train"]
    assert "unmask" not in devices[3].answered


def test_a_round_on_which_too_few_agree_has_no_sum(begin):
    coordinator, devices = begin()
    play(coordinator, devices, {each.name for each in devices[4:]}, "agree")
    record = coordinator.record(1)
    assert record.notes["secure_without_sum"] == 1
    assert record.model_version == record.base_version == 0
    assert all("4 devices agree on the remaining devices, but 5 must" in why for why in record.left_out.values())
    assert all("unmask" not in device.answered for device in devices)


def test_all_of_a_round_count_by_their_samples_up_to_the_most_of_any(begin):
    coordinator, devices = begin(examples=(10, 20, 40))
    reach(coordinator, devices, "train")
    works = {device.name: device.ask().secure for device in devices}
    most = {work.largest_weight for work in works.values()}
    assert len(most) == 1
    for device in devices:
        assert works[device.name].weight == min(device.examples, *most)


def test_keys_of_another_device_or_round_are_refused(begin):
    coordinator, devices = begin()
    coordinator.rounds.advance()
    assignment = devices[0].ask()
    _, of_another = secure.begin(assignment.secure.context, devices[1].identity)
    _, of_before = secure.begin("another round", devices[0].identity)
    for keys in (of_another, of_before):
        with pytest.raises(BadContent, match=r"^d00: "):
            devices[0].send(assignment, keys.model_dump_json().encode())


def test_shares_of_others_than_was_asked_for_are_refused(begin):
    coordinator, devices = begin()
    coordinator.rounds.advance()
    for device in devices:
        device.answer()
    coordinator.rounds.advance()
    assignment = devices[0].ask()
    with pytest.raises(BadContent, match="sealed for others than the neighbours"):
        devices[0].send(assignment, b'{"sealed": {"d01": "00"}}')


def test_an_identity_key_never_changes(begin):
    _, devices = begin()
    devices[0].identity = secrets.token_bytes(32)
    with pytest.raises(NameTaken, match="enrolled with another identity key"):
        devices[0].enrol()


def test_masked_values_belong_to_secure_federations(open_coordinator):
    coordinator = open_coordinator()
    coordinator.create(method="fedavg", rounds=1, cohort=1, min_devices=1)
    (device,) = coordinator.enrol("one")
    coordinator.rounds.advance()
    report = UpdateReport(num_examples=10, steps=1, train_loss=1.0).model_dump_json()
    body = bundle.encode(DIGITS, np.zeros(DIGITS.shared_values, np.uint16), None, report=report)
    with pytest.raises(BadContent, match="masked"):
        device.send(device.ask(), body)
