"""The page's hashes, random numbers, splits and batches are those of numpy and the SDK, bit for bit."""

from __future__ import annotations

import base64
import hashlib
import json

import numpy as np
import pytest

from edge_sdk.tasks import passes
from edge_sdk.tasks.loading import EVALUATION_BATCH, ArrayBatches, Arrays, Scale
from edge_sdk.tasks.public import MODELS, full_name

from . import vectors

EDGE = 3.6541529
"""Where the tail of numpy's normal distribution begins: what lies beyond is a logarithm of the C library."""

BYTES = "(values) => btoa(Array.from(new Uint8Array(values.buffer), (byte) => String.fromCharCode(byte)).join(''))"


def test_numpy_and_the_sdk_still_give_the_vectors():
    assert vectors.PATH.stat().st_size < 150_000
    assert vectors.read() == json.loads(json.dumps(vectors.make()))


@pytest.mark.integration
def test_hashes(modules):
    hashed = modules(
        """async ({ Sha256, sha256, hex, utf8, digestHex }, vectors) => {
          const found = [];
          for (const { length } of vectors) {
            const bytes = Uint8Array.from({ length }, (_, i) => 7 * i + 3);
            const pieces = new Sha256();
            for (let at = 0, step = 1; at < length; at += step, step = 1 + ((step * 5) % 77)) {
              pieces.update(bytes.subarray(at, at + step));
            }
            const copy = pieces.clone().update(utf8("é"));
            const [own, subtle] = [await digestHex(bytes), crypto.subtle];
            Object.defineProperty(crypto, "subtle", { value: undefined, configurable: true });
            found.push([hex(sha256(bytes)), hex(pieces.digest()), own, await digestHex(bytes), hex(copy.digest())]);
            Object.defineProperty(crypto, "subtle", { value: subtle, configurable: true });
          }
          return found;
        }""",
        module="sha256.js",
        argument=vectors.read()["sha256"],
    )
    for found, vector in zip(hashed, vectors.read()["sha256"], strict=True):
        longer = hashlib.sha256(vectors.pattern(vector["length"]) + "é".encode()).hexdigest()
        assert found == [vector["digest"]] * 4 + [longer]


@pytest.mark.integration
def test_longer_hashes(modules):
    found = modules(
        """async ({ sha512 }, vectors) => {
          const { hex } = await import("/web/sha256.js");
          return vectors.map(({ length }) => hex(sha512(Uint8Array.from({ length }, (_, i) => 7 * i + 3))));
        }""",
        module="sha512.js",
        argument=vectors.read()["sha512"],
    )
    assert found == [vector["digest"] for vector in vectors.read()["sha512"]]


DRAWS = """(generator, name, count) => {
  if (name !== "raw") return [...generator[name](count)];
  const words = generator.rawWords(count);
  return Array.from({ length: count }, (_, i) => String(BigInt(words[2 * i]) + (BigInt(words[2 * i + 1]) << 32n)));
}"""


@pytest.mark.integration
def test_streams(modules):
    found = modules(
        f"""({{ Generator }}, streams) => streams.map(({{ seed, ...wanted }}) => {{
          const numbers = seed.length > 1 ? seed.map(BigInt) : BigInt(seed[0]);
          const made = {{ seed }};
          for (const [name, values] of Object.entries(wanted)) {{
            made[name] = ({DRAWS})(Generator.of(numbers), name, values.length);
          }}
          return made;
        }})""",
        module="pcg64.js",
        argument=vectors.read()["streams"],
    )
    assert found == vectors.read()["streams"]


@pytest.mark.integration
def test_calls_one_after_another_share_the_half_that_is_left(modules):
    found = modules(
        f"""({{ Generator }}, mixed) => mixed.map(({{ seed, calls }}) => {{
          const generator = Generator.of(seed.length > 1 ? seed.map(BigInt) : BigInt(seed[0]));
          return {{ seed, calls: calls.map(({{ call, count }}) => (
            {{ call, count, gives: ({DRAWS})(generator, call, count) }}
          )) }};
        }})""",
        module="pcg64.js",
        argument=vectors.read()["mixed"],
    )
    assert found == vectors.read()["mixed"]


@pytest.mark.integration
def test_single_outputs_and_seeds_of_every_kind(modules):
    found = modules(
        """({ Generator }) => {
          const raw = (seed) => { const one = Generator.of(seed); return [one.raw(), one.raw()].map(String); };
          let refused = "";
          try { Generator.of(-1); } catch (error) { refused = error.message; }
          return [raw(7), raw(7n), raw([7]), raw([5, 1n, 0]), refused];
        }""",
        module="pcg64.js",
    )
    seven, mixed = (list(map(str, np.random.PCG64(seed).random_raw(2))) for seed in (7, [5, 1, 0]))
    assert found == [seven, seven, seven, mixed, "the seed is -1; it must be a whole number of at least 0"]


@pytest.mark.integration
@pytest.mark.parametrize("seed", [3, 2**128 - 1])
def test_a_million_normal_numbers(modules, seed):
    """All branches; a number of the tail may differ in its last bits, and one of 4,000 is of the tail."""
    found = modules(
        f"({{ Generator }}, seed) => ({BYTES})(Generator.of(BigInt(seed)).normal32(1e6))",
        module="pcg64.js",
        argument=str(seed),
    )
    drawn = np.frombuffer(base64.b64decode(found), np.float32)
    wanted = np.random.Generator(np.random.PCG64(seed)).standard_normal(10**6, dtype=np.float32)
    tail = np.abs(wanted) > EDGE
    assert tail.sum() > 200
    np.testing.assert_array_equal(drawn[~tail], wanted[~tail])
    np.testing.assert_allclose(drawn[tail], wanted[tail], rtol=1e-6)


@pytest.mark.integration
def test_splits(modules):
    found = modules(
        """({ split }, splits) => splits.map(({ count, seed }) => {
          const parts = split(count, BigInt(seed));
          const listed = Object.entries(parts).map(([use, index]) => [use, [...index]]);
          return { count, seed, ...Object.fromEntries(listed) };
        })""",
        module="samples.js",
        argument=vectors.read()["splits"],
    )
    assert found == vectors.read()["splits"]


@pytest.mark.integration
def test_a_split_that_cannot_be_had(modules):
    found = modules(
        """({ split }) => [[2, 0], [5, -1], [5, 2n ** 63n]].map(
          ([count, seed]) => { try { split(count, seed); } catch ({ name, message }) { return [name, message]; } }
        )""",
        module="samples.js",
    )
    assert found == [
        ["DataError", "2 samples cannot be split into training, validation and test; give 3 or more"],
        ["RangeError", "seed is -1; give an integer from 0 to 2^63-1"],
        ["RangeError", f"seed is {2**63}; give an integer from 0 to 2^63-1"],
    ]


@pytest.mark.integration
@pytest.mark.parametrize(("count", "size"), [(1, 8), (8, 8), (9, 8), (10, 8), (33, 8), (33, EVALUATION_BATCH), (5, 1)])
def test_batches(modules, count, size):
    wanted = ArrayBatches(Arrays(np.arange(2 * count, dtype=np.float32).reshape(count, 2), np.arange(count)), size)
    length, whole, orders = modules(
        """({ Batches, passes }, [count, size]) => {
          const inputs = Float32Array.from({ length: 2 * count }, (_, i) => i);
          const targets = Int32Array.from({ length: count }, (_, i) => i);
          const batches = new Batches({ inputs, targets, count }, size);
          const plain = (batch) => [[...batch.inputs], [...batch.targets].map(Number), batch.count];
          const endless = passes(batches, 5);
          const drawn = Array.from({ length: 3 * batches.length }, () => plain(endless.next().value));
          return [batches.length, [...batches].map(plain), drawn];
        }""",
        module="samples.js",
        argument=[count, size],
    )

    def plain(batch):
        inputs, targets = batch
        return [inputs.ravel().tolist(), targets.tolist(), len(targets)]

    assert length == len(wanted)
    assert whole == list(map(plain, wanted))
    endless = passes(wanted, 5)
    assert orders == [plain(next(endless)) for _ in range(3 * len(wanted))]


@pytest.mark.integration
def test_batches_of_values(modules):
    found = modules(
        """({ Batches }) => {
          const targets = Float32Array.of(0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5);
          const batches = new Batches({ inputs: new Float32Array(12), targets, count: 4 }, 2);
          return [...batches].map((batch) => [batch.targets.constructor.name, ...batch.targets, batch.inputs.length]);
        }""",
        module="samples.js",
    )
    assert found == [["Float32Array", 0.5, 1.5, 2.5, 3.5, 6], ["Float32Array", 4.5, 5.5, 6.5, 7.5, 6]]


TASKS = {
    full_name(task, model): (choice.shape, Scale(choice.mean, choice.deviation))
    for task, models in MODELS.items()
    for model, choice in models.items()
}


@pytest.mark.integration
@pytest.mark.parametrize("task", TASKS)
def test_samples_are_scaled_as_the_task_does(modules, task):
    shape, scale = TASKS[task]
    values = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (2, *shape)).astype(np.float32)
    found = modules(
        """({ scaled }, [task, values, shape]) => [...scaled(task, Float32Array.from(values), shape)]""",
        module="samples.js",
        argument=[task, values.ravel().tolist(), list(shape)],
    )
    assert found == scale(values).ravel().tolist()


@pytest.mark.integration
@pytest.mark.parametrize("task", ["digits", "npz", "constructor"])
def test_grey_levels_of_other_tasks_go_from_0_to_1(modules, task):
    values = np.arange(256, dtype=np.float32)
    found = modules(
        """({ scaled }, task) => [[1, 16, 16], [256]].map(
          (shape) => [...scaled(task, Float32Array.from({ length: 256 }, (_, i) => i), shape)]
        )""",
        module="samples.js",
        argument=task,
    )
    assert found == [(values / np.float32(255)).tolist(), values.tolist()]
