"""The page reads and writes what the SDK does, computes the same numbers, and refuses the same hostile bytes."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import struct

import numpy as np
import onnx
import pytest

from edge_sdk.engines.optimiser import Optimiser, Rule
from edge_sdk.methods.early_stopping import gives_way
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode, largest_payload
from sparrow.protocol.elements import from_bits
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronMask, active_count, count_values, merge_in_place, same_mask
from sparrow.protocol.messages import Evaluation

from ..sparrow.protocol import test_bundle as hostile
from . import vectors

pytestmark = pytest.mark.integration

HELP = """
const bytes = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
const floats = (hex) => new Float32Array(bytes(hex).buffer);
const unpacked = (base64) => Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
const hex = ({ buffer, byteOffset, byteLength }) =>
  Array.from(new Uint8Array(buffer, byteOffset, byteLength), (byte) => byte.toString(16).padStart(2, "0")).join("");
const maskOf = (listed) =>
  listed && new Map(Object.entries(listed).map(([group, index]) => [group, Int32Array.from(index)]));
const listed = (mask) => mask && Object.fromEntries([...mask].map(([group, index]) => [group, [...index]]));
const tensorsOf = (specs, value = (place) => place) =>
  new Map(specs.map(({ name, size }) => [name, Float32Array.from({ length: size }, (_, place) => value(place))]));
const { Manifest, ...manifests } = await import("/web/manifest.js");
const { sha256 } = await import("/web/sha256.js");
const digest = ({ buffer, byteOffset, byteLength }) => hex(sha256(new Uint8Array(buffer, byteOffset, byteLength)));
"""
"""What functions in the browser have at hand. hex, maskOf and listed are as in ``vectors``."""


def function(body):
    """A function of the imported module's names, ``found``, and the argument, ``given``."""
    return f"async (found, given) => {{ {HELP}\n{body} }}"


def texts():
    return {each["name"]: each["text"] for each in vectors.read()["manifests"]}


def encoded(data):
    return base64.b64encode(data).decode()


# --- the same numbers --------------------------------------------------------------------------------------------


def test_manifests(modules):
    found = modules(
        function("""return given.map(({ name, text, first }) => {
          const manifest = new Manifest(text), said = JSON.parse(text);
          for (const spec of said.tensors) if (spec.policy === "shared") spec.policy = "personal"; // what a page draws
          const own = new Manifest(JSON.stringify(said));
          const drawn = (seed) => [...found.ownInitialValues(own, seed, new Map())]
            .map(([name, values]) => [name, digest(values).slice(0, 32)]);
          return {
            name, text, digest: manifest.digest, values_digest: manifest.valuesDigest, values: manifest.sharedValues,
            first: Object.fromEntries(Object.keys(first).map((seed) => [seed, Object.fromEntries(drawn(seed))])),
          };
        });"""),
        module="manifest.js",
        argument=vectors.read()["manifests"],
    )
    assert found == vectors.read()["manifests"]


def test_drawn_neurons_and_the_places_of_their_values(modules):
    found = modules(
        function("""const [texts, draws] = given;
        const wholePlaces = (spec) => Int32Array.from({ length: spec.size }, (_, i) => i);
        return draws.map(({ name, key, ratio }) => {
          const manifest = new Manifest(texts[name]), mask = found.drawNeurons(manifest, { key, ratio });
          const all = new Int32Array(found.countValues(manifest, mask));
          found.eachBlock(manifest, mask, (spec, places, begin) => all.set(places ?? wholePlaces(spec), begin));
          const flags = found.neuronBits(manifest, mask), again = found.neuronsFromBits(manifest, flags);
          if (!found.sameMask(mask, again)) throw new Error("its bits give another mask");
          return { name, key, ratio, values: all.length, bits: digest(flags), places: digest(all) };
        });"""),
        module="masks.js",
        argument=[texts(), vectors.read()["draws"]],
    )
    assert found == vectors.read()["draws"]


def test_the_share_of_neurons_is_counted_alike(modules):
    shares = [(size, ratio / 100) for size in (1, 2, 3, 10, 64, 100, 2048) for ratio in range(1, 101)]
    found = modules(
        function("return given.map(([size, ratio]) => found.activeCount(size, ratio));"),
        module="masks.js",
        argument=shares,
    )
    assert found == [active_count(size, ratio) for size, ratio in shares]


def test_values_are_packed_and_merged_as_by_the_sdk(modules, small):
    """Every way in which a mask can cut: rows, columns, both, what a channel owns behind a flatten, and nothing."""
    masks = [
        None,
        *(
            NeuronMask({"conv": np.array(conv), "fc": np.array(fc)})
            for conv in ([1], [0, 1, 2])
            for fc in ([0, 5], [3])
        ),
    ]
    found = modules(
        function("""const [text, masks] = given, manifest = new Manifest(text);
        const tensors = tensorsOf(manifest.shared);
        return masks.map((listed) => {
          const mask = maskOf(listed), packed = found.pack(manifest, tensors, mask);
          const merged = tensorsOf(manifest.shared, () => -1);
          found.mergeInPlace(manifest, merged, packed, mask);
          return [[...packed], Object.fromEntries([...merged].map(([name, values]) => [name, [...values]]))];
        });"""),
        module="masks.js",
        argument=[small.text, [vectors.listed(mask) for mask in masks]],
    )
    for mask, (packed, merged) in zip(masks, found, strict=True):
        assert packed == vectors.places(small, mask).tolist()
        wanted = {spec.name: np.full(spec.shape, -1, np.float32) for spec in small.shared}
        merge_in_place(small, wanted, np.array(packed, np.float32), mask)
        assert merged == {name: values.ravel().tolist() for name, values in wanted.items()}


def test_rounding(modules):
    found = modules(
        function("""const [texts, roundings] = given, { pack } = await import("/web/masks.js");
        return roundings.map(({ name, mask, seed, steps }) => {
          const manifest = new Manifest(texts[name]);
          let owed = null;
          return { name, mask, seed, steps: steps.map(({ values, base }) => {
            const made = found.roundUpdate(manifest, maskOf(mask), floats(values), floats(base), owed, BigInt(seed));
            owed = made.owed;
            const given = { values, base, numbers: hex(made.numbers), scales: hex(made.scales) };
            return { ...given, owed: hex(pack(manifest, owed, null)) };
          }) };
        });"""),
        module="rounding.js",
        argument=[texts(), vectors.read()["roundings"]],
    )
    assert found == vectors.read()["roundings"]


TRAINED = """const leaves = new Map(Object.entries(weights).map(([name, values]) => [name, floats(values)]));
const settings = { ...rule, optimizer: rule.kind };
const optimiser = new found.Optimiser(settings, rule.learning_rate, leaves);
return { rule, weights, gradients, after: gradients.map((step) => {
  optimiser.step(new Map(Object.entries(step).map(([name, values]) => [name, floats(values)])));
  return Object.fromEntries([...leaves].map(([name, values]) => [name, hex(values)]));
}) };"""


def test_optimisers_move_bit_for_bit(modules):
    found = modules(
        function(f"return given.map(({{ rule, weights, gradients }}) => {{ {TRAINED} }});"),
        module="optimiser.js",
        argument=vectors.read()["optimisers"],
    )
    assert found == vectors.read()["optimisers"]


@pytest.mark.parametrize("clip", [0.5, 2.0, 1e6])
def test_clipped_gradients_move_alike(modules, clip):
    """Up to the order in which squares are added."""
    rule = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip": clip}
    weights = {"weight": vectors.some_values(5000, 1), "bias": vectors.some_values(30, 2)}
    gradients = [
        {name: vectors.some_values(len(each), step) / 20 for name, each in weights.items()} for step in range(5)
    ]
    hexed = {name: vectors.hexed(values) for name, values in weights.items()}
    given = [{name: vectors.hexed(values) for name, values in step.items()} for step in gradients]
    found = modules(
        function(f"const {{ rule, weights, gradients }} = given; {TRAINED}"),
        module="optimiser.js",
        argument={"rule": rule, "weights": hexed, "gradients": given},
    )
    optimiser = Optimiser(Rule(**rule), weights)
    for step, after in zip(gradients, found["after"], strict=True):
        optimiser.step(step)
        for name, values in weights.items():
            np.testing.assert_allclose(np.frombuffer(bytes.fromhex(after[name]), "<f4"), values, rtol=1e-6, atol=1e-7)


def test_stop_rules(modules):
    found = modules(
        function("""return Promise.all(given.map(async ({ settings, losses, memory: _ }) => {
          let memory = { "of the method": 1 };
          const gives = [];
          for (const [train, validation] of losses) {
            const judged = await found.judgeRound(async () => ({ loss: validation }), settings, memory, train, false);
            memory = judged.memory;
            gives.push([judged.stopLoss, judged.stopped]);
          }
          return { settings, losses, gives, memory };
        }));"""),
        module="stopping.js",
        argument=vectors.read()["stop_rules"],
    )
    assert found == vectors.read()["stop_rules"]
    assert sum(any(stopped for _, stopped in each["gives"]) for each in found) == 4, "all rules but off stop"


def test_newer_models_give_way_alike(modules):
    losses = [0.0, 0.1, 0.4, 0.49, 0.5, 0.51, 3.0, -1.4, -1.6, -2.0]
    pairs = [(found, lowest) for found in losses for lowest in losses if lowest <= found]
    found = modules(
        function("return given.map(([loss, lowest]) => found.givesWay({ loss }, lowest));"),
        module="stopping.js",
        argument=pairs,
    )
    assert found == [gives_way(Evaluation(num_examples=1, loss=loss), lowest) for loss, lowest in pairs]
    assert True in found
    assert False in found


def test_seeds(modules):
    found = modules(
        function("return given.map(({ parts }) => ({ parts, seed: String(found.deriveSeed(...parts)) }));"),
        module="session.js",
        argument=vectors.read()["seeds"],
    )
    assert found == vectors.read()["seeds"]


def test_flops(modules):
    found = modules(
        function("""const [texts, flops, key] = given, { drawNeurons } = await import("/web/masks.js");
        return flops.map(({ name, ratio }) => {
          const manifest = new Manifest(texts[name]), mask = ratio && drawNeurons(manifest, { key, ratio });
          const zeroed = tensorsOf(manifest.shared, (place) => place % 3);
          return {
            name, ratio, forward: found.forwardFlops(manifest), training: found.trainingFlops(manifest, 7, mask),
            nonzero: found.nonzeroFlops(manifest, zeroed),
          };
        });"""),
        module="flops.js",
        argument=[texts(), vectors.read()["flops"], vectors.KEY],
    )
    assert found == vectors.read()["flops"]


# --- bundles there and back --------------------------------------------------------------------------------------


def test_the_page_reads_bundles_of_the_sdk(modules):
    found = modules(
        function("""const [texts, bundles] = given;
        return bundles.map(({ form, name, body }) => {
          const { values, mask } = found.decode(bytes(body), new Manifest(texts[name]));
          return { form, name, mask: listed(mask), values: hex(values), body };
        });"""),
        module="bundle.js",
        argument=[texts(), vectors.read()["bundles"]],
    )
    assert found == vectors.read()["bundles"]
    forms = [json.loads(metadata_of(bytes.fromhex(each["body"]))["mask"])["form"] for each in found]
    assert forms == [each["form"] for each in found]


def metadata_of(body):
    (length,) = struct.unpack("<Q", body[:8])
    return json.loads(body[8 : 8 + length])["__metadata__"]


ENCODED = """const encoded = ({ name, precision, mask, draw, values, numbers, scales, report }) => {
  const rounded = numbers !== undefined && { numbers: new Int8Array(bytes(numbers).buffer), scales: floats(scales) };
  return found.encode(new Manifest(texts[name]), rounded || floats(values), maskOf(mask), { draw, precision, report });
};"""


def test_the_page_writes_updates_as_the_sdk_does(modules):
    updates = vectors.read()["updates"]
    found = modules(
        function(f"const [texts, updates, report] = given; {ENCODED}\n"
                 "return updates.map((update) => ({ ...update, body: hex(encoded({ ...update, report })) }));"),
        module="bundle.js",
        argument=[texts(), updates, vectors.REPORT],
    )  # fmt: skip
    assert found == updates
    for update in updates:
        decoded = decode(bytes.fromhex(update["body"]), vectors.MANIFESTS[update["name"]])
        assert (decoded.precision, decoded.report) == (update["precision"], vectors.REPORT)
        assert vectors.listed(decoded.mask) == update["mask"]


def test_the_sdk_reads_what_the_page_writes(modules, small):
    """Also where the page does not choose the shortest form of a mask."""
    updates, wanted = [], []
    for number, (form, (name, mask, draw)) in enumerate(vectors.FORMS.items()):
        manifest = vectors.MANIFESTS[name]
        values = vectors.some_values(count_values(manifest, mask), number)
        drawn = draw and {"key": draw.key, "ratio": draw.ratio}
        for precision in vectors.PRECISIONS:
            given = {"mask": vectors.listed(mask), "draw": drawn, "values": vectors.hexed(values), "report": form}
            updates.append({"name": name, "precision": precision, **given})
            wanted.append((manifest, decode(encode(manifest, values, mask, draw=draw, precision=precision), manifest)))
    found = modules(
        function(f"const [texts, updates] = given; {ENCODED}\nreturn updates.map((update) => hex(encoded(update)));"),
        module="bundle.js",
        argument=[texts(), updates],
    )
    for body, update, (manifest, same) in zip(found, updates, wanted, strict=True):
        decoded = decode(bytes.fromhex(body), manifest)
        assert decoded.values.tobytes() == same.values.tobytes()
        assert same_mask(decoded.mask, same.mask)
        assert (decoded.draw, decoded.precision, decoded.report) == (same.draw, same.precision, update["report"])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_short_values_are_rounded_as_numpy_does(modules, precision):
    """To nearest, ties to even: random bit patterns, every pattern around a tie, and back."""
    chance = np.random.default_rng(0)
    patterns = np.arange(0, 2**16, dtype=np.uint32)
    if precision == "bf16":
        around = (patterns[:, None] << 16) + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    else:  # what float16 can hold, halfway to the next, and beside that
        with np.errstate(invalid="ignore"):
            exact = patterns.astype(np.uint16).view(np.float16).astype(np.float32)
            middle = (exact + np.roll(exact, -1)) / np.float32(2)  # patterns of one sign follow each other
        around = np.stack([exact.view(np.uint32), *(middle.view(np.int32) + each for each in (-1, 0, 1))]).astype(
            np.uint32
        )
    random_ones = chance.integers(0, 2**32, size=50_000, dtype=np.uint32)
    values = np.concatenate([random_ones, around.ravel()]).view(np.float32)
    largest = 65519.0 if precision == "fp16" else 3.38e38
    values = np.ascontiguousarray(values[np.isfinite(values) & (np.abs(np.nan_to_num(values)) < largest)])
    manifest = hostile.wide(len(values))
    body = encode(manifest, values, None, precision=precision)
    there, back = modules(
        function("""const [text, values, precision] = given, manifest = new Manifest(text);
        const given32 = new Float32Array(unpacked(values).buffer);
        const body = found.encode(manifest, given32, null, { precision });
        return [digest(body), digest(found.decode(body, manifest).values)];"""),
        module="bundle.js",
        argument=[manifest.text, encoded(values.tobytes()), precision],
    )
    assert there == hashlib.sha256(body).hexdigest()
    assert back == hashlib.sha256(decode(body, manifest).values.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("value", "precision", "said"),
    [
        ("NaN", "fp32", "TrainingDiverged: training diverged: a value is not finite"),
        ("-Infinity", "bf16", "TrainingDiverged: training diverged: a value is not finite"),
        ("7e4", "fp16", "TrainingDiverged: a value does not fit fp16"),
        ("-65520", "fp16", "TrainingDiverged: a value does not fit fp16"),
        ("3.4e38", "bf16", "TrainingDiverged: a value does not fit bf16"),
    ],
)
def test_values_that_would_not_survive_are_not_sent(modules, value, precision, said):
    found = modules(
        function("""const [text, value, precision] = given;
        try { found.encode(new Manifest(text), Float32Array.of(0, Number(value), 1), null, { precision }); }
        catch (error) { return `${error.constructor.name}: ${error.message}`; }"""),
        module="bundle.js",
        argument=[hostile.wide(3).text, value, precision],
    )
    assert found.startswith(said)


def test_the_page_accepts_no_longer_payloads_than_the_sdk(modules):
    found = modules(
        function("return given.map((text) => found.largestPayload(new Manifest(text)));"),
        module="bundle.js",
        argument=list(texts().values()),
    )
    for name, most in zip(texts(), found, strict=True):
        manifest = vectors.MANIFESTS[name]
        whole = len(encode(manifest, np.zeros(manifest.shared_values, np.float32), None))
        assert whole < most <= largest_payload(manifest)


# --- hostile bytes -----------------------------------------------------------------------------------------------


def read_by_the_page(modules, manifest, bodies):
    """What the page makes of each body: the SHA-256 of its values and its mask, or the name of the error."""
    return modules(
        function("""const [text, bodies] = given, manifest = new Manifest(text);
        return bodies.map((body) => {
          try {
            const { values, mask } = found.decode(unpacked(body), manifest);
            return [digest(values), listed(mask)];
          } catch (error) { return error.constructor.name; }
        });"""),
        module="bundle.js",
        argument=[manifest.text, list(map(encoded, bodies))],
    )


def read_by_the_sdk(manifest, body, known=None):
    """Likewise; None instead of a mask that is none of neurons."""
    try:
        read = decode(body, manifest, known)
    except BundleError:
        return "BundleError"
    mask = vectors.listed(read.mask) if isinstance(read.mask, NeuronMask | None) else "other"
    return [hashlib.sha256(read.values.tobytes()).hexdigest(), mask]


def is_for_others(body):
    """Whether a bundle is one that pages do not take, although the SDK does: it belongs to other methods, or its header
    is no UTF-8, or its ratio is true instead of a number."""
    (length,) = struct.unpack("<Q", body[:8])
    try:
        header = json.loads(body[8 : 8 + length].decode("utf-8-sig"))
    except UnicodeDecodeError:
        return True
    form = json.loads(header["__metadata__"]["mask"])
    foreign = {"scales", "signs", "gradients"} & set(header) or header["values"]["dtype"] == "I8"
    return bool(foreign) or form["form"] in ("known", "elements", "changed", "blocks") or form.get("ratio") is True


def compare(modules, manifest, bodies, known=None):
    """Have both read all bodies; return how many both accept."""
    accepted = 0
    for body, found in zip(bodies, read_by_the_page(modules, manifest, bodies), strict=True):
        wanted = read_by_the_sdk(manifest, body, known)
        if wanted != "BundleError" and is_for_others(body):
            wanted = "BundleError"
        assert found == wanted, body
        accepted += found != "BundleError"
    return accepted


@pytest.mark.parametrize("attack", hostile.ATTACKS, ids=lambda attack: attack.__name__)
def test_hostile_bytes_are_refused_as_by_the_sdk(modules, small, sign, take_apart, attack):
    """Each attack on bundles in every form and precision that a page takes: it gives a BundleError, or the same."""
    chance = random.Random(attack.__name__)
    valid = [(body, take_apart(body)) for body in hostile.bodies(small)]
    compare(modules, small, [attack(chance, *chance.choice(valid), sign) for _ in range(100)])


@pytest.mark.parametrize(
    "attack", [None, *hostile.SPARSE_ATTACKS], ids=lambda attack: getattr(attack, "__name__", "none")
)
def test_what_belongs_to_other_methods_is_refused(modules, small, sign, take_apart, attack):
    chance = random.Random(7)
    valid = [(body, take_apart(body)) for body in hostile.sparse_bodies(small)]
    bodies = (
        [body for body, _ in valid]
        if attack is None
        else [attack(chance, *chance.choice(valid), sign) for _ in range(60)]
    )
    compare(modules, small, bodies, from_bits(small, hostile.HELD_BITS))


def test_flipped_and_missing_bytes_are_noticed_as_by_the_sdk(modules, small):
    """Of one valid bundle: any byte replaced by any other, and cut off anywhere."""
    chance, (body, *_) = random.Random(3), hostile.bodies(small)
    changed = []
    for _ in range(600):
        place = chance.randrange(len(body))
        changed.append(body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :])
    cut = [body[: chance.randrange(len(body))] for _ in range(200)]
    assert compare(modules, small, [body]) == 1
    assert compare(modules, small, changed) < 30, "a byte replaced by itself, or the padding by another space"
    assert compare(modules, small, cut) == 0


DRAWS = (
    *({"key": "dev-7-3", "ratio": ratio} for ratio in ("0.5", [0.5], {"a": 1}, None, 0, -0.5, 1.0001, 1e300)),
    *({"key": key, "ratio": 0.5} for key in ("a|b", "\ud800", 7, ["a"], None, {"includes": 1})),
)
COUNTS = ([1], [1, 2, 3], [0, 1], [4, 1], [1, 7], ["1", 1], [[1], 1], [True, 1], {"0": 1, "1": 1, "length": 2}, None, 2)


def test_masks_that_name_no_neurons_are_refused(modules, small, sign, take_apart):
    """What JavaScript would take for a number or a text, although it is none."""
    parts = take_apart(hostile.bodies(small)[0])
    forms = [*({"form": "draw", **draw} for draw in DRAWS), *({"form": "first", "counts": counts} for counts in COUNTS)]
    bodies = [
        hostile.with_mask(parts, sign, json.dumps(form), b"", count)
        for form in forms
        for count in (hostile.covered(1, 3), hostile.covered(1, 1), small.shared_values)
    ]
    assert compare(modules, small, bodies) == 0
    right = hostile.with_mask(parts, sign, '{"form":"first","counts":[1,3]}', b"", hostile.covered(1, 3))
    assert compare(modules, small, [right]) == 1


def test_types_that_cannot_be_shown_are_refused(modules, small, sign, take_apart):
    header, data = take_apart(hostile.bodies(small)[0])
    bodies = []
    for dtype in ({"toString": 1, "valueOf": 1}, "__proto__", "constructor", None):
        changed = copy.deepcopy(header)
        changed["values"]["dtype"] = dtype
        bodies.append(sign(changed, data))
    text = json.dumps(header).replace('"F32"', "[" * 20_000 + "]" * 20_000)
    bodies.append(struct.pack("<Q", len(text)) + text.encode() + data)
    assert compare(modules, small, bodies) == 0


# --- hostile manifests and skeletons -----------------------------------------------------------------------------

USED = """const used = (manifest) => { // all that the page computes from a manifest before it has a model
  const mask = masks.drawNeurons(manifest, { key: "a", ratio: 0.5 });
  if (manifest.sharedValues < 1e5) masks.eachBlock(manifest, mask, () => {});
  const small = manifest.of("personal").every(({ size }) => size < 1e5);
  const first = new Map(manifest.first.map((spec) => [spec.name, small && manifests.zeros(spec)]));
  if (small) manifests.ownInitialValues(manifest, 1, first);
  for (const which of ["frozen", "first"]) manifests.valuesSize(manifest, which);
  return [masks.countValues(manifest, mask), flops.trainingFlops(manifest, 1, mask), bundles.largestPayload(manifest)];
};"""


def manifests_read_by_the_page(modules, manifests):
    """What the page makes of each text: numbers that it has computed from it, or the name of the error."""
    return modules(
        function(f"""const [masks, flops, bundles] =
          await Promise.all(["masks", "flops", "bundle"].map((name) => import(`/web/${{name}}.js`)));
        {USED}
        return given.map((text) => {{
          try {{ return used(new Manifest(text)); }} catch (error) {{ return error.constructor.name; }}
        }});"""),
        module="manifest.js",
        argument=manifests,
    )


def changed(text, path, value):
    """A manifest with something else at a place."""
    said = json.loads(text)
    *way, last = path
    parent = said
    for key in way:
        parent = parent[key]
    if value is KeyError:
        del parent[last]
    else:
        parent[last] = value
    return json.dumps(said)


UNSOUND = {
    "another version": (("version",), 2),
    "no tensors": (("tensors",), []),
    "a tensor that is none": (("tensors", 0), None),
    "tensors without names": (("tensors", 0, "name"), KeyError),
    "two of one name": (("tensors", 0, "name"), "conv.bias"),
    "a shape of text": (("tensors", 0, "shape"), "3133"),
    "a shape of nothing": (("tensors", 0, "shape"), [0, 1, 3, 3]),
    "a shape of halves": (("tensors", 1, "shape"), [2.5]),
    "more values than fit": (("tensors", 0, "shape"), [3, 2**30, 2**30, 3]),
    "a type of JavaScript": (("tensors", 0, "dtype"), "constructor"),
    "a type that cannot be averaged": (("tensors", 0, "dtype"), "int64"),
    "an unknown policy": (("tensors", 0, "policy"), "public"),
    "an axis of an unknown group": (("tensors", 0, "axes", 0, 0, "group"), "nobody"),
    "an axis that is too long": (("tensors", 1, "axes", 0, 0, "repeat"), 2),
    "half a neuron": (("tensors", 7, "axes", 1, 0, "repeat"), 0.5),
    "axes of none": (("tensors", 0, "axes"), [[]]),
    "axes that are none": (("tensors", 0, "axes"), None),
    "neurons in a third axis": (("tensors", 0, "axes"), [[], [], [{"group": "conv", "repeat": 1}], []]),
    "no recipe": (("tensors", 0, "init"), KeyError),
    "an unknown recipe": (("tensors", 0, "init"), {"kind": "normal"}),
    "a bound beyond float32": (("tensors", 0, "init"), {"kind": "uniform", "bound": 1e39}),
    "a negative bound": (("tensors", 0, "init"), {"kind": "uniform", "bound": -1}),
    "a value that is a text": (("tensors", 2, "init"), {"kind": "constant", "value": "one"}),
    "no groups": (("groups",), None),
    "a group without neurons": (("groups", 0, "size"), 0),
    "two groups of one name": (("groups", 1, "name"), "conv"),
    "more neurons than rows": (
        ("groups",),
        [{"name": n, "size": s} for n, s in (("conv", 3), ("fc", 6), ("x", 2**31))],
    ),
    "no layers": (("layers",), None),
    "a layer of an unknown tensor": (("layers", 0, "tensors", 0), "nothing"),
    "a layer without positions": (("layers", 0, "positions"), 0),
    "a digest that is none": (("step_sha256",), "abc"),
    "an input of any shape": (("input_shape",), ["wide"]),
    "an unknown precision": (("frozen_precision",), "int4"),
}


def test_manifests_that_describe_no_model_are_refused(modules, small):
    """Where the SDK refuses one, so does the page, before it computes anything."""
    said = json.dumps(json.loads(small.text))
    manifests = [changed(said, *each) for each in UNSOUND.values()]
    for name, text in zip(UNSOUND, manifests, strict=True):
        if name not in ("a bound beyond float32", "no recipe", "no groups", "no layers", "axes that are none"):
            with pytest.raises(ValueError):  # noqa: PT011
                Manifest.model_validate_json(text)
    texts = [
        "",
        "null",
        "[]",
        "7",
        '"text"',
        "{}",
        said[:-1],
        "[" * 5000,
        '{"version":1}',
        '{"version":1,"tensors":[1]}',
    ]
    found = manifests_read_by_the_page(modules, [*manifests, *texts, said])
    refused = dict(zip([*UNSOUND, *texts], found, strict=False))
    assert set(refused.values()) == {"ProtocolError"}, {name for name in refused if refused[name] != "ProtocolError"}
    assert len(found[-1]) == 3


def test_any_change_of_a_manifest_is_refused_or_does_no_harm(modules, small):
    """Something odd in place of any one part of it: no other error, whatever is computed."""
    chance, said = random.Random(11), json.loads(small.text)
    odd = [each for each in hostile.ODD if not isinstance(each, float) or each == each] + [KeyError, 3, 6, "conv", "fc"]
    paths = [path for path in hostile.nodes(said) if path and len(json.dumps(path)) < 200]
    manifests = []
    for _ in range(1500):
        path = chance.choice(paths)
        value = chance.choice(odd)
        if not (value is KeyError and isinstance(path[-1], int)):
            manifests.append(changed(small.text, path, value))
    found = manifests_read_by_the_page(modules, manifests)
    for text, each in zip(manifests, found, strict=True):
        assert each == "ProtocolError" or isinstance(each, list), (each, text)
    assert 50 < sum(each != "ProtocolError" for each in found) < 1000


def test_a_skeleton_is_filled(modules):
    task = load_builtin("digits")
    found = modules(
        function("""const [text, skeleton] = given, manifest = new Manifest(text);
        const tensors = tensorsOf(manifest.tensors.filter((spec) => spec.dtype === "float32"));
        return hex(found.fillSkeleton(unpacked(skeleton), tensors));"""),
        module="onnx.js",
        argument=[task.manifest.text, encoded(task.skeleton)],
    )
    model = onnx.load_from_string(bytes.fromhex(found))
    onnx.checker.check_model(model)
    filled = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    shapes = {spec.name: spec.shape for spec in task.manifest.whole}
    assert shapes.keys() <= filled.keys()
    for name, shape in shapes.items():
        np.testing.assert_array_equal(filled[name], np.arange(filled[name].size, dtype=np.float32).reshape(shape))


def test_a_damaged_skeleton_is_filled_or_refused(modules):
    """Flipped, cut off and random bytes: no other error."""
    task = load_builtin("digits")
    chance, skeleton = random.Random(5), task.skeleton
    damaged = [bytes(skeleton[: chance.randrange(len(skeleton))]) for _ in range(100)]
    for _ in range(300):
        flipped = bytearray(skeleton)
        for _ in range(chance.randrange(1, 4)):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        damaged.append(bytes(flipped))
    damaged += [chance.randbytes(chance.randrange(200)) for _ in range(100)]
    graph, initializer, name = 7 << 3, 5 << 3, 8 << 3  # of another wire type than messages and texts have
    damaged += [bytes([graph, 5]), bytes([graph | 2, 2, initializer, 1])]
    damaged += [bytes([graph | 2, 4, initializer | 2, 2, name, 1]), bytes([graph | 3])]
    damaged += [b"\xff" * 20, bytes([graph | 2]) + b"\xff" * 7 + b"\x01"]
    found = modules(
        function("""const [text, skeletons] = given, manifest = new Manifest(text);
        const tensors = tensorsOf(manifest.tensors.filter((spec) => spec.dtype === "float32"));
        return skeletons.map((skeleton) => {
          try {
            return found.fillSkeleton(unpacked(skeleton), tensors).length;
          } catch (error) { return error.constructor.name; }
        });"""),
        module="onnx.js",
        argument=[task.manifest.text, list(map(encoded, damaged))],
    )
    assert {each for each in found if isinstance(each, str)} == {"ProtocolError"}
    assert found[-6:] == ["ProtocolError"] * 6
    assert 100 < sum(isinstance(each, str) for each in found) < len(found) - 50
