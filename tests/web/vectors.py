"""Numbers that the page's own arithmetic must reproduce, computed by numpy and the SDK: python -m tests.web.vectors.

They stand in ``vectors.json`` beside this file, so that a change of numpy or the SDK shows, too. Seeds are texts,
because JavaScript's numbers end at 2^53.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge_sdk.device.rounding import round_update
from edge_sdk.engines.optimiser import Optimiser, Rule
from edge_sdk.engines.training import derive_seed
from edge_sdk.methods.early_stopping import judge_round
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks.partition import split
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.flops import forward_flops, nonzero_flops, training_flops
from sparrow.protocol.manifest import Array, Manifest, NeuronGroup, Segment, TensorSpec, initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, pack, unpack_whole
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.neurons import first_neurons, neuron_bits
from sparrow.protocol.publication import Terms, digests_of
from sparrow.protocol.quantization import Quantised
from sparrow.protocol.ranges import faults, read_ranges
from sparrow.protocol.settings import FederationSettings

PATH = Path(__file__).with_suffix(".json")

LENGTHS = (0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 1000)
"""Of texts to hash: around a block's end and around the place where its padding needs another block."""

LENGTHS_512 = (0, 1, 111, 112, 127, 128, 129, 239, 240, 1000)
"""Likewise, for blocks of twice the length."""

SEEDS: tuple[list[int], ...] = ([0], [1], [2**63 - 1], [5, 1], [2**40, 1], [2**128 - 1], [1, 2**100 + 7])
COUNTS = (3, 10, 797)
SPLIT_SEEDS = (0, 1, 2**32 + 7, 2**63 - 1)

CALLS = (
    *(("random32", 3), ("raw", 1), ("random32", 2), ("permutation", 6), ("raw", 2), ("normal32", 5)),
    *(("permutation", 2), ("random32", 1), ("raw", 1), ("normal32", 2), ("permutation", 9), ("random32", 4)),
)
"""A stream's calls one after another; those of 32 bits leave and find half of an output."""

DRAWS: dict[str, Callable[[np.random.Generator, int], list[Any]]] = {
    "raw": lambda generator, count: [str(one) for one in generator.bit_generator.random_raw(count)],
    "random32": lambda generator, count: generator.random(count, dtype=np.float32).tolist(),
    "normal32": lambda generator, count: generator.standard_normal(count, dtype=np.float32).tolist(),
    "permutation": lambda generator, count: generator.permutation(count).tolist(),
}
"""Name of the page's method -> what numpy gives for it."""


def pattern(length: int) -> bytes:
    """Bytes that differ from their neighbours."""
    return bytes((7 * position + 3) % 256 for position in range(length))


def generator_of(seed: list[int]) -> np.random.Generator:
    """Return numpy's generator; a list of one number is taken as that number."""
    return np.random.Generator(np.random.PCG64(seed if len(seed) > 1 else seed[0]))


def make() -> dict[str, Any]:
    """Return all vectors, as JSON can hold them."""
    return {**of_numbers(), **of_the_protocol(), **of_publications()}


def of_numbers() -> dict[str, Any]:
    """Return vectors of hashes and random numbers."""
    streams = []
    for seed in SEEDS:
        counts = {"raw": 20, "random32": 40, "normal32": 120, "permutation": 100}
        drawn = {name: DRAWS[name](generator_of(seed), count) for name, count in counts.items()}
        streams.append({"seed": list(map(str, seed)), **drawn})
    mixed = []
    for seed in SEEDS:
        generator = generator_of(seed)
        calls = [{"call": name, "count": count, "gives": DRAWS[name](generator, count)} for name, count in CALLS]
        mixed.append({"seed": list(map(str, seed)), "calls": calls})
    splits = []
    for count in COUNTS:
        for number in SPLIT_SEEDS:
            parts = split(count, number)
            splits.append(
                {"count": count, "seed": str(number)}
                | {use: getattr(parts, use).tolist() for use in ("train", "validation", "test")}
            )
    digests = [{"length": length, "digest": hashlib.sha256(pattern(length)).hexdigest()} for length in LENGTHS]
    longer = [{"length": length, "digest": hashlib.sha512(pattern(length)).hexdigest()} for length in LENGTHS_512]
    return {"sha256": digests, "sha512": longer, "streams": streams, "mixed": mixed, "splits": splits}


# --- the protocol ------------------------------------------------------------------------------------------------

TASKS = ("digits", "mnist:leaf")
KEY = "0123456789abcdef0123456789abcdef"
PRECISIONS = ("fp32", "fp16", "bf16")
REPORT = '{"note": "of a \\"page\\" – \\u2028 \x7f"}'


def _every(group: str, repeat: int = 1) -> tuple[Segment, ...]:
    return (Segment(group=group, repeat=repeat),)


EXAMPLE = Manifest(
    task="example",
    input_shape=(1, 2, 2),
    output_shape=(2,),
    tensors=(
        TensorSpec(name="conv.weight", shape=(3, 1, 1, 1), axes=(_every("conv"), (), (), ())),
        TensorSpec(name="bn.running_var", shape=(3,), axes=(_every("conv"),), trainable=False),
        TensorSpec(name="fc.weight", shape=(5, 12), axes=(_every("fc"), _every("conv", 4))),
        TensorSpec(name="fc.bias", shape=(5,), axes=(_every("fc"),)),
        TensorSpec(name="out.weight", shape=(2, 5), axes=((), _every("fc"))),
    ),
    groups=(NeuronGroup(name="conv", size=3), NeuronGroup(name="fc", size=5)),
)
"""A convolution, running variances, a flatten of 2x2 maps, and two linear layers: 81 values."""

WIDE = Manifest(
    task="wide",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(
        TensorSpec(name="few.bias", shape=(40,), axes=(_every("few"),)),
        TensorSpec(name="many.bias", shape=(70_000,), axes=(_every("many"),)),
    ),
    groups=(NeuronGroup(name="few", size=40), NeuronGroup(name="many", size=70_000)),
)
"""Nothing but biases; a list of the second layer's neurons takes four bytes for each."""

MANIFESTS = {"example": EXAMPLE, "wide": WIDE, **{task: load_builtin(task).manifest for task in TASKS}}
DRAW = NeuronDraw("dev-7-3", 0.5)
SOME = NeuronMask({"conv": np.array([0, 2]), "fc": np.array([1, 2, 4])})
FORMS: dict[str, tuple[str, NeuronMask | None, NeuronDraw | None]] = {
    "full": ("example", None, None),
    "draw": ("example", draw_neurons(EXAMPLE, DRAW), DRAW),
    "bits": ("example", SOME, None),
    "first": ("example", first_neurons(EXAMPLE, 0.5), None),
    "index": ("wide", NeuronMask({"few": np.array([3, 39]), "many": np.array([0, 65_536, 69_999])}), None),
}
"""Form of a mask -> a model, a mask of which this is the shortest form, and what it was drawn from."""

ODD = np.array(
    [
        *(0.0, -0.0, 1.0, -2.5, 65504.0, -65504.0, 65519.996),
        *(1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-14, 2.0**-14 - 2.0**-25),
        *(2.0**-24, 2.0**-25, 3 * 2.0**-25, -5 * 2.0**-25, 2.0**-25 * (1 + 2**-20), 1e-8, 1023.5 * 2.0**-24),
        *(1e-45, -1e-40, 2.0**-126, np.pi, -np.e),
    ],
    np.float32,
)
"""Values around what float16 and bfloat16 can hold: ties, subnormal numbers, the largest, and both zeros."""


def hexed(array: Array) -> str:
    """Return an array's bytes, little-endian."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes().hex()


def listed(mask: NeuronMask | None) -> dict[str, list[int]] | None:
    """Return a mask as JSON can hold it."""
    return None if mask is None else {group: index.tolist() for group, index in mask.active.items()}


def some_values(count: int, seed: int = 0) -> Array:
    """Return so many float32 values."""
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def places(manifest: Manifest, mask: NeuronMask | None) -> Array:
    """Return the flat place in its tensor of each packed value, int32."""
    numbered = {
        spec.name: np.arange(spec.size, dtype=np.float32).reshape(spec.shape) for spec in manifest.shared
    }  # exact: no tensor here has 2^24 values
    return pack(manifest, numbered, mask).astype(np.int32)


def of_the_protocol() -> dict[str, Any]:
    """Return vectors of what both sides of the wire compute and write."""
    return {
        "manifests": [_manifest(name) for name in MANIFESTS],
        "draws": [_draw(name, ratio) for name in MANIFESTS for ratio in (0.5, 0.29, 0.1, 0.98, 0.99)],
        "bundles": [_bundle(form, precision) for form in FORMS for precision in PRECISIONS],
        "updates": [
            _update(form, precision) for form in ("full", "draw", "bits") for precision in (*PRECISIONS, "int8")
        ],
        "roundings": [_rounding(form, seed) for form in ("full", "bits") for seed in (0, 2**63 - 1)],
        "optimisers": [_optimiser(rule) for rule in RULES],
        "stop_rules": [_stop_rule(settings, seed) for seed, settings in enumerate(STOP_RULES)],
        "seeds": [{"parts": list(parts), "seed": str(derive_seed(*parts))} for parts in PARTS],
        "flops": [_flops(task, draw) for task in TASKS for draw in (None, NeuronDraw(KEY, 0.29))],
    }


def _manifest(name: str) -> dict[str, Any]:
    manifest = MANIFESTS[name]
    first = {
        str(seed): {
            tensor: hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:32]
            for tensor, values in initial_values(manifest, seed).items()
        }
        for seed in (0, 2**63 - 1)
        if name in TASKS
    }
    digests = {"digest": manifest.digest, "values_digest": manifest.values_digest}
    return {"name": name, "text": manifest.text, **digests, "values": manifest.shared_values, "first": first}


def _draw(name: str, ratio: float) -> dict[str, Any]:
    manifest = MANIFESTS[name]
    mask = draw_neurons(manifest, NeuronDraw(KEY, ratio))
    flat = places(manifest, mask)
    found = {"bits": neuron_bits(manifest, mask), "places": flat.astype("<i4").tobytes()}
    digests = {what: hashlib.sha256(data).hexdigest() for what, data in found.items()}
    return {"name": name, "key": KEY, "ratio": ratio, "values": len(flat), **digests}


def _bundle(form: str, precision: Any) -> dict[str, Any]:
    name, mask, draw = FORMS[form]
    manifest = MANIFESTS[name]
    values = np.resize(ODD, count_values(manifest, mask))
    body = encode(manifest, values, mask, draw=draw, precision=precision, report=REPORT)
    return {
        "form": form,
        "name": name,
        "mask": listed(mask),
        "values": hexed(decode(body, manifest).values),
        "body": body.hex(),
    }


def _update(form: str, precision: Any) -> dict[str, Any]:
    name, mask, draw = FORMS[form]
    manifest = MANIFESTS[name]
    values = np.resize(ODD, count_values(manifest, mask))
    said = {"values": hexed(values)}
    given: Any = values
    if precision == "int8":
        given, _ = round_update(*_job(manifest, mask, values, np.abs(some_values(len(values))), 5), {})
        said = {"numbers": hexed(given.numbers), "scales": hexed(given.scales)}
    body = encode(manifest, given, mask, draw=draw, precision=precision, report=REPORT)
    drawn = draw and asdict(draw)
    return {"name": name, "precision": precision, "mask": listed(mask), "draw": drawn, **said, "body": body.hex()}


def _job(manifest: Manifest, mask: NeuronMask | None, values: Array, base: Array, seed: int) -> tuple[Any, Any]:
    """Return as much of a job and its update as rounding needs."""
    whole = np.zeros(manifest.shared_values, np.float32)
    whole[_flat(manifest, mask)] = base
    update = SimpleNamespace(values=values, mask=mask, base=unpack_whole(manifest, whole))
    return SimpleNamespace(manifest=manifest, received=None, seed=lambda purpose: seed), update


def _flat(manifest: Manifest, mask: NeuronMask | None) -> Array:
    """Return the places of a mask's values in the whole model, packed."""
    order = np.arange(manifest.shared_values, dtype=np.float32)
    return pack(manifest, unpack_whole(manifest, order), mask).astype(np.intp)


def _rounding(form: str, seed: int) -> dict[str, Any]:
    """Two updates, of which the second takes along what rounding took from the first."""
    name, mask, _ = FORMS[form]
    manifest, owed = MANIFESTS[name], {}
    steps = []
    for number in range(2):
        base, moved = (np.abs(some_values(count_values(manifest, mask), 10 * number + each)) for each in (0, 1))
        values = (base + np.float32(0.01) * (moved - 1)).clip(0)
        rounded, owed = round_update(*_job(manifest, mask, values, base, seed), owed)
        assert isinstance(rounded, Quantised)
        gives = {"numbers": hexed(rounded.numbers), "scales": hexed(rounded.scales)}
        steps.append({"values": hexed(values), "base": hexed(base), **gives, "owed": hexed(pack(manifest, owed, None))})
    return {"name": name, "mask": listed(mask), "seed": str(seed), "steps": steps}


RULES = (
    Rule("sgd", 0.1),
    Rule("sgd", 0.05, momentum=0.9, weight_decay=1e-3),
    Rule("adam", 1e-3, weight_decay=1e-2),
    Rule("adamw", 3e-3, weight_decay=1e-2),
)


def _optimiser(rule: Rule) -> dict[str, Any]:
    weights = {"weight": some_values(12, 1).reshape(3, 4), "bias": some_values(3, 2)}
    begin = {name: hexed(values) for name, values in weights.items()}
    optimiser, given, after = Optimiser(rule, weights), [], []
    for step in range(5):
        gradients = {name: some_values(values.size, 7 * step).reshape(values.shape) for name, values in weights.items()}
        if step == 2:
            del gradients["bias"]
        given.append({name: hexed(values) for name, values in gradients.items()})
        optimiser.step(gradients)
        after.append({name: hexed(values) for name, values in weights.items()})
    return {"rule": asdict(rule), "weights": begin, "gradients": given, "after": after}


STOP_RULES = (
    {"early_stopping": "validation", "min_participations": 4, "patience": 3, "min_improvement": 0.02},
    {"early_stopping": "validation"},
    {"early_stopping": "paper"},
    {"early_stopping": "paper", "patience": 2, "stop_weight": 0.25},
    {"early_stopping": "off"},
)


def _stop_rule(given: dict[str, Any], seed: int) -> dict[str, Any]:
    settings = FederationSettings(**given)
    chance, memory = np.random.default_rng(seed), {"of the method": 1}
    losses, gives = [], []
    for number in range(28):
        train, validation = np.round(2 * 0.8 ** min(number, 8) + chance.normal(0, 0.02, 2), 3).tolist()
        judged = judge_round(
            lambda validation=validation: Evaluation(num_examples=1, loss=validation), settings, memory, train
        )
        memory = dict(judged.memory)
        losses.append([train, validation])
        gives.append([judged.stop_loss, judged.stopped])
    asked = settings.model_dump(
        include={"early_stopping", "patience", "min_participations", "min_improvement", "stop_weight"}
    )
    return {"settings": asked, "losses": losses, "gives": gives, "memory": memory}


PARTS: tuple[tuple[str | int, ...], ...] = (
    ("digits:0", "pi", 1, "train"),
    (f"lab:{2**63 - 1}", "dev-7", 1000, "quantise"),
    ("a", 0, 'é \u2028 "', "adapt"),
)


def _flops(task: str, draw: NeuronDraw | None) -> dict[str, Any]:
    manifest = MANIFESTS[task]
    mask = draw and draw_neurons(manifest, draw)
    zeroed = {spec.name: np.arange(spec.size) % 3 for spec in manifest.shared}
    return {
        "name": task,
        "ratio": draw and draw.ratio,
        "forward": forward_flops(manifest),
        "training": training_flops(manifest, 7, weight_gradients=mask),
        "nonzero": nonzero_flops(manifest, zeroed),
    }


# --- publications ------------------------------------------------------------------------------------------------

AUTHOR = Publisher(bytes(range(32)))
LONG_SEED = 2**63 - 1
RANGES: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("cohort>=10",), {}),
    (("cohort>=10",), {"cohort": 9, "min_devices": 2}),
    (("cohort>=10", "cohort<=20"), {"cohort": 21}),
    (("precision=fp32,int8",), {"precision": "int8"}),
    (("precision=fp32,int8",), {"precision": "fp16"}),
    (("method=fedavg",), {"method": "fedprox"}),
    (("learning_rate<=0.05",), {"learning_rate": 0.25}),
    (("local_steps>=5",), {}),
    (("local_steps>=5",), {"local_steps": 4}),
    (("local_steps=none",), {}),
    (("local_steps=5,6",), {}),
    (("noise_multiplier>=0.5",), {}),
    (("clip<=1.5",), {"clip": 1.25}),
    (("secure=true", "secure_metrics=true"), {}),
    (("secure_metrics=false",), {"secure": True}),
    (("secure=false,true",), {"secure": True}),
    ((f"seed={LONG_SEED}",), {"seed": LONG_SEED}),
    ((f"seed={LONG_SEED}",), {"seed": LONG_SEED - 1}),
    (("seed=0,7",), {"seed": 7}),
    (("seed>=1",), {"seed": LONG_SEED}),
    (("method_settings.proximal_weight<=0.25",), {"method": "fedprox", "method_settings": {"proximal_weight": 0.5}}),
    (("method_settings.proximal_weight<=0.25",), {}),
    (("method_settings.both=true",), {"method_settings": {"both": 1}}),
)
"""Ranges as their author writes them, and settings that lie within or not."""


def of_publications() -> dict[str, Any]:
    """Return vectors of signatures and of signed ranges."""
    return {
        "publications": [_publication(texts) for texts in ((), ("cohort>=10",), (f"seed={LONG_SEED}", "clip<=1.5"))],
        "ranges": [_range(texts, changes) for texts, changes in RANGES],
    }


def _publication(texts: tuple[str, ...]) -> dict[str, Any]:
    terms = Terms(
        federation="ward-3",
        edition=2,
        task='é \u2028 "x"',
        manifest=EXAMPLE.digest,
        graphs={"step": "ab" * 32},
        weights=digests_of({"fc.bias": some_values(5)}),
        settings=read_ranges(texts),
    )
    signed = AUTHOR.sign(terms)
    return {**signed.model_dump(), "digest": signed.digest, "fingerprint": signed.fingerprint}


def _range(texts: tuple[str, ...], changes: dict[str, Any]) -> dict[str, Any]:
    found = faults(read_ranges(texts), FederationSettings(**changes))
    return {"ranges": list(texts), "changes": changes, "faults": found}


def read() -> dict[str, Any]:
    """Return the vectors of the file."""
    vectors: dict[str, Any] = json.loads(PATH.read_text())
    return vectors


if __name__ == "__main__":
    made = make()
    blocks = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, made[name])) + "\n]" for name in made)
    PATH.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
