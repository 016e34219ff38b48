"""The page accepts the publications that the SDK accepts, and refuses the same ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_sdk.publishing.signing import Publisher, terms_of
from sparrow.coordinator.web import runtime
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.publication import Terms, differs, digests_of
from sparrow.protocol.ranges import BINDING, OPERATORS, binding, read_ranges
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import BadPublication, Publication, check_signature

from . import vectors

pytestmark = pytest.mark.integration
needs_signatures = pytest.mark.skipif(
    not runtime.SIGNATURES.is_there(), reason="nothing that checks signatures for pages here: run sparrow web"
)

IMPORTED = """const [signatures, publications, ranges, { Manifest }, { Trust }, { Refused }] = await Promise.all(
  ["signatures", "publication", "ranges", "manifest", "trust", "errors"].map((name) => import(`/web/${name}.js`)));
const outcome = async (call) => {
  try { return (await call()) ?? null; } catch (error) { return `${error.constructor.name}: ${error.message}`; }
};"""


def page(modules, body, argument):
    """What a function gives in the browser. given: the argument."""
    return modules(f"async (_, given) => {{ {IMPORTED}\n{body} }}", module="errors.js", argument=argument)


def as_sent(settings):
    """Settings as a page has read them: a seed that JavaScript's numbers do not reach is a text."""
    sent = settings.model_dump(mode="json")
    return {**sent, "seed": str(sent["seed"])} if sent["seed"] >= 10**15 else sent


# --- signatures ------------------------------------------------------------------------------------------------------


def tampered(publication):
    """A publication, and what is left of it after changes that its publisher has not made."""
    other = vectors.AUTHOR.sign(Terms.of(publication).model_copy(update={"edition": 9}))
    order = 2**252 + 27742317777372353535851937790883648493
    raw = bytes.fromhex(publication.signature)
    larger = int.from_bytes(raw[32:], "little") + order
    yield publication
    yield publication.model_copy(update={"statement": publication.statement.replace("ward-3", "ward-4")})
    yield publication.model_copy(update={"statement": publication.statement + " "})
    yield publication.model_copy(update={"signature": other.signature})
    yield publication.model_copy(update={"signature": "0" * 128})
    yield publication.model_copy(update={"signature": raw[:32].hex() + larger.to_bytes(32, "little").hex()})
    yield publication.model_copy(update={"publisher": Publisher(bytes(32)).public})
    yield publication.model_copy(update={"publisher": "ff" * 32})
    # The neutral element as key and as R, with s = 0: it verifies for every text where small orders are allowed.
    yield publication.model_copy(update={"publisher": "01" + "00" * 31, "signature": "01" + "00" * 63})


def accepted(publication):
    try:
        check_signature(publication)
    except BadPublication:
        return False
    return True


@needs_signatures
def test_signatures(modules):
    said = [Publication.model_validate(each) for each in vectors.read()["publications"]]
    given = [each for publication in said for each in tampered(publication)]
    found = page(
        modules,
        "return Promise.all(given.map((each) => outcome(() => signatures.checkSignature(each))));",
        [each.model_dump() for each in given],
    )
    good = [each is None for each in found]
    wanted = [each in said for each in given]
    assert good == wanted
    *usual, _ = [accepted(each) for each in tampered(said[0])]
    assert usual == wanted[: len(usual)], "as the SDK"
    assert {each.partition(":")[0] for each in found if each} == {"BadPublication"}


def test_digests_and_fingerprints(modules):
    found = page(
        modules,
        """return given.map(({ statement, publisher, signature, fingerprint }) => ({
          statement, publisher, signature, digest: signatures.digestOf({ statement }),
          fingerprint: signatures.fingerprint(publisher),
          same: signatures.grouped(fingerprint.replaceAll("-", "").toUpperCase()) === fingerprint,
          is: ["", "x".repeat(32), fingerprint.slice(1), fingerprint].map(signatures.isFingerprint),
        }));""",
        vectors.read()["publications"],
    )
    wanted = [{**each, "same": True, "is": [False, False, False, True]} for each in vectors.read()["publications"]]
    assert found == wanted


# --- terms, ranges and settings --------------------------------------------------------------------------------------


def signed_ranges(texts):
    """The statement of an author who has signed ranges."""
    terms = Terms(federation="f", task="t", manifest="ab" * 32, settings=read_ranges(texts))
    return terms.model_dump_json(exclude_none=True)


def test_ranges(modules):
    said = vectors.read()["ranges"]
    found = page(
        modules,
        """return given.map(([statement, settings]) =>
          ranges.faults(publications.termsOf(statement).settings, settings));""",
        [[signed_ranges(each["ranges"]), as_sent(FederationSettings(**each["changes"]))] for each in said],
    )
    assert found == [each["faults"] for each in said]


def test_binding_settings(modules):
    every = [
        FederationSettings(),
        FederationSettings(secure=True, clip=0.5, method_settings={"b": 1.5, "a": True}),
        FederationSettings(secure=True, secure_metrics=False),
    ]
    found = page(
        modules,
        "return [ranges.BINDING, ranges.OPERATORS, given.map((each) => Object.fromEntries(ranges.binding(each)))];",
        [as_sent(each) for each in every],
    )
    assert found == [list(BINDING), list(OPERATORS), [binding(each) for each in every]]


def test_settings_of_other_types_lie_in_no_range(modules):
    """What JavaScript would compare as a number although it is none."""
    found = page(
        modules,
        """const allowed = publications.termsOf(given).settings;
        const odd = ["10", [10], { valueOf: 10 }, true, null, NaN];
        return odd.map((cohort) => ranges.faults(allowed, { cohort }).length);""",
        signed_ranges(["cohort>=1"]),
    )
    assert found == [1] * 6


def test_terms_that_cannot_be_read_are_refused(modules):
    said = json.loads(signed_ranges(["cohort>=1"]))
    changes = [
        {"version": 2},
        {"forbids": "something"},
        {"edition": 0},
        {"manifest": "ab"},
        {"graphs": {"gradient": "ab" * 32}},
        {"weights": {"fc": 7}},
        {"settings": {"cohort": {"least": 1, "only": [2]}}},
        {"settings": {"cohort": {}}},
        {"settings": {"cohort": {"least": 2, "most": 1}}},
        {"settings": {"cohort": {"least": 1, "unless": 3}}},
        {"settings": {"cohort": {"only": [[1]]}}},
    ]
    statements = ["", "null", "[]", *(json.dumps({**said, **change}) for change in changes)]
    for statement in statements:
        with pytest.raises(BadPublication):
            Terms.of(Publication(statement=statement, publisher="ab" * 32, signature="ab" * 64))
    found = page(
        modules,
        "return Promise.all(given.map((each) => outcome(() => publications.termsOf(each).edition)));",
        [*statements, json.dumps(said)],
    )
    assert {each.partition(":")[0] for each in found[:-1]} == {"BadPublication"}
    assert found[-1] == 1


# --- manifests -------------------------------------------------------------------------------------------------------


def variants(manifest):
    """A manifest, and what coordinators may and may not make of it."""
    first, *rest = manifest.tensors
    yield manifest
    yield manifest.model_copy(update={"tensors": (first.model_copy(update={"policy": "personal"}), *rest)})
    yield manifest.model_copy(update={"tensors": (first.model_copy(update={"trainable": False}), *rest)})
    yield manifest.model_copy(update={"tensors": (first.model_copy(update={"name": "other"}), *rest)})
    yield manifest.model_copy(update={"tensors": (*rest, first)})
    yield manifest.model_copy(update={"blocks": {first.name: (first.size,)}})
    yield manifest.model_copy(update={"step_sha256": "ab" * 32})
    yield manifest.model_copy(update={"frozen_sha256": "ab" * 32})
    yield manifest.model_copy(update={"preparation_sha256": "ab" * 32})
    yield manifest.model_copy(update={"task": "other"})
    yield manifest.model_copy(update={"coupling": False})
    yield manifest.model_copy(update={"aliases": {"a": first.name}})


def test_manifests_are_compared_as_by_the_sdk(modules):
    every = list(variants(vectors.EXAMPLE))
    pairs = [(one, other) for one in (every[0], every[1]) for other in every]
    found = page(
        modules,
        "return given.map((texts) => publications.differs(...texts.map((text) => JSON.parse(text))));",
        [[one.text, other.text] for one, other in pairs],
    )
    assert found == [differs(one, other) for one, other in pairs]
    assert len(set(found)) > 6


def test_first_weights(modules):
    task = load_builtin("digits")
    values = initial_values(task.manifest, 0)
    packed = pack(task.manifest, values, None)
    terms = Terms(federation="f", task="t", manifest="ab" * 32, weights=digests_of(values))
    (*_, last) = task.manifest.shared
    found = page(
        modules,
        """const [text, statement, numbers] = given, manifest = new Manifest(text);
        const terms = publications.termsOf(statement), values = Float32Array.from(numbers);
        const checked = () => outcome(() => publications.checkWeights(terms, manifest, values));
        const first = await checked();
        values[values.length - 1] += 1;
        return [first, await checked()];""",
        [task.manifest.text, terms.model_dump_json(exclude_none=True), packed.astype(np.float64).tolist()],
    )
    assert found[0] is None
    assert found[1].startswith(f"BadPublication: {last.name}: its first values")


# --- what a page accepts ---------------------------------------------------------------------------------------------

SIGNED = Manifest.model_validate(
    {**vectors.EXAMPLE.model_dump(), "step_sha256": "ab" * 32, "evaluation_sha256": "cd" * 32}
)
SETTINGS = FederationSettings(method="fedavg")

TRUSTING = """const entries = new Map();
const store = { get: async (key) => entries.get(key), put: async (all) => {
  for (const [key, value] of Object.entries(all)) entries.set(key, structuredClone(value));
} };
let fetched = 0;
const steps = [];
for (const { info, manifest, published, settings, pinned = null, local_steps: count } of given) {
  const trust = new Trust("ward-3", store, pinned);
  const fetch = async () => {
    fetched += 1;
    if (!published) throw new Refused(404, "NotFound", "none");
    return published;
  };
  steps.push([await outcome(async () => {
    await trust.admit(info, new Manifest(manifest), fetch);
    if (settings) trust.check(settings);
    if (count) trust.checkSteps(count);
    return trust.line;
  }), fetched]);
}
return steps;"""


def met(*, author=vectors.AUTHOR, ranges=(), edition=1, manifest=SIGNED, original=SIGNED, settings=SETTINGS, **more):
    """A federation as a page meets it."""
    signed = None
    if author is not None:
        terms = terms_of(
            "ward-3",
            original,
            SETTINGS,
            graphs=original.graphs,
            weights={},
            ranges=read_ranges(ranges),
            edition=edition,
        )
        signed = author.sign(terms)
    info = {
        "uid": "u",
        "method": settings.method,
        "publisher": author and author.public,
        "publication": signed and signed.digest,
        "published_bytes": 7,
        "settings": as_sent(settings),
    }
    text = None if manifest is original else original.text
    published = signed and {"publication": signed.model_dump(), "manifest": text}
    return {"info": info, "manifest": manifest.text, "published": published} | more


def trusting(modules, *meetings):
    """What a page says that meets a federation again and again, and how often it has fetched a publication."""
    return page(modules, TRUSTING, meetings)


LINE = f"signed by {vectors.AUTHOR.fingerprint}"
OTHER = Publisher(bytes([7]) * 32)


@needs_signatures
def test_the_first_publisher_is_remembered_and_another_one_refused(modules):
    first, again, other, named, gone = trusting(
        modules,
        met(),
        met(),
        met(author=OTHER),
        met(author=OTHER, pinned=OTHER.fingerprint),
        met(author=None),
    )
    assert first == [LINE, 1]
    assert again == [LINE, 1], "the same is not fetched again"
    assert "signed by another publisher" in other[0]
    assert OTHER.fingerprint in other[0]
    assert named == [f"signed by {OTHER.fingerprint}", 3], "a link names it"
    assert "is no longer signed" in gone[0]


@needs_signatures
def test_a_link_pins_a_publisher(modules):
    (wrong, _), (unsigned, _), (right, _) = trusting(
        modules,
        met(pinned=OTHER.fingerprint),
        met(author=None, pinned=OTHER.fingerprint),
        met(pinned=vectors.AUTHOR.fingerprint),
    )
    assert "the link names the publisher" in wrong
    assert "not signed" in unsigned
    assert right == LINE


@needs_signatures
def test_a_model_that_is_not_the_signed_one_is_refused(modules):
    first, *rest = SIGNED.tensors
    personal = SIGNED.model_copy(update={"tensors": (first.model_copy(update={"policy": "personal"}), *rest)})
    renamed = SIGNED.model_copy(update={"task": "other"})
    otherwise = SIGNED.model_copy(update={"step_sha256": "ef" * 32})
    missing = {**met(), "published": None}
    tampered = met()
    tampered["published"]["publication"]["statement"] += " "
    replaced = {**met(), "manifest": renamed.text}
    found = trusting(
        modules, met(manifest=personal), met(manifest=renamed), met(manifest=otherwise), missing, tampered, replaced
    )
    said = [each[0] for each in found]
    assert said[0] == LINE
    assert "task differs" in said[1]
    assert "step of ward-3" in said[2]
    assert "no publication" in said[3]
    assert "signature of the publication" in said[4]
    assert "the manifest of ward-3 is not the one" in said[5]


@needs_signatures
def test_an_edition_does_not_go_back(modules):
    found = trusting(modules, met(edition=2), met(edition=1), met(edition=3))
    assert found[0][0] == LINE
    assert "edition 2" in found[1][0]
    assert found[2][0] == LINE


@needs_signatures
def test_rounds_keep_to_the_signed_ranges(modules):
    ranges = ("local_steps>=5", "learning_rate<=0.5")

    def round_of(**changes):
        return met(ranges=ranges, settings=SETTINGS, **changes)

    def changed(**changes):
        return as_sent(SETTINGS.model_copy(update=changes))

    found = trusting(
        modules,
        round_of() | {"settings": changed(learning_rate=0.25)},
        round_of() | {"settings": changed(learning_rate=0.75)},
        round_of() | {"settings": changed(local_steps=4)},
        round_of() | {"settings": changed(local_epochs=1, batch_size=1)},
        round_of() | {"settings": changed(method="fedprox")},
        round_of() | {"settings": changed(secure=True)},
        round_of(local_steps=4),
        round_of(local_steps=5),
    )
    said = [each[0] for each in found]
    assert said[0] == LINE
    assert "did not sign this: learning_rate is 0.75, allowed is learning_rate<=0.5" in said[1]
    assert "local_steps is 4, allowed is local_steps>=5" in said[2]
    assert "batch_size is 1" in said[3], "what no range names keeps its value, or becomes more private"
    assert "fedprox" in said[4]
    assert "secure aggregation" in said[5]
    assert "4 local steps" in said[6]
    assert said[7] == LINE


def test_settings_that_nobody_signed_stay_as_they_were_first_met(modules):
    later = SETTINGS.model_copy(update={"learning_rate": 0.75})
    cohort = SETTINGS.model_copy(update={"cohort": 50})
    found = trusting(
        modules,
        met(author=None),
        met(author=None, settings=cohort),
        met(author=None, settings=later),
    )
    said = [each[0] for each in found]
    assert said[:2] == ["not signed", "not signed"], "a cohort is the operator's"
    assert "changed settings since this page was first opened: learning_rate is 0.75, was" in said[2]
