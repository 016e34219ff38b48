"""What a method keeps private never leaves a device: FedPer, LG-FedAvg, FedRep, Ditto and APFL in whole federations."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from edge_sdk.device.exporting import export_personal
from edge_sdk.device.session import Outcome
from sparrow.coordinator.errors import BadContent, CoordinatorError
from sparrow.coordinator.methods import Situation, load_method, why_mean_only, why_not_buffered, why_not_private
from sparrow.export.source import Source
from sparrow.protocol import bundle
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.settings import FederationSettings

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
HEAD = {"out.weight", "out.bias"}
LINEAR = {"fc1.weight", "fc1.bias", *HEAD}
SHARED = {
    "fedper": {spec.name for spec in DIGITS.shared} - HEAD,
    "fedrep": {spec.name for spec in DIGITS.shared} - HEAD,
    "lgfedavg": LINEAR,
}


def kinds(assignments):
    return [assignment.kind.value for assignment in assignments]


def linear(*names):
    tensors = tuple(
        TensorSpec(name=f"{name}.{part}", shape=shape)
        for name in names
        for part, shape in (("weight", (2, 2)), ("bias", (2,)))
    )
    layers = tuple(Layer(name=n, kind="linear", tensors=(f"{n}.weight", f"{n}.bias")) for n in names)
    return Manifest(task="t", input_shape=(2,), output_shape=(2,), tensors=tensors, layers=layers)


@pytest.mark.parametrize("method", list(SHARED))
def test_what_is_private_is_personal_in_the_manifest(coordinator, method):
    coordinator.create(method)
    manifest = coordinator.served.manifest("f")
    assert {spec.name for spec in manifest.shared} == SHARED[method]
    assert {spec.name: spec.model_dump(exclude={"policy"}) for spec in manifest.tensors} == {
        spec.name: spec.model_dump(exclude={"policy"}) for spec in DIGITS.tensors
    }
    assert set(coordinator.model().tensors) == SHARED[method]
    start = initial_values(DIGITS, coordinator.info().settings.seed)
    for name, tensor in coordinator.model().tensors.items():
        assert tensor.tobytes() == start[name].tobytes()


@pytest.mark.parametrize(
    ("method", "names", "private"),
    [
        ("fedper", "abc", {"c.weight", "c.bias"}),
        ("fedrep", "ab", {"b.weight", "b.bias"}),
        ("lgfedavg", "abc", {"a.weight", "a.bias"}),
        ("lgfedavg", "ab", {"a.weight", "a.bias"}),
    ],
)
def test_a_network_of_linear_layers_alone(method, names, private):
    manifest = load_method(method).manifest(linear(*names), FederationSettings())
    assert {spec.name for spec in manifest.tensors if spec.policy == "personal"} == private


@pytest.mark.parametrize("method", list(SHARED))
@pytest.mark.parametrize("names", ["", "a"])
def test_a_model_that_cannot_be_cut_is_refused(method, names):
    model = linear(*names) if names else linear("a").model_copy(update={"layers": ()})
    with pytest.raises(BadContent, match="linear layer"):
        load_method(method).manifest(model, FederationSettings())


def values_on_the_wire(session, manifest):
    """Every value that came or went, of payloads and of updates that are bundles."""
    wire = session.transport
    bodies = [
        *wire.received,
        *(body for body, kind in zip(wire.sent, wire.media_types, strict=True) if kind == bundle.MEDIA_TYPE),
    ]
    return [bundle.decode(body, manifest).values for body in bodies], wire.received + wire.sent


def occurs(tensor, bodies):
    """Whether eight values in a row of a tensor occur in any body, as float32."""
    flat = np.ascontiguousarray(tensor).reshape(-1)[:8].tobytes()
    return any(flat in body for body in bodies)


@pytest.mark.parametrize("method", list(SHARED))
def test_private_values_are_on_no_wire(coordinator, method):
    coordinator.create(method, evaluation_interval=1, rounds=2, min_devices=2)
    sessions = [coordinator.open_device(name) for name in "ab"]
    manifest, snapshots = coordinator.served.manifest("f"), []
    private = [spec.name for spec in manifest.tensors if spec.name not in SHARED[method] and spec.size >= 8]
    assert private
    initial = initial_values(DIGITS, 0)
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for session in sessions:
            if session.step().outcome is Outcome.worked and session.personal is not None:
                snapshots.append({name: np.array(session.personal[name]) for name in private if name in initial})
    for session in sessions:
        values, bodies = values_on_the_wire(session, manifest)
        assert len(values) == 4, "two rounds, down and up; evaluations need nothing"
        assert {each.size for each in values} == {sum(initial[name].size for name in SHARED[method])}
        for name in private:
            assert not any(occurs(each[name], bodies) for each in snapshots if name in each and each[name].any())
        assert all(name.encode() not in body for body in bodies for name in private)
    shared = max(SHARED[method], key=lambda name: initial[name].size)
    assert occurs(initial[shared], sessions[0].transport.received), "so that it would be found"
    assert not np.array_equal(sessions[0].personal[private[0]], sessions[1].personal[private[0]])
    for get in (coordinator.served.model, coordinator.served.model_onnx):
        with pytest.raises(CoordinatorError):
            get("f")


@pytest.mark.parametrize("method", list(SHARED))
def test_a_late_device_makes_a_model_of_its_own_that_can_be_exported(coordinator, tmp_path, method):
    coordinator.create(method, rounds=2, finetune_epochs=1)
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    late = coordinator.open_device("c")
    assert [kinds(each) for each in coordinator.play(late)] == [["adapt"]]
    for name, _ in late.task.model.named_parameters():  # statistics are counted where its own part is trained
        if name in SHARED[method]:
            assert late.personal[name].tobytes() == coordinator.model().tensors[name].tobytes()
    source = Source(late.manifest, coordinator.served.graph("f", "skeleton"), late.personal)
    exported = export_personal(tmp_path / "c.onnx", source, late.engine, late.task)
    graph = onnx.load(str(exported.path))
    filled = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    assert filled["out.weight"].tobytes() == late.personal["out.weight"].tobytes()


@pytest.mark.parametrize("method", ["fedper", "lgfedavg"])
def test_a_first_round_that_fails_leaves_no_weights_in_the_part_of_ones_own(coordinator, caplog, method):
    """The next one begins as if nothing had been."""
    coordinator.create(method, rounds=1, learning_rate=100.0, min_devices=1)
    session = coordinator.open_device("a")
    usual = session.task.loss
    session.task = dataclasses.replace(session.task, loss=lambda outputs, targets: 1e33 * usual(outputs, targets))
    before = {name: tensor.detach().numpy().copy() for name, tensor in session.task.model.named_parameters()}
    coordinator.rounds.advance()
    session.step()
    assert "the learning rate of 100: lower it" in caplog.text
    assert session.personal is None
    shared = set(coordinator.model().tensors)
    for name, tensor in session.task.model.named_parameters():
        if name not in shared:
            assert tensor.detach().numpy().copy().tobytes() == before[name].tobytes()


# --- LG-FedAvg from FedAvg's model -----------------------------------------------------------------------------------

FROM_FEDAVG = {"method_settings": {"fedavg_share": 0.5}, "rounds": 4}
BODY = sorted({spec.name for spec in DIGITS.shared} - LINEAR)


def test_lgfedavg_begins_with_fedavgs_model_and_then_shares_the_head_alone(coordinator, new_coordinator):
    coordinator.create("lgfedavg", **FROM_FEDAVG)
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train"] * 4 + ["evaluate"]] * 2
    other = new_coordinator()
    other.create("fedavg", rounds=2)
    other.play(other.open_device("a"), other.open_device("b"))
    fedavg, own = other.model().tensors, coordinator.model().tensors
    for name in BODY:
        assert own[name].tobytes() == fedavg[name].tobytes(), "FedAvg's, and kept"
        values = [session.personal[name].tobytes() for session in sessions]
        assert len({*values, own[name].tobytes()}) == 3, "each device has trained its own"
    assert all(own[name].tobytes() != fedavg[name].tobytes() for name in LINEAR)

    manifest = coordinator.served.manifest("f")
    whole = manifest.shared_values
    head = sum(spec.size for spec in DIGITS.shared if spec.name in LINEAR or not spec.trainable)
    for session in sessions:
        wire = session.transport
        assert [bundle.decode(body, manifest).values.size for body in wire.received] == [whole, whole, whole, head]
        assert [bundle.decode(body, manifest).values.size for body in wire.sent[:4]] == [whole, whole, head, head]
        own = {name: session.personal[name] for name in BODY if session.personal[name].size >= 8}
        assert not any(occurs(tensor, wire.sent) for tensor in own.values()), "nor the body's running statistics"
    private = sum(spec.size for spec in DIGITS.shared if spec.name in BODY and spec.trainable)
    assert [each.counts.get("private_values", 0) for each in coordinator.records.rounds("f")] == [
        0,
        0,
        2 * private,
        2 * private,
    ]


def test_a_late_device_of_lgfedavg_starts_with_fedavgs_body(coordinator):
    coordinator.create("lgfedavg", **FROM_FEDAVG, cohort=2)
    first = [coordinator.open_device(name) for name in "ab"]
    while coordinator.info().round < 3:
        coordinator.rounds.advance()
        for session in first:
            session.step()
    kept = {name: tensor.copy() for name, tensor in coordinator.model().tensors.items()}
    coordinator.play(*first)
    late = coordinator.open_device("c")
    assert [kinds(each) for each in coordinator.play(late)] == [["adapt"]]
    after = coordinator.model().tensors
    assert all(after[name].tobytes() == kept[name].tobytes() for name in BODY)
    trainable = {spec.name for spec in DIGITS.shared if spec.trainable}
    for name in trainable:
        assert (late.personal[name].tobytes() == after[name].tobytes()) == (name in LINEAR)


def test_a_body_that_is_sent_all_the_same_changes_nothing():
    """By a device that does not know that the parts are apart, or does not care."""
    method = load_method("lgfedavg")
    settings = FederationSettings(method="lgfedavg", **FROM_FEDAVG)
    manifest = method.manifest(DIGITS, settings)
    for number, moved in ((2, set(BODY) | LINEAR), (3, LINEAR)):
        plan = method.schedule.work(Situation(manifest, settings, number)).plan
        situation = Situation(manifest, settings, number, plan)
        model = method.start(initial_values(manifest, 0), situation)
        sums = method.aggregation.sums(model, situation)
        sums.fold_in_place(np.full(manifest.shared_values, 7, np.float32), None, 10)
        closed = method.aggregation.close(model, sums, situation).tensors
        assert {name for name in closed if (closed[name] == 7).all()} == moved
        assert all(closed[name].tobytes() == model.tensors[name].tobytes() for name in closed.keys() - moved)
    mask = BlockMask(np.ones(len(manifest.blocks), bool))
    with pytest.raises(BadContent, match=r"\bbody\b.*\bhead\b"):
        method.masks.check(model, mask, situation)
    with pytest.raises(BadContent, match="mask: it differs from the round's"):
        method.masks.check(model, mask, Situation(manifest, settings, 1))


def test_options_for_means_are_refused_with_a_fedavg_share():
    method = load_method("lgfedavg")
    for share, refused in ((0.0, False), (0.5, True)):
        settings = FederationSettings(method="lgfedavg", method_settings={"fedavg_share": share})
        assert why_mean_only(method, settings) is None
        assert bool(why_not_private(method, settings)) == bool(why_not_buffered(method, settings)) == refused


# --- Ditto and APFL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_personal_models_stay_and_the_global_one_is_fedavgs(coordinator, new_coordinator, method):
    coordinator.create(method, rounds=3, min_devices=2, evaluation_interval=3)
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train"] * 3 + ["evaluate"]] * 2
    other = new_coordinator()
    other.create("fedavg", rounds=3, min_devices=2)
    other.play(other.open_device("a"), other.open_device("b"))
    if method == "ditto":
        assert coordinator.info().model_sha256 == other.info().model_sha256
    for name, tensor in other.model().tensors.items():
        np.testing.assert_allclose(coordinator.model().tensors[name], tensor, rtol=1e-3, atol=1e-4, err_msg=name)
    record = coordinator.records.rounds("f")[-1]
    assert record.loss_personal is not None
    assert record.loss_global is not None
    for session in sessions:
        _, bodies = values_on_the_wire(session, DIGITS)
        for kept in (session.personal, session.folder.own):
            assert not any(occurs(kept[name], bodies) for name in kept if name in ("fc1.weight", "out.weight"))
    late = coordinator.open_device("c")
    assert [kinds(each) for each in coordinator.play(late)] == [["adapt"]]
    assert late.personal.keys() == sessions[0].personal.keys()


@pytest.mark.parametrize(
    ("method", "own", "said"),
    [
        ("ditto", {"proximal_weight": -1}, "proximal_weight"),
        ("apfl", {"mixing_weight": 1.5}, "mixing_weight"),
        ("pfedme", {"proximal_weight": 0}, "proximal_weight"),
        ("pfedme", {"server_mixing": -1}, "server_mixing"),
        ("perfedavg", {"hessian": "exact"}, "hessian"),
        ("perfedavg", {"inner_rate": 0}, "inner_rate"),
        ("local", {"x": 1}, "takes no settings of its own"),
    ],
)
def test_settings_that_are_none_are_refused(coordinator, method, own, said):
    with pytest.raises(BadContent, match=said):
        coordinator.create(method, method_settings=own)
