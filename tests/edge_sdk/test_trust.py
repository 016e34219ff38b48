"""A device holds its federation to the signed terms, whatever the coordinator says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from edge_sdk import publish
from edge_sdk.device.demands import Demands
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.device.trust import accept
from edge_sdk.errors import BadArgument, WrongSettings
from edge_sdk.publishing import step
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks import Task
from edge_sdk.tasks.digits import load
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.main import main
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import FederationInfo
from sparrow.protocol.publication import Terms
from sparrow.protocol.ranges import read_ranges
from sparrow.protocol.signatures import BadPublication, Publication
from sparrow.simulation import in_process
from sparrow.transport import httpx

from .hostile import Lying, changed

SETTINGS = {
    "method": "fedavg",
    "rounds": 3,
    "cohort": 1,
    "min_devices": 1,
    "local_epochs": 1,
    "evaluation_interval": 0,
    "early_stopping": "off",
}
AUTHOR = Publisher(bytes(range(32)))
OTHER = Publisher(bytes(range(1, 33)))


@pytest.fixture
def coordinator(tmp_path):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.05))
    with in_process.running(app) as client:
        yield client


def published(client, publisher=AUTHOR, name="f", **settings):
    task, allow = settings.pop("task", "digits"), settings.pop("allow", ())
    return publish.publish(
        in_process.ADDRESS,
        name,
        task,
        client=client,
        options=publish.PublishOptions(publisher=publisher, allow=allow),
        **{**SETTINGS, **settings},
    )


class Joining:
    """Opens sessions of one device, whose state stays, through a coordinator that may lie."""

    def __init__(self, client, path):
        self.lying = Lying(client)
        self.path = path
        self.folder = None

    def __call__(self, **demands):
        self.leave()
        self.folder = StateFolder(self.path)
        return Session(
            Transport(httpx.Client(base_url=in_process.ADDRESS, transport=self.lying), sleep=lambda seconds: None),
            self.folder,
            federation="f",
            name="pi",
            make_task=lambda info, manifest: load("index=0,of=20", device="pi", seed=0, batch_size=16),
            options=SessionOptions(engine="torch", demands=Demands(**demands)),
        )

    def leave(self):
        if self.folder is not None:
            self.folder.close()
            self.folder = None

    def trust(self, publisher):
        self.leave()
        folder = StateFolder(self.path)
        accept(folder, publisher)
        folder.close()


@pytest.fixture
def join(coordinator, tmp_path):
    joining = Joining(coordinator, tmp_path / "pi")
    yield joining
    joining.leave()


def worked(session):
    """Take steps until there was work; return that step."""
    while (step := session.step(wait_seconds=5)).outcome is Outcome.idle:
        pass
    return step


def with_settings(**values):
    return changed(settings=lambda settings: {**settings, **values})


def settings_of(client):
    return FederationInfo.model_validate(client.get("/v1/federations/f").json()).settings


def published_as(publication, manifest=None):
    """Return an answer with another publication."""
    said = {"publication": json.loads(publication.model_dump_json()), "manifest": manifest}
    return lambda answer: httpx.Response(200, json=said)


def signed_by(publisher, client, **changes):
    """Return the terms of the federation, signed by somebody, with other values."""
    known = Publication.model_validate(client.get("/v1/federations/f/publication").json()["publication"])
    return publisher.sign(Terms.of(known).model_copy(update=changes))


def swap(join, publication):
    """Have the coordinator show another publication from now on."""
    join.lying.answers["/publication"] = published_as(publication)
    join.lying.answers["/v1/federations/f"] = changed(publisher=publication.publisher, publication=publication.digest)


# --- the publisher ----------------------------------------------------------------------------------------------------


def test_a_signed_federation_is_joined_with_one_line_that_names_the_publisher(coordinator, join):
    assert published(coordinator).publisher == AUTHOR.public
    session = join()
    assert session.trust.line == f"the model of f is signed by {AUTHOR.fingerprint} (remembered for this federation)"
    assert worked(session).failed is None


def test_a_known_publication_is_not_fetched_again(coordinator, join):
    published(coordinator)
    join()
    join()
    assert len(join.lying.sent("GET", "/publication")) == 1


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("statement", lambda text: text.replace('"edition":1', '"edition":2')),
        ("signature", lambda text: f"{int(text[0], 16) ^ 1:x}{text[1:]}"),
        ("publisher", lambda text: OTHER.public),
    ],
)
def test_a_publication_that_was_changed_is_refused(coordinator, join, name, spoilt):
    published(coordinator)
    join.lying.answers["/publication"] = changed(publication=lambda old: {**old, name: spoilt(old[name])})
    with pytest.raises(BadPublication, match="signature"):
        join()


def test_terms_that_are_signed_for_something_else_are_refused(coordinator, join):
    published(coordinator)
    graphs = load_builtin("mnist").manifest.graphs
    for changes, why in (
        ({"federation": "g"}, "is for the federation g, not for f"),
        ({"manifest": load_builtin("mnist").manifest.digest}, "the manifest of f is not the one"),
        ({"graphs": graphs}, "of f is not the one that its publisher signed"),
    ):
        swap(join, signed_by(AUTHOR, coordinator, **changes))
        with pytest.raises(BadPublication, match=why):
            join()


def test_a_manifest_that_sends_more_than_was_published_is_refused(coordinator, join):
    """A coordinator may keep a part on devices, and never take one off them."""
    published(coordinator, method="fedper")
    session = join()
    private = {spec.name for spec in session.manifest.tensors if spec.policy == "personal"}
    assert private
    answer = json.loads(coordinator.get("/v1/federations/f/publication").content)
    assert answer["manifest"] is not None
    shown = json.loads(answer["manifest"])
    for spec in shown["tensors"]:
        spec["policy"] = "personal" if spec["name"] == "0.weight" else spec["policy"]
    kept = Publication.model_validate(answer["publication"])
    from sparrow.protocol.manifest import Manifest

    other = Manifest.model_validate(shown)
    swap(join, signed_by(AUTHOR, coordinator, manifest=other.digest, edition=2))
    join.lying.answers["/publication"] = published_as(
        signed_by(AUTHOR, coordinator, manifest=other.digest, edition=2), other.text
    )
    if "0.weight" in {spec["name"] for spec in shown["tensors"]}:
        with pytest.raises(BadPublication, match=r"0\.weight\b"):
            join()
    assert kept.publisher == AUTHOR.public


def test_another_publisher_is_refused_until_the_owner_accepts_it(coordinator, join):
    published(coordinator)
    join()
    swap(join, signed_by(OTHER, coordinator))
    with pytest.raises(BadPublication, match=f"another publisher.* sparrow trust {OTHER.fingerprint}"):
        join()
    join.trust(OTHER.fingerprint)
    assert OTHER.fingerprint in join().trust.line
    swap(join, signed_by(AUTHOR, coordinator))
    with pytest.raises(BadPublication, match="signed by another publisher"):
        join()


def test_a_signature_that_vanishes_is_refused(coordinator, join):
    published(coordinator)
    join()
    join.lying.answers["/v1/federations/f"] = changed(publisher=None, publication=None)
    with pytest.raises(BadPublication, match="and is no longer signed"):
        join()


def test_a_pinned_publisher_is_the_only_one(coordinator, join):
    published(coordinator)
    with pytest.raises(BadPublication, match=r"accepts only .* \(--publisher\)"):
        join(publisher=OTHER.fingerprint)
    assert "(pinned)" in join(publisher=AUTHOR.fingerprint.replace("-", "")).trust.line
    join.lying.answers["/v1/federations/f"] = changed(publisher=None, publication=None)
    with pytest.raises(BadPublication, match="not signed"):
        join(publisher=AUTHOR.fingerprint)


def test_a_federation_made_without_a_key_is_known_by_its_digest(coordinator, join):
    body = {"name": "f", "task": "digits", "settings": SETTINGS}
    assert coordinator.post("/v1/federations", json=body).json()["publisher"] is None
    session = join()
    assert session.trust.line == "the model of f is built in, known by its digest"
    assert worked(session).failed is None


# --- replacements -----------------------------------------------------------------------------------------------------


def test_the_same_publishers_replacement_is_logged_and_an_older_one_refused(coordinator, join, caplog):
    published(coordinator)
    first = signed_by(AUTHOR, coordinator)
    join()
    swap(join, signed_by(AUTHOR, coordinator, edition=2))
    join()
    assert "f: edition 2" in caplog.text
    swap(join, first)
    with pytest.raises(BadPublication, match=r"edition 2 .*\b1\b"):
        join()


def test_a_pinned_model_is_not_replaced(coordinator, join):
    published(coordinator)
    join(pin_model=True)
    graphs = {**load_builtin("digits").manifest.graphs, "preparation": 64 * "a"}
    swap(join, signed_by(AUTHOR, coordinator, edition=2, graphs=graphs))
    with pytest.raises(BadPublication, match="--pin-model"):
        join(pin_model=True)
    assert join() is not None


# --- settings of rounds -----------------------------------------------------------------------------------------------

OUTSIDE = {
    "learning_rate": 50.0,
    "local_steps": 1,
    "batch_size": 1,
    "precision": "fp16",
    "seed": 1,
    "momentum": 0.9,
    "draws": "seed",
    "finetune_epochs": 3,
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "made on the page"])
def test_work_outside_of_what_was_signed_or_first_met_is_handed_back(coordinator, join, name, signed):
    if signed:
        published(coordinator)
    else:
        coordinator.post("/v1/federations", json={"name": "f", "task": "digits", "settings": SETTINGS})
    session = join()
    join.lying.answers["/assignment"] = with_settings(**{name: OUTSIDE[name]})
    failed = worked(session).failed
    assert name in failed
    assert ("did not sign" if signed else "changed settings since this device joined") in failed
    assert join.lying.sent("DELETE", "")
    assert not join.lying.sent("PUT", "/update")
    del join.lying.answers["/assignment"]
    assert worked(session).failed is None


def test_the_author_chooses_ranges_and_the_coordinator_keeps_to_them(coordinator, join):
    published(coordinator, cohort=10, allow=["cohort>=10", "local_epochs>=1"])
    refused = coordinator.patch("/v1/federations/f", json={"cohort": 5})
    assert refused.status_code == 422
    assert "cohort is 5, allowed is cohort>=10" in refused.json()["detail"]
    assert coordinator.patch("/v1/federations/f", json={"cohort": 12}).status_code == 200
    session = join()
    join.lying.answers["/assignment"] = with_settings(cohort=9)
    assert "cohort is 9, allowed is cohort>=10" in worked(session).failed


def test_too_few_local_steps_are_refused(coordinator, join):
    published(coordinator, allow=["local_steps>=1000"])
    assert "at least 1000 are required" in worked(join()).failed


def test_the_owner_demands_more_than_the_author(coordinator, join):
    published(coordinator)
    with pytest.raises(BadPublication, match=r"cohort is 1\b.*cohort>=10.*--require"):
        join(ranges=read_ranges(["cohort>=10"]))


def test_first_weights_that_were_not_published_are_refused(coordinator, join):
    """The coordinator shows terms of other first weights, as if it had sent others than it was given."""
    published(coordinator)
    known = Terms.of(Publication.model_validate(coordinator.get("/v1/federations/f/publication").json()["publication"]))
    name = next(iter(known.weights))
    swap(join, signed_by(AUTHOR, coordinator, weights={**known.weights, name: 64 * "0"}))
    failed = worked(join()).failed
    assert f"{name}: its first values are not those that the publisher signed" in failed
    assert not join.lying.sent("PUT", "/update")


# --- what a coordinator and a publisher are told ----------------------------------------------------------------------


def test_settings_outside_of_their_own_ranges_are_refused_before_anything_is_sent(coordinator):
    with pytest.raises(BadArgument, match=r"allow: .*cohort is 1\b.*cohort>=10"):
        published(coordinator, allow=["cohort>=10"])
    with pytest.raises(BadArgument, match="allow: 'rounds>=3': rounds has no range"):
        published(coordinator, allow=["rounds>=3"])
    assert coordinator.get("/v1/federations/f").status_code == 404


def test_a_publication_that_devices_would_refuse_is_refused_at_once(coordinator):
    published(coordinator)
    settings = settings_of(coordinator).model_dump(mode="json")
    for changes, why in (
        ({}, "signed for the federation f, not for g"),
        ({"federation": "g", "manifest": 64 * "a"}, "signed for another manifest"),
        ({"federation": "g", "graphs": {}}, "differs from the signed one"),
        ({"federation": "g", "settings": read_ranges(["cohort>=10"])}, "cohort is 1, allowed is cohort>=10"),
    ):
        publication = json.loads(signed_by(AUTHOR, coordinator, **changes).model_dump_json())
        body = {"name": "g", "task": "digits", "settings": settings, "publication": publication}
        answer = coordinator.post("/v1/federations", json=body)
        assert (answer.status_code, why in answer.json()["detail"]) == (422, True), answer.json()


def test_own_settings_of_a_method_are_signed_as_the_coordinator_completes_them(coordinator):
    published(coordinator, method="fedprox")
    known = Terms.of(Publication.model_validate(coordinator.get("/v1/federations/f/publication").json()["publication"]))
    assert known.settings["method_settings.proximal_weight"].only is not None
    with pytest.raises(WrongSettings, match="proximal_weight"):
        published(coordinator, name="g", method="fedprox", method_settings={"proximal_weight": "much"})


# --- secure stays secure ----------------------------------------------------------------------------------------------


def test_a_federation_that_was_secure_stays_so(coordinator, join):
    wide = {"allow": ["secure=true,false", "secure_metrics=true,false"], "cohort": 8, "min_devices": 8}
    published(coordinator, secure=True, **wide)
    session = join()
    join.lying.answers["/v1/federations/f"] = with_settings(secure=False, secure_metrics=None)
    with pytest.raises(BadPublication, match="secure=false"):
        join()
    assert session.trust.admitted.accepted.secure


# --- the key ----------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "config" / "publisher.key"
    made = Publisher.load(path)
    assert Publisher.load(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.key.hex() not in repr(made)


def test_a_file_that_holds_no_key_is_left_alone(tmp_path):
    path = tmp_path / "publisher.key"
    path.write_text("not a key")
    with pytest.raises(BadArgument, match="is not a publisher's key"):
        Publisher.load(path)
    assert path.read_text() == "not a key"
    with pytest.raises(BadArgument, match="SPARROW_PUBLISHER_KEY"):
        Publisher.load(path / "below")


# --- a training step that is not what it says -------------------------------------------------------------------------


def forged(graph):
    """Return a training step whose gradient of one weight is something else."""
    model = onnx.load_from_string(graph)
    name = next(each.name for each in model.graph.output if each.name.startswith("grad:") and "weight" in each.name)
    for node in model.graph.node:
        node.output[:] = ["true gradient" if output == name else output for output in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(3.0), "three"))
    model.graph.node.append(helper.make_node("Mul", ["true gradient", "three"], [name]))
    return model.SerializeToString()


def with_forged_step(graphs):
    return replace(graphs, step=forged(graphs.step))


@pytest.mark.integration
@pytest.mark.parametrize("lies", [False, True])
def test_a_step_whose_gradients_are_not_its_losss_is_handed_back(coordinator, compiling, tmp_path, monkeypatch, lies):
    compiled = step.compile_step
    if lies:
        monkeypatch.setattr(step, "compile_step", lambda *given: with_forged_step(compiled(*given)))
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    batches = [(inputs, (inputs.sum(1) > 0).long())]
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    task = Task("own", model, torch.nn.CrossEntropyLoss(), batches, batches)
    published(coordinator, task=task)
    lying = Lying(coordinator)
    folder = StateFolder(tmp_path / "pi")
    session = Session(
        Transport(httpx.Client(base_url=in_process.ADDRESS, transport=lying), sleep=lambda seconds: None),
        folder,
        federation="f",
        name="pi",
        make_task=lambda info, manifest: task,
        options=SessionOptions(engine="onnx"),
    )
    try:
        failed = worked(session).failed
    finally:
        folder.close()
    if not lies:
        assert failed is None
        return
    assert "weight that do not match its loss" in failed
    assert not lying.sent("PUT", "/update")
    (returned,) = (body for method, _, body in lying.calls if method == "DELETE")
    assert json.loads(returned) == {"reason": "bad-work/implausible"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_accepts_another_publisher(coordinator, join, capsys):
    published(coordinator)
    join()
    join.leave()
    where = ["--federation", "f", "--device-name", "pi", "--state-dir", str(join.path)]
    assert main(["trust", OTHER.fingerprint, *where]) == 0
    assert f"pi accepts the publisher {OTHER.fingerprint} in f; before: {AUTHOR.fingerprint}" in capsys.readouterr().out
    swap(join, signed_by(OTHER, coordinator))
    assert OTHER.fingerprint in join().trust.line


def test_the_command_says_what_is_no_fingerprint_or_not_there(tmp_path, capsys):
    assert main(["trust", "nobody", "--state-dir", str(tmp_path)]) == 2
    assert "'nobody' is not a fingerprint" in capsys.readouterr().err
    assert main(["trust", OTHER.fingerprint, "--state-dir", str(tmp_path / "none")]) == 2
    assert "no device has joined default there" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    assert main(["trust", OTHER.fingerprint, "--state-dir", str(tmp_path / "new")]) == 1
    assert f"join with --publisher {OTHER.fingerprint}" in capsys.readouterr().err
