"""pFedGate's server half: tables cut for the weakest device, updates of blocks, and downloads of what has changed."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from sqlalchemy import select
from torch import nn

from edge_sdk.device.session import Outcome
from edge_sdk.errors import Refused, RoundOver
from edge_sdk.methods import pfedgate as device_half
from edge_sdk.publishing.untraced import describe_whole
from sparrow.coordinator.errors import BadContent, CoordinatorError
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import GlobalModel, Situation, load_method, sends_values
from sparrow.coordinator.methods.pfedgate import MOST_BLOCKS, costs_of
from sparrow.coordinator.storage.tables import Device
from sparrow.protocol import bundle
from sparrow.protocol.blocks import BlockMask, BlockTable
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import everything
from sparrow.protocol.flops import budget_groups
from sparrow.protocol.manifest import Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Kind, UpdateReport
from sparrow.protocol.settings import FederationSettings

from .fakes import next_assignment
from .sessions import CoordinatorWithDevices

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
CIFAR = load_builtin("cifar10:pfedgate").manifest
PFEDGATE = load_method("pfedgate")
BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def settings(*, rounds=3, **own):
    return completed(FederationSettings(method="pfedgate", rounds=rounds, method_settings=own))


def cut(manifest=CIFAR, **own):
    return PFEDGATE.manifest(manifest, settings(**own))


def shapes(manifest):
    return {spec.name: spec.shape for spec in manifest.shared if spec.trainable}


def warned(manifest, **own):
    """What the federation warns of, of a model cut by these settings."""
    how = settings(**own)
    where = Situation(PFEDGATE.manifest(manifest, how), how)
    return PFEDGATE.warning(PFEDGATE.start(initial_values(where.manifest, 0), where), where)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_at_half_the_budget_the_table_is_the_papers():
    table = cut(smallest_budget=0.5, align_rows=False).block_table
    assert table.tensors == BlockTable.of(shapes(CIFAR), count=5, smallest_share=0.2).tensors
    assert table.sizes[table.forced].sum() == 51_364
    rows = cut(smallest_budget=0.5).block_table
    assert rows.tensors == BlockTable.of(shapes(CIFAR), count=5, smallest_share=0.2, align_rows=True).tensors


@pytest.mark.parametrize("cost", ["parameters", "flops", "seconds"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("manifest", [DIGITS, CIFAR, load_builtin("har").manifest], ids=["digits", "cifar", "har"])
def test_the_largest_block_fits_beside_the_first_ones(manifest, budget, cost):
    made = cut(manifest, smallest_budget=budget, cost=cost)
    table, costs = made.block_table, costs_of(made, cost)
    assert set(table.tensors) == set(shapes(manifest)), "buffers are not cut"
    for name, blocks in made.block_groups("kind").items():
        free = costs[blocks][~table.forced[blocks]]
        assert table.capacity(budget, costs, blocks, name) >= free.max()
    said = warned(manifest, smallest_budget=budget, cost=cost)
    if said is not None:
        assert cost != "parameters" or budget == 0.1, "blocks of many costs, or very small ones"
        assert "an untrained gate keeps" in said
    most = max(len(sizes) for sizes in table.tensors.values())
    assert 5 <= most <= MOST_BLOCKS
    if budget >= 0.5 and cost == "parameters":
        assert most == 5
    if budget == 0.1:
        assert most > 10, "smaller blocks for a smaller budget"


def test_all_blocks_share_a_budget_if_a_kind_cannot_be_cut():
    """A last layer of three classes has rows of a third each: it is taken, and shares the model's budget."""
    model = nn.Sequential(nn.Conv1d(4, 32, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 3))
    manifest = describe_whole(model, torch.zeros(2, 4, 9), task="t")
    made = cut(manifest, smallest_budget=0.3)
    assert made.block_groups("kind").keys() == {"linear layers", "other layers"}
    assert list(budget_groups(made, "kind", 0.3, "parameters")) == [""]
    assert list(budget_groups(made, "kind", 0.5, "parameters")) == ["other layers", "linear layers"]


def test_a_first_share_and_a_number_of_blocks_may_be_given():
    table = cut(blocks=8, first_share=0.05, align_rows=False).block_table
    assert table.tensors == BlockTable.of(shapes(CIFAR), count=8, smallest_share=0.05).tensors
    half = cut(smallest_budget=0.1, blocks=4, align_rows=False).block_table
    assert half.tensors == BlockTable.of(shapes(CIFAR), count=4, smallest_share=0.05).tensors


@pytest.mark.parametrize(
    ("own", "smallest"),
    [
        ({"smallest_budget": 0.1, "blocks": 5, "first_share": 0.2, "align_rows": False}, 0.2),
        ({"smallest_budget": 0.1, "first_share": 0.2, "align_rows": False}, 0.2),
        ({"smallest_budget": 0.3, "blocks": 1}, 1.0),
        ({"smallest_budget": 0.3, "first_share": 0.5, "cost": "flops", "align_rows": False}, 0.5),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest_that_can(own, smallest):
    with pytest.raises(BadContent, match=r"method_settings\.smallest_budget: ") as refused:
        cut(**own)
    named = float(str(refused.value).split("the smallest is ")[1].split(";")[0])
    assert named == pytest.approx(smallest, abs=0.002)
    cut(**{**own, "smallest_budget": named})
    with pytest.raises(BadContent):
        cut(**{**own, "smallest_budget": named - 0.002})


def test_a_federation_that_cannot_begin_is_not_made(coordinator):
    with pytest.raises(BadContent, match="the smallest is"):
        coordinator.create("pfedgate", method_settings={"smallest_budget": 0.05, "blocks": 5, "first_share": 0.5})
    assert coordinator.federations.list() == []


def test_blocks_that_can_never_be_chosen_are_warned_of_from_the_beginning(coordinator, caplog):
    said = "a device of the smallest budget, 0.3, can never choose the largest blocks"
    coarse = {"smallest_budget": 0.3, "blocks": 5, "first_share": 0.2, "align_rows": False}
    kinds = warned(CIFAR, **coarse)
    assert kinds.startswith(f"{said} of other layers: they cost 10240, and 5370 is left")
    assert warned(CIFAR, **coarse, budget_per="model").startswith(f"{said}: they cost 38400, and 25685 is left")
    assert warned(CIFAR, smallest_budget=0.3, align_rows=False) is None
    coordinator.create("pfedgate", rounds=1, method_settings={"smallest_budget": 0.3, "blocks": 3, "first_share": 0.25})
    assert "can never choose the largest blocks" in coordinator.info().warning
    assert "can never choose the largest blocks" in caplog.text


def test_layers_that_an_untrained_gate_starves_are_warned_of():
    """The first runs on CIFAR-10: the large blocks of fc1, two thirds of the weights, were never chosen by anybody."""
    ran = {"smallest_budget": 0.3, "blocks": 10, "first_share": 0.1, "budget_per": "model"}
    assert warned(CIFAR, **ran).startswith(
        "an untrained gate keeps 10 % of the 192120 weights of fc1, whose fair share of a budget of 0.3 is 30 %"
    )
    assert "fc1" in warned(CIFAR, smallest_budget=0.5, blocks=5, first_share=0.2, budget_per="model")
    for other in ({"budget_per": "kind"}, {"budget_per": "layer"}, {"importance": "per_weight"}):
        assert warned(CIFAR, **{**ran, **other}) is None


def test_the_last_round_is_dense_where_the_settings_say_so():
    for dense in (True, False):
        how = settings(rounds=3, dense_last=dense)
        plans = [PFEDGATE.schedule.work(Situation(LINE, how, round=number)).plan for number in (1, 2, 3)]
        assert plans == [{}, {}, {"dense": 1} if dense else {}]


def test_what_the_publisher_has_cut_stays():
    (name, shape), *_ = shapes(CIFAR).items()
    mine = (shape[0] * 25 * 3 - 10, 10)
    made = cut(CIFAR.with_blocks({name: mine}), smallest_budget=0.5)
    assert made.block_table.tensors[name] == mine
    assert {**made.blocks, name: None} == {**cut(smallest_budget=0.5).blocks, name: None}
    with pytest.raises(BadContent, match="smallest_budget"):
        cut(CIFAR.with_blocks({"fc1.weight": (192_000,)}), smallest_budget=0.5)


@pytest.mark.parametrize("blocks", [{"out.weight": (4, 4)}, {"nobody": (3,)}, {"bn1.running_mean": (16,)}])
def test_published_blocks_that_are_wrong_are_refused(blocks):
    with pytest.raises(ValueError, match="cut whole, shared, trainable tensors"):
        Manifest.model_validate({**DIGITS.model_dump(), "blocks": blocks})


def test_private_weights_are_refused():
    with pytest.raises(BadContent, match=r"^out\.weight: "):
        cut(DIGITS.with_private(["out.weight"]))


@pytest.mark.parametrize(
    "own",
    [
        {"smallest_budget": 0},
        {"blocks": -1},
        {"first_share": 1.1},
        {"touched_limit": 0},
        {"gate_paths": 3},
        {"gate_window": 0},
        {"gate_input": "client"},
        {"budget_per": "tensor"},
        {"importance": "exact"},
        {"gate_learning_rate": 0},
        {"cost": "joules"},
        {"denominator": "some"},
        {"preset": "paper"},
    ],
)
def test_settings_out_of_range_are_refused(own):
    with pytest.raises(BadContent, match=next(iter(own))):
        settings(**own)


# --- sums -------------------------------------------------------------------------------------------------------------

LINE = Manifest(
    task="line",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(TensorSpec(name="w", shape=(4,)), TensorSpec(name="seen", shape=(1,), trainable=False)),
    blocks={"w": (1, 1, 2)},
)


@pytest.mark.parametrize(("denominator", "second"), [("touched", 6.0), ("all", 3.0)])
def test_closing_a_round(denominator, second):
    how = settings(denominator=denominator)
    first = PFEDGATE.start(initial_values_of_line(), Situation(LINE, how))
    assert first.own["changed"].tolist() == [0, 0, 0]
    where = Situation(LINE, how, round=4)
    sums = PFEDGATE.aggregation.sums(first, where)
    for on, value in (((True, True, False), 6), ((True, False, False), 2)):
        mask = BlockMask(np.array(on))
        after = {"w": np.full(4, value, np.float32), "seen": np.full(1, value, np.float32)}
        sums.fold_in_place(pack(LINE, after, mask), mask, 10)
    model = PFEDGATE.aggregation.close(GlobalModel(first.tensors, own={"changed": np.array([1, 2, 3])}), sums, where)
    assert model.tensors["w"].tolist() == [4, second, 0, 0]
    assert model.tensors["seen"].tolist() == [4]
    assert model.own["changed"].tolist() == [4, 4, 3]
    assert model.notes == {"blocks": 2, "masks": 2}
    for since, changed in ((4, [0, 0, 0]), (3, [1, 1, 0]), (2, [1, 1, 1]), (0, [1, 1, 1])):
        assert PFEDGATE.changes(model, since, where).on.tolist() == changed


def initial_values_of_line():
    return {"w": np.zeros(4, np.float32), "seen": np.zeros(1, np.float32)}


def test_the_first_block_of_every_tensor_is_sent():
    where = Situation(LINE, settings())
    PFEDGATE.masks.check(None, BlockMask(np.array([True, False, False])), where)
    with pytest.raises(BadContent, match=r"^mask: "):
        PFEDGATE.masks.check(None, BlockMask(np.array([False, True, True])), where)


# --- whole federations ------------------------------------------------------------------------------------------------

QUICK = {"smallest_budget": 0.3, "blocks": 10, "touched_limit": 0.5, "gate_learning_rate": 0.5}
"""Few blocks of many change in a round."""


def start(coordinator, *, names="ab", budgets=None, own=None, **given):
    given = {"min_devices": len(names), "local_steps": 2, **given}
    coordinator.create("pfedgate", method_settings={**QUICK, **(own or {})}, **given)
    budgets = budgets or [0.5] * len(names)
    return [coordinator.open_device(name, budget=budget) for name, budget in zip(names, budgets, strict=True)]


def kinds(assignments):
    return [assignment.kind.value for assignment in assignments]


def assigned(coordinator, session):
    digest = session.progress.model
    return next_assignment(coordinator, session.identity.device_id, None, digest).assignment


def decoded(coordinator, bodies):
    return [bundle.decode(body, coordinator.served.manifest("f")) for body in bodies]


def bundles(session):
    wire = session.transport
    return [body for body, kind in zip(wire.sent, wire.media_types, strict=True) if kind == bundle.MEDIA_TYPE]


def test_devices_of_every_budget_learn_one_model(coordinator):
    sessions = start(
        coordinator,
        names="abc",
        budgets=[0.1, 0.45, 1.0],
        own={"smallest_budget": 0.1, "blocks": 0, "touched_limit": 1.0},
        rounds=3,
        local_steps=None,
        learning_rate=0.2,
    )
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train"] * 3 + ["evaluate"]] * 3
    assert "keeps 4 % of the 4640 weights of conv2" in coordinator.info().warning, (
        "so small a budget leaves little choice"
    )
    assert not coordinator.info().global_model_usable
    table = coordinator.served.manifest("f").block_table
    records = coordinator.records.rounds("f")
    assert [record.updates for record in records] == [3] * 3
    for session, budget in zip(sessions, (0.1, 0.45, 1.0), strict=True):
        for body in bundles(session):
            counts = json.loads(bundle.decode(body, session.manifest).report)["counts"]
            assert counts["values_kept"] <= budget * counts["values"]
            assert counts["values_kept"] <= counts["values_touched"] <= counts["values"]
    for session in sessions:
        touched = session.folder.own["touched"].astype(bool)
        assert touched[table.forced].all()
    last = records[-1]
    assert last.evaluated_devices == 3
    assert last.accuracy_personal > 0.2
    assert last.accuracy_global is None
    for receipt in coordinator.receipts():
        assert set(receipt.others) == {"batch", "local", "local batch", "static"}
        assert receipt.state_bytes > 0


def test_a_budget_below_the_smallest_is_told_and_not_drawn(coordinator, caplog):
    small, enough = start(coordinator, budgets=[0.2, 0.3], rounds=2)
    assert "budget of 0.2" in caplog.text
    worked = coordinator.play(small, enough)
    assert [kinds(each) for each in worked] == [["adapt"], ["train"] * 2 + ["evaluate"]] or kinds(worked[1])[
        0
    ] == "train"
    assert [record.cohort for record in coordinator.records.rounds("f")] == [("b",)] * 2


def test_if_everybody_has_too_little_the_federation_says_so(coordinator):
    start(coordinator, budgets=[0.1, 0.2])
    coordinator.rounds.advance()
    assert "budget of at least 0.3" in coordinator.info().waiting_for


def test_updates_hold_what_was_touched_and_payloads_what_has_changed(coordinator):
    sessions = start(coordinator, rounds=5)
    coordinator.play(*sessions)
    manifest = coordinator.served.manifest("f")
    records = coordinator.records.rounds("f")
    assert any(record.notes["blocks"] < len(manifest.block_table.sizes) for record in records)
    for session in sessions:
        ups = decoded(coordinator, bundles(session))
        assert len(ups) == 5
        for found in ups:
            share = manifest.block_table.sizes[found.mask.on].sum() / manifest.block_table.sizes.sum()
            assert share <= 0.5
        downs = decoded(coordinator, session.transport.received)
        assert downs[0].mask is None
        assert all(isinstance(found.mask, BlockMask) for found in downs[2:])
        assert all(found.sizes["values"] < 4 * manifest.shared_values for found in downs[2:])


@pytest.fixture
def rebuilt(coordinator, monkeypatch):
    """Every model that a device started from, and that of the coordinator which it was given: (rebuilt, wanted)."""
    pairs = []
    newest = device_half.newest_model

    def watched(job):
        found = newest(job)
        version = {info.model_sha256: info for info in [coordinator.info()]}
        if job.assignment.model_sha256 in version:
            pairs.append((job, found, {name: tensor.copy() for name, tensor in coordinator.model().tensors.items()}))
        return found

    monkeypatch.setattr(device_half, "newest_model", watched)
    return pairs


def agrees(pair):
    _, found, wanted = pair
    return all(found[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items())


@pytest.mark.parametrize(("precision", "denominator"), [("fp32", "touched"), ("int8", "all")])
def test_every_device_rebuilds_the_model_bit_for_bit(coordinator, rebuilt, precision, denominator):
    """Drawn now and then, with what has changed over several rounds."""
    sessions = start(
        coordinator,
        names="abc",
        rounds=6,
        cohort=2,
        evaluation_interval=4,
        precision=precision,
        own={"denominator": denominator},
    )
    coordinator.play(*sessions)
    assert len(rebuilt) >= 12
    assert all(agrees(pair) for pair in rebuilt)
    parts = [job.received.mask for job, *_ in rebuilt if job.received.mask is not None]
    assert len(parts) >= 6
    assert all(tensor.dtype == np.float32 for tensor in coordinator.model().tensors.values())


def test_in_fp16_what_is_rebuilt_is_what_was_rounded(coordinator, rebuilt):
    sessions = start(coordinator, rounds=5, precision="fp16")
    coordinator.play(*sessions)
    assert any(job.received.mask is not None for job, *_ in rebuilt)
    for _, found, wanted in rebuilt:
        for name, tensor in wanted.items():
            np.testing.assert_array_equal(found[name], tensor.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("lost", ["state", "digest", "said"])
def test_a_device_with_an_unknown_model_gets_the_whole_one(coordinator, rebuilt, lost):
    (session,) = start(coordinator, names="a", rounds=4)
    for _ in range(2):
        coordinator.rounds.advance()
        session.step()
    if lost == "state":
        session.folder.close()
        coordinator.folders.remove(session.folder)
        (coordinator.folder / "a" / "model.safetensors").unlink()
        session = coordinator.open_device("a", budget=0.5)
        assert session.personal is None
    else:
        session.progress = session.progress.model_copy(update={"model": "0" * 64 if lost == "digest" else None})
    coordinator.rounds.advance()
    session.step()
    assert rebuilt[-1][0].received.mask is None
    assert agrees(rebuilt[-1])
    coordinator.rounds.advance()
    session.step()
    assert isinstance(rebuilt[-1][0].received.mask, BlockMask), "from then on it is known again"
    assert agrees(rebuilt[-1])


def test_a_coordinator_that_was_restored_sends_the_whole_model(coordinator, tmp_path, rebuilt, clock, monkeypatch):
    """The devices hold models of rounds that it knows nothing of, or never will."""
    sessions = start(coordinator, rounds=5)

    def a_round(coordinator):
        coordinator.rounds.advance()
        for session in sessions:
            session.step()

    for _ in range(2):
        a_round(coordinator)
    coordinator.store.close()
    shutil.copytree(coordinator.folder / "data", tmp_path / "backup" / "data")
    coordinator.__init__(coordinator.folder, clock)
    coordinator.folders = [session.folder for session in sessions]
    for _ in range(2):
        a_round(coordinator)
    held = {session.progress.model for session in sessions}
    coordinator.store.close()
    shutil.rmtree(coordinator.folder / "data")
    shutil.copytree(tmp_path / "backup" / "data", coordinator.folder / "data")
    folders = coordinator.folders
    coordinator.__init__(coordinator.folder, clock)
    coordinator.folders = folders
    assert not held & {record.model_sha256 for record in coordinator.records.rounds("f")}
    rebuilt.clear()
    coordinator.rounds.resume_after_restart()
    coordinator.play(*sessions)
    assert coordinator.info().status == "finished"
    assert all(agrees(pair) for pair in rebuilt)
    assert rebuilt[0][0].received.mask is None
    assert any(pair[0].received.mask is not None for pair in rebuilt)


def test_an_update_that_was_refused_leaves_the_base_right(coordinator, rebuilt, caplog, clock):
    first, second = start(coordinator, rounds=5, own={"touched_limit": 0.4})
    send, tries = first.transport.update, itertools.count()

    def damaged(assignment_id, body, media_type, *_, **named):
        if next(tries) == 1:
            raise Refused(422, "damaged")
        send(assignment_id, body, media_type)

    first.transport.update = damaged
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for session in (first, second):
            session.step()
        clock.pass_seconds(61)  # who handed back rests for a minute
    assert "the update was refused" in caplog.text
    assert [record.updates for record in coordinator.records.rounds("f")] == [2, 1, 2, 2, 2]
    assert all(agrees(pair) for pair in rebuilt)
    assert rebuilt[-1][0].received.mask is not None


def test_an_update_that_came_too_late_leaves_the_base_right(coordinator, rebuilt):
    first, second = start(coordinator, rounds=5, quorum=0.5)
    send, tries = first.transport.update, itertools.count()

    def late(assignment_id, body, media_type, *_, **named):
        if next(tries) == 1:
            raise RoundOver(409, "too late")
        send(assignment_id, body, media_type)

    first.transport.update = late
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for session in (first, second):
            session.step()
    assert all(agrees(pair) for pair in rebuilt)
    assert len(rebuilt) >= 6


def test_a_device_killed_before_it_sends_goes_on_with_gate_and_base(coordinator, new_coordinator, rebuilt):
    def play(coordinator, *, killed):
        (session,) = start(coordinator, names="a", rounds=4, own={"touched_limit": 0.4})
        for number in range(4):
            coordinator.rounds.advance()
            if killed and number in (1, 2):
                session.transport.broken = True
                with pytest.raises(ConnectionError):
                    session.step()
                before = {name: array.tobytes() for name, array in session.folder.own.items()}
                session.folder.close()
                coordinator.folders.remove(session.folder)
                session = coordinator.open_device("a", budget=0.5)
                assert session.progress.pending is not None
                assert {name: array.tobytes() for name, array in session.folder.own.items()} == before
            session.step()
        return coordinator.info().model_sha256, session.folder.own

    one, other = play(coordinator, killed=True), play(new_coordinator(), killed=False)
    assert one[0] == other[0]
    assert all(one[1][name].tobytes() == array.tobytes() for name, array in other[1].items())


def test_payloads_are_cut_for_the_reported_model(coordinator):
    """A device that starts again without its state, while its assignment is open."""
    (session,) = start(coordinator, names="a", rounds=4)
    for _ in range(2):
        coordinator.rounds.advance()
        session.step()
    coordinator.rounds.advance()
    part = assigned(coordinator, session)
    device_id, digest = session.identity.device_id, session.progress.model
    whole = next_assignment(coordinator, device_id, None, None).assignment
    assert part.assignment_id == whole.assignment_id
    assert part.payload.bytes < whole.payload.bytes
    assert len(coordinator.dispatch.payload(whole.assignment_id, device_id).body) == whole.payload.bytes
    again = next_assignment(coordinator, device_id, None, digest).assignment
    assert again.payload == part.payload
    with coordinator.store.reading() as db:
        assert db.scalars(select(Device.model)).one() == digest


def test_other_methods_name_no_model(coordinator):
    coordinator.create("fedavg", min_devices=1)
    session = coordinator.open_device("a")
    coordinator.rounds.advance()
    assignment = assigned(coordinator, session)
    assert assignment.model_sha256 is None
    said = next_assignment(coordinator, session.identity.device_id, None, coordinator.info().model_sha256).assignment
    assert said.payload == assignment.payload


def test_masks_that_are_no_blocks_of_this_model_are_refused(coordinator):
    (session,) = start(coordinator, names="a")
    coordinator.rounds.advance()
    manifest, tensors = coordinator.served.manifest("f"), coordinator.model().tensors
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()

    def send(mask):
        body = bundle.encode(manifest, pack(manifest, tensors, mask), mask, report=report)
        assignment = assigned(coordinator, session)
        return coordinator.acceptance.accept_update(assignment.assignment_id, session.identity.device_id, body)

    with pytest.raises(BadContent, match=r"mask: it differs from the mask of .* in round 1"):
        send(everything(manifest))
    with pytest.raises(BadContent, match="first block"):
        send(BlockMask(~manifest.block_table.forced))
    assert send(BlockMask(manifest.block_table.forced.copy()))


def test_a_mask_of_blocks_is_refused_where_the_method_has_none(coordinator):
    coordinator.create("fedavg", min_devices=1)
    session = coordinator.open_device("a")
    coordinator.rounds.advance()
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
    nothing = BlockMask(np.zeros(0, dtype=bool))
    body = bundle.encode(DIGITS, pack(DIGITS, coordinator.model().tensors, nothing), nothing, report=report)
    assignment = assigned(coordinator, session)
    with pytest.raises(BadContent, match=r"mask: it differs from the mask of .* in round 1"):
        coordinator.acceptance.accept_update(assignment.assignment_id, session.identity.device_id, body)


def test_updates_of_everything_are_welcome(coordinator):
    """A method of one's own may train under no mask at all."""
    (session,) = start(coordinator, names="a")
    coordinator.rounds.advance()
    manifest, tensors = coordinator.served.manifest("f"), coordinator.model().tensors
    moved = {name: tensor + np.float32(1) for name, tensor in tensors.items()}
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
    body = bundle.encode(manifest, pack(manifest, moved, None), None, report=report)
    assert coordinator.acceptance.accept_update(
        assigned(coordinator, session).assignment_id, session.identity.device_id, body
    )
    coordinator.rounds.advance()
    assert all(coordinator.model().tensors[name].tobytes() == tensor.tobytes() for name, tensor in moved.items())


def test_a_device_that_comes_after_the_end_trains_its_gate_alone(coordinator):
    coordinator.play(*start(coordinator, rounds=2))
    late = coordinator.open_device("c", budget=0.4)
    (worked,) = coordinator.play(late)
    assert kinds(worked) == ["adapt"]
    assert [key for key in late.folder.own if key.startswith("gate:")]
    held = dict(zip(coordinator.model().tensors, np.split(late.folder.own["model"], _ends(coordinator)), strict=True))
    for name in coordinator.served.manifest("f").block_table.tensors:
        assert held[name].tobytes() == coordinator.model().tensors[name].tobytes()
    assert late.progress.model == coordinator.info().model_sha256
    assert late.progress.adapted
    (receipt,) = coordinator.receipts("adapt")
    assert receipt.personal["loss"] > 0


def _ends(coordinator):
    return np.cumsum([spec.size for spec in coordinator.served.manifest("f").shared])[:-1]


def test_who_came_late_goes_on_in_a_federation_that_is_reopened(coordinator, rebuilt):
    first = start(coordinator, rounds=2, own={"touched_limit": 0.35})
    coordinator.play(*first)
    late = coordinator.open_device("c", budget=0.4)
    coordinator.play(late)
    rebuilt.clear()
    coordinator.reopen(rounds=4)
    worked = coordinator.play(*first, late)
    assert kinds(worked[2]) == ["train"] * 2 + ["evaluate"]
    assert all(agrees(pair) for pair in rebuilt)
    assert all(isinstance(job.received.mask, BlockMask) for job, *_ in rebuilt)


def test_the_gate_is_on_no_wire_and_no_global_model_is_given_away(coordinator):
    sessions = start(coordinator, rounds=3, evaluation_interval=1)
    snapshots = []
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for session in sessions:
            if session.step().outcome is Outcome.worked:
                own = session.folder.own
                snapshots += [own[name].copy() for name in own if name.startswith("gate:") and own[name].size >= 8]
    for session in sessions:
        bodies = session.transport.received + session.transport.sent
        assert len(bodies) > 6
        for tensor in snapshots:
            flat = np.ascontiguousarray(tensor).reshape(-1)
            assert not any(flat[:8].tobytes() in body for body in bodies if np.any(flat[:8] != flat[0]))
        assert not any(word in body for body in bodies for word in (b"gate:", b"batch_norm", b"running_mean"))
    for get in (coordinator.served.model, coordinator.served.model_onnx):
        with pytest.raises(CoordinatorError, match="has no complete global model"):
            get("f")


def test_the_same_seed_gives_the_same_federation(coordinator, new_coordinator):
    one, other, third = coordinator, new_coordinator(), new_coordinator()
    for each, seed in ((one, 0), (other, 0), (third, 1)):
        each.play(*start(each, names="a", rounds=2, seed=seed))
    assert one.info().model_sha256 == other.info().model_sha256 != third.info().model_sha256


def test_a_restarted_coordinator_knows_what_changed(coordinator, clock):
    sessions = start(coordinator, rounds=4)
    for _ in range(2):
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    coordinator.rounds.advance()
    before, changed = assigned(coordinator, sessions[0]).payload, coordinator.model().own["changed"]
    coordinator.store.close()
    folders = coordinator.folders
    CoordinatorWithDevices.__init__(coordinator, coordinator.folder, clock)
    coordinator.folders = folders
    assert assigned(coordinator, sessions[0]).payload == before
    assert coordinator.model().own["changed"].tolist() == changed.tolist()


def test_adapting_and_judging_are_sent_values():
    assert all(sends_values(PFEDGATE, kind, holds) for kind in Kind for holds in (True, False))
