"""Raw files in, raw files into the exported model: whole federations of tables and arrays, in one process."""

import csv
import json
import threading
from contextlib import ExitStack

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.errors import BadArgument
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import load_to_publish, publish
from edge_sdk.tasks import Task, own
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.export.build import dense
from sparrow.export.exporter import Options, export_model
from sparrow.export.preparation import PREFIX
from sparrow.export.samples import read_raw_samples
from sparrow.export.source import read_source
from sparrow.protocol import personal
from sparrow.simulation import in_process

MARGIN = 1e-4
"""Difference between the two best scores below which rounding may decide."""

KINDS = {
    "idle": (1013.0, 0.02, 20.0, "kitchen"),
    "walk": (1009.0, 0.4, 24.0, "hall"),
    "fall": (1001.0, 2.5, 22.0, "bath"),
}
HEAD = ("pressure", "acceleration", "temperature", "room", "activity")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    settings = Settings(data_dir=tmp_path_factory.mktemp("coordinator"), default_task="", log_level="ERROR")
    with in_process.running(create_app(settings)) as found:
        yield found


def readings(count, kinds, seed, scale=1.0):
    """Rows in raw units: hectopascal, g, degrees, and a room that says something of what is done in it."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        kind = kinds[random.integers(len(kinds))]
        pressure, acceleration, temperature, room = KINDS[kind]
        other = ("kitchen", "hall", "bath")[random.integers(3)]
        rows.append(
            (
                f"{random.normal(pressure, 1.5):.2f}",
                f"{scale * abs(random.normal(acceleration, 0.02 + 0.15 * acceleration)):.4f}",
                f"{random.normal(temperature, 2):.1f}",
                room if random.random() < 0.7 else other,
                kind,
            )
        )
    return rows


def write(path, rows, head=HEAD):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def federate(client, name, task, devices, folder, method="fedavg", **settings):
    """Publish a task, let devices join with ``data`` or a task each, and return their results by name."""
    usual = {"rounds": 6, "min_devices": len(devices), "local_epochs": 2, "learning_rate": 0.1}
    publish(in_process.ADDRESS, name, task, client=client, method=method, **{**usual, **settings})
    found, failed = {}, []

    def take_part(device, data):
        given = {"data": str(data)} if not isinstance(data, Task) else {}
        try:
            found[device] = join(
                in_process.ADDRESS,
                data if isinstance(data, Task) else None,
                **given,
                client=client,
                federation=name,
                name=device,
                state_dir=folder / f"{name}-{device}",
                export=folder / f"{name}-{device}.onnx",
                options=JoinOptions(deterministic=True),
                quiet=True,
            )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=take_part, args=each) for each in devices.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def predict(path, raw):
    """Run an exported file as people who have no Sparrow do."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return session.run(None, {given.name: raw})[0], session.get_modelmeta().custom_metadata_map


def raw_rows(path, said):
    """Decode a table by the metadata of an exported file, as docs/your-data.md shows it."""
    columns = json.loads(said["preparation"])["columns"]
    label = json.loads(said["targets"])["column"]

    def number(column, text):
        kinds = column["categories"]
        if not kinds:
            return float(text)
        return kinds.index(text) if text in kinds else -1

    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    raw = np.array([[number(column, row[column["name"]]) for column in columns] for row in rows], np.float32)
    return raw, [row[label] for row in rows]


def surely(scores):
    """Return for which samples the best score leads by more than rounding."""
    best = np.sort(scores, axis=1)
    return best[:, -1] - best[:, -2] > MARGIN


# --- tables ----------------------------------------------------------------------------------------------------------


def test_three_tables_with_other_classes_each_share_one_numbering(client, tmp_path, compiling):
    kinds = {"kitchen": ["idle", "walk"], "bath": ["fall", "idle"], "hall": ["walk", "fall"]}
    files = {name: write(tmp_path / f"{name}.csv", readings(600, each, 1)) for name, each in kinds.items()}
    everything = write(tmp_path / "all.csv", readings(900, list(KINDS), 2))
    task = load_to_publish(
        "npz", f"{files['kitchen']},label=activity", {}, device="publisher", publishing=own.Publishing(tuple(KINDS))
    )
    results = federate(client, "home", task, files, tmp_path, method="fedspu")
    for name, result in results.items():
        scores, said = predict(
            tmp_path / f"home-{name}.onnx", raw_rows(files[name], _said(tmp_path / f"home-{name}.onnx"))[0]
        )
        assert json.loads(said["class_names"]) == list(KINDS)
        raw, wanted = raw_rows(everything, said)
        scores, _ = predict(tmp_path / f"home-{name}.onnx", raw)
        known = [number for number, label in enumerate(wanted) if label in kinds[name]]
        right = np.mean([list(KINDS)[scores[number].argmax()] == wanted[number] for number in known])
        assert right > 0.9, f"{name}: {right}"
        assert result.accuracy_after > 0.9
        # Rows in other units must fail, or this test would prove nothing.
        wrong, labels = raw_rows(write(tmp_path / "wrong.csv", readings(900, list(KINDS), 2, scale=100)), said)
        answers, _ = predict(tmp_path / f"home-{name}.onnx", wrong)
        assert np.mean([list(KINDS)[each.argmax()] == label for each, label in zip(answers, labels, strict=True)]) < 0.6


def _said(path):
    return onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map


def engine_answers(task, state, raw_task):
    """Return the scores of a device's model for raw samples by PyTorch, and the samples."""
    source = read_source(state)
    model = raw_task.seeded(0).model
    model.load_state_dict({name: torch.from_numpy(np.array(each)) for name, each in source.tensors.items()})
    return model.eval()


def test_every_answer_is_that_of_the_trained_model(client, tmp_path, compiling):
    data = write(tmp_path / "a.csv", readings(2_000, list(KINDS), 3))
    task = load_to_publish("npz", f"{data},label=activity", {}, device="publisher")
    result = federate(client, "answers", task, {"one": data}, tmp_path)["one"]
    raw, targets = task.test.arrays.take(slice(0, None))
    assert len(raw) >= 500
    model = engine_answers(task, tmp_path / "answers-one", task)
    from sparrow.export.preparation import Preparer

    with torch.no_grad():
        wanted = model(torch.from_numpy(Preparer(task.preparation.graph)(raw))).numpy()
    found, _ = predict(tmp_path / "answers-one.onnx", raw)
    sure = surely(wanted)
    assert (found.argmax(1) == wanted.argmax(1))[sure].all()
    accuracy = (found.argmax(1) == targets).mean()
    assert accuracy == pytest.approx(result.accuracy_after, abs=1 / len(raw))
    assert accuracy > 0.1 + np.bincount(targets).max() / len(targets)


def test_a_regression_answers_in_the_unit_of_its_targets(client, tmp_path, compiling):
    random = np.random.default_rng(4)

    def houses(count):
        area, rooms = random.uniform(20, 200, count), random.integers(1, 7, count)
        price = 2_000 * area + 15_000 * rooms + random.normal(0, 10_000, count)
        return [(f"{a:.1f}", int(b), f"{c:.2f}") for a, b, c in zip(area, rooms, price, strict=True)]

    head = ("area", "rooms", "price")
    files = {name: write(tmp_path / f"{name}.csv", houses(800), head) for name in ("alice", "bob")}
    task = load_to_publish("npz", f"{files['alice']},label=price", {}, device="publisher")
    results = federate(client, "prices", task, files, tmp_path, rounds=8)
    assert results["bob"].metrics["r2"] > 0.9
    assert set(results["bob"].metrics) == {"rmse", "mae", "r2"}
    said = _said(tmp_path / "prices-bob.onnx")
    raw, prices = raw_rows(write(tmp_path / "test.csv", houses(600), head), said)
    found, _ = predict(tmp_path / "prices-bob.onnx", raw)
    wanted = np.array(prices, np.float64)
    assert np.sqrt(np.mean((found[:, 0] - wanted) ** 2)) < 0.3 * wanted.std()
    other, _ = predict(tmp_path / "prices-bob.onnx", raw * np.float32(10.76))
    assert np.sqrt(np.mean((other[:, 0] - wanted) ** 2)) > wanted.std()


def test_bytes_stay_bytes_up_to_the_exported_file(client, tmp_path, compiling):
    random = np.random.default_rng(5)

    def pictures(count):
        corner = random.integers(0, 4, count)
        x = random.integers(0, 90, (count, 12, 12), dtype=np.uint8)
        for image, place in zip(x, corner, strict=True):
            image[place // 2 * 6 :, place % 2 * 6 :][:6, :6] += np.uint8(90)
        return x, np.array(["nw", "ne", "sw", "se"])[corner]

    for name in ("one", "two"):
        x, y = pictures(400)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    task = load_to_publish("npz", str(tmp_path / "one.npz"), {}, device="publisher")
    federate(client, "pictures", task, {name: tmp_path / f"{name}.npz" for name in ("one", "two")}, tmp_path, rounds=4)
    x, y = pictures(500)
    scores, said = predict(tmp_path / "pictures-two.onnx", x)
    assert json.loads(said["preparation"])["dtype"] == "uint8"
    names = np.array(json.loads(said["class_names"]))
    assert (names[scores.argmax(1)] == y).mean() > 0.9
    assert (names[predict(tmp_path / "pictures-two.onnx", x // 20)[0].argmax(1)] == y).mean() < 0.9


# --- every kind in every form ----------------------------------------------------------------------------------------


class Halved(nn.Module):
    """A user's own preparation: a change of type, a shift and a constant of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("middle", torch.tensor([100.0, 50.0, 0.0, 25.0]))

    def forward(self, raw):
        return (raw.float() - self.middle) / 50


def _table(tmp_path, own_statistics=False):
    data = write(tmp_path / "t.csv", readings(400, list(KINDS), 6))
    publishing = own.Publishing(own=own_statistics)
    return load_to_publish("npz", f"{data},label=activity", {}, device="publisher", publishing=publishing), data


def _module(tmp_path):
    random = np.random.default_rng(7)
    targets = random.integers(0, 3, 400)
    raw = random.integers(0, 60, (400, 4)).astype(np.uint8)
    raw[np.arange(400), targets] += 150
    parts = [ArrayBatches(Arrays(raw[cut], targets[cut]), 16) for cut in (slice(240), slice(240, 300), slice(300, 400))]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    loss = nn.CrossEntropyLoss()
    return Task("own", model, loss, *parts, preparation=Halved(), class_names=tuple(KINDS)), None


PREPARATIONS = {
    "standardise and one-hot": _table,
    "each device's own statistics": lambda folder: _table(folder, own_statistics=True),
    "a module": _module,
}
FORMS = [("dense", "fp32"), ("compact", "fp32"), ("packed", "fp32"), ("packed", "fp16"), ("packed", "int8")]


@pytest.mark.parametrize("method", ["fedavg", "pfedgate", "dmpfl", "fedem"])
@pytest.mark.parametrize("kind", PREPARATIONS)
def test_each_form_answers_raw_samples_as_the_model_does_prepared_ones(client, tmp_path, compiling, kind, method):
    task, data = PREPARATIONS[kind](tmp_path)
    name = f"{method}-{list(PREPARATIONS).index(kind)}"
    federate(client, name, task, {"one": task if data is None else data}, tmp_path, method=method, rounds=8)
    source = read_source(tmp_path / f"{name}-one")
    if data is None:
        raw = task.test.arrays.take(slice(0, 64))[0]
        samples = None
    else:
        samples = read_raw_samples(str(data), source.manifest, source.class_names)
        raw = samples.inputs[:64]
    plain = dense(source)
    dynamic = [("dynamic", "fp32")] if method in ("pfedgate", "dmpfl") else []
    for mode, precision in FORMS + dynamic:
        if precision == "int8" and samples is None:
            continue
        outputs = {}
        for composed in (True, False):
            path = tmp_path / f"{mode}-{precision}-{composed}.onnx"
            options = Options(mode, precision, accuracy_limit=1.0, with_preparation=composed)
            export_model(source, plain, path, options, samples=samples)
            given = raw
            if not composed:
                from sparrow.export.preparation import Preparer

                given = Preparer(source.preparation)(raw)
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            entry = session.get_inputs()[0].name
            for batch in (1, 7):
                parts = [session.run(None, {entry: given[start : start + batch]})[0] for start in range(0, 63, batch)]
                outputs[composed, batch] = np.concatenate(parts)
        scale = max(1.0, float(np.abs(outputs[False, 7]).max()))
        for batch in (1, 7):
            difference = np.abs(outputs[True, batch] - outputs[False, batch]).max()
            assert difference <= 1e-5 * scale, (mode, precision, batch)
        assert session is not None
    composed = onnxruntime.InferenceSession(str(tmp_path / "packed-fp32-True.onnx"))
    assert composed.get_inputs()[0].name == "input"
    import onnx

    nodes = onnx.load(tmp_path / "packed-fp32-True.onnx").graph.node
    assert any(node.name.startswith(PREFIX) or node.output[0].startswith(PREFIX) for node in nodes)


# --- what goes wrong, and what changes -------------------------------------------------------------------------------


def test_another_preparation_starts_the_devices_models_again(client, tmp_path, compiling):
    task, data = _table(tmp_path)
    settings = {"rounds": 3}
    federate(client, "again", task, {"one": data}, tmp_path, **settings)
    state = tmp_path / "again-one"
    before = read_source(state)
    from dataclasses import replace

    from edge_sdk.tasks.preparing import prepare_rows, statistics_of

    raw = task.train.arrays.take(slice(0, None))[0]
    columns = task.preparation.description.columns
    other = prepare_rows(columns, statistics_of([raw[:50]], 0, columns))
    publish(in_process.ADDRESS, "again", replace(task, preparation=other), client=client, replace=True)
    client.patch("/v1/federations/again", json={"action": "reopen", "rounds": 6}).raise_for_status()
    said = []
    result = join(
        in_process.ADDRESS,
        client=client,
        data=str(data),
        federation="again",
        name="one",
        state_dir=state,
        export=tmp_path / "again.onnx",
        on_progress=lambda moment: said.append(moment.text),
        options=JoinOptions(deterministic=True),
    )
    after = read_source(state)
    assert after.manifest.preparation_sha256 != before.manifest.preparation_sha256
    assert result.rounds == 3, "rounds of the model before do not count for the new one"
    found, _ = predict(tmp_path / "again.onnx", raw)
    assert (found.argmax(1) == task.train.targets).mean() > 0.8


def test_a_replaced_model_keeps_the_names_of_its_classes(client, tmp_path, compiling):
    task, _ = _module(tmp_path)
    publish(in_process.ADDRESS, "names", task, client=client, method="fedavg")
    from dataclasses import replace

    from edge_sdk.errors import DifferentFederation

    with pytest.raises(DifferentFederation, match="names"):
        publish(
            in_process.ADDRESS,
            "names",
            replace(task, class_names=("walk", "idle", "fall")),
            client=client,
            replace=True,
        )


def test_data_in_other_units_are_noticed_by_device_and_operator(client, tmp_path, compiling):
    task, _ = _table(tmp_path)
    wild = write(tmp_path / "wild.csv", readings(400, list(KINDS), 6, scale=1000))
    publish(in_process.ADDRESS, "units", task, client=client, method="fedavg", rounds=1, min_devices=1)
    said = []
    join(
        in_process.ADDRESS,
        client=client,
        data=str(wild),
        federation="units",
        name="wild",
        state_dir=tmp_path / "wild",
        on_progress=lambda moment: said.append(moment.text or ""),
    )
    assert any("acceleration: standard deviation here" in text for text in said)
    (device,) = client.get("/v1/federations/units/devices").json()
    assert [text for text in device["profile"]["data_warnings"] if "acceleration" in text]
    assert not any(
        character.isdigit() for text in device["profile"]["data_warnings"] for character in text.replace("5", "")
    )


def test_a_preparation_is_refused_where_there_is_none(client, tmp_path):
    task, _ = _module(tmp_path)
    from dataclasses import replace

    plain = replace(
        task,
        preparation=None,
        train=[(np.zeros((8, 4), "f4"), np.zeros(8, int))],
        validation=[(np.zeros((8, 4), "f4"), np.zeros(8, int))],
        test=None,
    )
    publish(in_process.ADDRESS, "bare", plain, client=client, method="fedavg")
    with ExitStack(), pytest.raises(BadArgument, match="published without one"):
        join(in_process.ADDRESS, task, client=client, federation="bare", name="one", state_dir=tmp_path / "bare")


def test_the_state_folder_keeps_what_the_devices_data_add(client, tmp_path, compiling):
    task, data = _table(tmp_path, own_statistics=True)
    federate(client, "statistics", task, {"one": data}, tmp_path, rounds=1)
    manifest = read_source(tmp_path / "statistics-one").manifest
    kept = personal.read_own((tmp_path / "statistics-one" / personal.OWN).read_bytes(), manifest.preparation_sha256)
    assert {name: len(values) for name, values in kept.items()} == {"own:mean": 3, "own:deviation": 3}
    assert not manifest.preparation.mean, "no statistic was published"
