"""Pictures, sounds and recordings as they lie on disk, into exported models that take them raw: whole federations."""

import csv
import json

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from edge_sdk.predict import Predictor, read_inputs
from edge_sdk.publish import PublishOptions, load_to_publish
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.export.build import dense
from sparrow.export.exporter import Options, export_model
from sparrow.export.preparation import Preparer
from sparrow.export.samples import read_raw_samples
from sparrow.export.source import read_source
from sparrow.reading import read_file
from sparrow.simulation import in_process

from .test_data_path import FORMS, engine_answers, federate, predict, surely

CLASSES = ("long", "round", "short")
RATE = 8_000
SUFFIXES = ("PNG", "bmp", "webp")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    settings = Settings(data_dir=tmp_path_factory.mktemp("coordinator"), default_task="", log_level="ERROR")
    with in_process.running(create_app(settings)) as found:
        yield found


# --- data as people have them ----------------------------------------------------------------------------------------


def write_pictures(folder, count, seed, dim=1):
    """Bright bars and a disc on noise, of mixed sizes, in colour and grey."""
    random = np.random.default_rng(seed)
    for number in range(count):
        kind = CLASSES[number % 3]
        height, width = random.integers(30, 70, 2)
        pixels = random.integers(0, 70, (height, width, 3))
        rows, columns = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        shape = {
            "long": abs(columns) < 0.3,
            "short": abs(rows) < 0.3,
            "round": rows**2 + columns**2 < 0.5,
        }[kind]
        pixels[shape] += 120
        image = Image.fromarray((pixels // dim).astype(np.uint8))
        path = folder / kind / f"{number:04}.{SUFFIXES[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        (image.convert("L") if number % 5 == 0 else image).save(path, lossless=True)
    return folder


def raw_picture(path, said):
    assert said["axes"] == "HWC"
    return np.asarray(Image.open(path).convert("RGB"))


def write_sounds(folder, count, seed, dim=1):
    """Tones that rise, fall or stay, of mixed lengths, in two rates."""
    random = np.random.default_rng(seed)
    for number in range(count):
        kind = CLASSES[number % 3]
        rate = RATE if number % 2 else 2 * RATE
        length = int(rate * random.uniform(0.25, 0.5))
        path = np.geomspace(*{"long": (400, 1_200), "short": (1_200, 400), "round": (700, 700)}[kind], length)
        tone = np.sin(2 * np.pi * np.cumsum(path * random.uniform(0.9, 1.1)) / rate) * np.hanning(length)
        samples = 0.4 * tone + random.normal(0, 0.01, length)
        file = folder / kind / f"{number:04}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, (samples if dim == 1 else samples[::-1]).astype(np.float32), rate, subtype="PCM_16")
    return folder


def raw_sound(path, said):
    import soxr

    samples, rate = soundfile.read(path, dtype="float32")
    return samples if rate == said["rate"] else soxr.resample(samples, rate, said["rate"]).clip(-1, 1)


def write_recordings(path, count, seed, dim=1):
    """Accelerations at 50 Hz in m/s2: `count` recordings of 12 s, each of one activity."""
    random = np.random.default_rng(seed)
    rows, start = [], 0.0
    for number in range(count):
        kind = CLASSES[number % 3]
        time = np.arange(600) / 50
        beat = {"long": 0.7, "round": 2.0, "short": 5.0}[kind] * random.uniform(0.9, 1.1)
        move = 3 * np.sin(2 * np.pi * (beat * time[:, None] + random.uniform(0, 1, 3)))
        move = move / dim + [0, 0, 9.81] + random.normal(0, 0.3, (600, 3))
        rows += [
            [f"{start + t:.2f}", *(f"{value:.4f}" for value in each), kind] for t, each in zip(time, move, strict=True)
        ]
        start += 60
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["time_s", "ax", "ay", "az", "activity"], *rows])
    return path


def raw_windows(path, said):
    """Cut a table into windows, as docs/your-data.md says."""
    with path.open(newline="") as file:
        rows = [(each["activity"], [float(each[name]) for name in ("ax", "ay", "az")]) for each in csv.DictReader(file)]
    length, step = said["shape"][0], round(said["step"] * said["rate"])
    found = []
    for begin in range(0, len(rows), 600):
        part = rows[begin : begin + 600]
        for first in range(0, len(part) - length + 1, step):
            found.append((part[0][0], np.array([each[1] for each in part[first : first + length]], np.float32)))
    return found


def samples_of(folder, read, said):
    """Return (class, raw sample) of each file of a folder."""
    return [(path.parent.name, read(path, said)) for path in sorted(folder.glob("*/*"))]


KINDS = {
    "pictures": (write_pictures, "", lambda place, said: samples_of(place, raw_picture, said), 150, 510),
    "sounds": (write_sounds, f",rate={RATE}", lambda place, said: samples_of(place, raw_sound, said), 90, 510),
    "recordings.csv": (write_recordings, ",label=activity,window=2.56s,step=1.28s", raw_windows, 30, 66),
}


# --- from folders to answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_raw_samples_have_the_answers_of_training(client, tmp_path, compiling, kind):
    write, options, read, count, many = KINDS[kind]
    devices = {name: write(tmp_path / f"{name}-{kind}", count, seed) for seed, name in enumerate(("ada", "bo"))}
    task = load_to_publish("npz", f"{devices['ada']}{options}", {}, device="publisher")
    name = kind.partition(".")[0]
    results = federate(client, name, task, devices, tmp_path, rounds=6, learning_rate=0.05, local_epochs=3)
    exported = tmp_path / f"{name}-bo.onnx"
    said = json.loads(predict(exported, _one(task))[1]["preparation"])
    fresh = read(write(tmp_path / f"fresh-{kind}", many, 9), said)
    assert len(fresh) >= 500
    answers = np.concatenate([predict_one(exported, raw) for _, raw in fresh])
    model = engine_answers(task, tmp_path / f"{name}-bo", task)
    prepared = np.concatenate([Preparer(task.preparation.graph)([raw]) for _, raw in fresh])
    with torch.no_grad():
        wanted = model(torch.from_numpy(prepared)).numpy()
    assert (answers.argmax(1) == wanted.argmax(1))[surely(wanted)].all()
    right = np.mean([CLASSES[scores.argmax()] == label for scores, (label, _) in zip(answers, fresh, strict=True)])
    assert right > 0.5
    assert results["bo"].accuracy_after > 0.5
    predictor = Predictor(exported)
    given = read_inputs(str(tmp_path / f"fresh-{kind}"), predictor)
    alike = np.concatenate([predictor(np.asarray(one)[None]) for one in given])
    if name != "recordings":
        # Without labels, windows of a table may lie across recordings.
        np.testing.assert_allclose(alike, answers, atol=1e-3 * np.abs(answers).max())
    assert len(alike) >= 500
    # What is recorded otherwise must fail, or this test would prove nothing.
    wrong = read(write(tmp_path / f"wrong-{kind}", 90, 9, dim=20), said)
    answers = [CLASSES[predict_one(exported, raw).argmax()] == label for label, raw in wrong]
    assert np.mean(answers) < right - 0.1


_SESSIONS = {}


def predict_one(path, raw):
    """Run a sample in plain onnxruntime."""
    import onnxruntime

    if path not in _SESSIONS:
        _SESSIONS[path] = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = _SESSIONS[path]
    return session.run(None, {session.get_inputs()[0].name: raw[None]})[0]


def _one(task):
    inputs = task.test.arrays.inputs
    return np.asarray(inputs[0])[None]


@pytest.mark.parametrize(("kind", "method"), [*((kind, "fedavg") for kind in KINDS), ("recordings.csv", "pfedgate")])
def test_each_form_takes_raw_samples(client, tmp_path, kind, method):
    write, options, _, _, _ = KINDS[kind]
    data = write(tmp_path / kind, 60 if "." not in kind else 12, 3)
    task = load_to_publish("npz", f"{data}{options}", {}, device="publisher")
    name = f"{method}-{kind.partition('.')[0]}"
    federate(
        client,
        name,
        task,
        {"one": data},
        tmp_path,
        method=method,
        rounds=2,
        learning_rate=0.02,
        options=PublishOptions(compiled=False),
    )
    source = read_source(tmp_path / f"{name}-one")
    samples = read_raw_samples(f"{data}{options}", source.manifest, source.class_names)
    plain, preparer = dense(source), Preparer(source.preparation)
    raw = np.asarray(samples.inputs[0])
    random = np.random.default_rng(0)
    kept = random.random((7, *raw.shape)) < 0.9
    batch = np.where(kept, raw[None], np.zeros_like(raw[None]))
    for mode, precision in FORMS + [("dynamic", "fp32")] * (method == "pfedgate"):
        found = {}
        for composed in (True, False):
            path = tmp_path / f"{mode}-{precision}-{composed}.onnx"
            options_of = Options(mode, precision, accuracy_limit=1.0, with_preparation=composed)
            export_model(source, plain, path, options_of, samples=samples)
            given = batch if composed else preparer(batch)
            found[composed] = predict(path, given)[0]
            alone = np.concatenate([predict(path, given[place : place + 1])[0] for place in range(7)])
            np.testing.assert_allclose(alone, found[composed], atol=1e-3 * max(1.0, np.abs(alone).max()))
        scale = max(1.0, float(np.abs(found[False]).max()))
        assert np.abs(found[True] - found[False]).max() <= 1e-5 * scale, (mode, precision)


# --- several devices in one folder -----------------------------------------------------------------------------------


def test_a_folder_is_dealt_to_several_devices(client, tmp_path, compiling):
    folder = write_pictures(tmp_path / "all", 90, 4)
    whole = {number: f"{folder},index={number},of=2,partition=iid" for number in range(2)}
    task = load_to_publish("npz", whole[0], {}, device="publisher")
    results = federate(
        client, "dealt", task, {f"d{number}": data for number, data in whole.items()}, tmp_path, rounds=1
    )
    assert all(result.rounds == 1 for result in results.values())
    assert len(read_file(folder)[""].inputs) == 90
