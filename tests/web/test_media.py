"""The page reads pictures and sounds as the SDK does, prepares them alike, and takes those of camera and microphone."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import soundfile
from PIL import Image

from edge_sdk.tasks import own
from edge_sdk.tasks.preparing import Hearing, prepare_pictures, prepare_sounds
from sparrow.coordinator.web import runtime
from sparrow.export.preparation import Preparer
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading.errors import DataError

pytestmark = pytest.mark.integration

needs_runtime = pytest.mark.skipif(runtime.missing(), reason="no runtime for pages here: run sparrow web")

RATE = 16_000
PICTURES = prepare_pictures((16, 12), (4096, 4096, 3), (0, 1))
SOUNDS = prepare_sounds(Hearing.of(RATE, RATE // 2), 30 * RATE, None)
USES = ("train", "validation", "test")

READ = """async ({ readFolder }, [files, text, seed]) => {
  const { Manifest } = await import("/web/manifest.js"), { decoded } = await import("/web/raw.js");
  const { fromFolder } = await import("/web/samples.js");
  const bytes = (content) => Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const given = files.map(([path, content]) => [path, new File([bytes(content)], path.split("/").at(-1))]);
  const listed = async ({ inputs, targets }) => {
    const all = [];
    for (const each of inputs) {
      const { values, shape } = await decoded(each, manifest.preparation);
      all.push([values.constructor.name, shape, Array.from(values)]);
    }
    return [all, [...targets]];
  };
  const manifest = new Manifest(text);
  try {
    const { names, said, ...parts } = fromFolder(await readFolder(given, manifest.preparation), manifest, BigInt(seed));
    const found = { names, said };
    for (const [use, part] of Object.entries(parts)) found[use] = part && await listed(part);
    return found;
  } catch ({ name, message }) {
    return [name, message];
  }
}"""

PREPARED = """async ({ Engine }, [text, graph, files]) => {
  const { Manifest } = await import("/web/manifest.js"), { readMedium } = await import("/web/folders.js");
  const bytes = (content) => Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const manifest = new Manifest(text), inputs = [];
  for (const [name, content] of files) {
    inputs.push((await readMedium(new File([bytes(content)], name), manifest.preparation)).kept);
  }
  const engine = new Engine(manifest, { preparation: async () => bytes(graph) }, new Map(), new Map());
  return Array.from(await engine.prepare({ inputs, count: inputs.length }));
}"""


def federation(built=PICTURES, names=("cat", "dog"), shape=(3, 16, 12), **described):
    return Manifest(
        task="own",
        input_shape=shape,
        output_shape=(len(names),),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=built.description.model_copy(update={"steps": (), **described}),
        preparation_sha256="ab" * 32,
        targets=Targets(names=names),
    )


HEARD = federation(SOUNDS, names=("beep", "hum"), shape=(1, 40, 98))


def in_base64(content):
    return base64.b64encode(content).decode()


def files_in(folder):
    return [
        [f"{folder.name}/{path.relative_to(folder).as_posix()}", in_base64(path.read_bytes())]
        for path in sorted(folder.rglob("*"), reverse=True)
        if path.is_file()
    ]


def on_the_page(modules, folder, manifest, seed=0):
    return modules(READ, module="folders.js", argument=[files_in(folder), manifest.text, str(seed)])


def of_the_sdk(folder, manifest, seed=0):
    """What the page must read of a folder, by the SDK."""
    task = own.load(str(folder), device="d", seed=seed, batch_size=8, manifest=manifest)
    found = {"names": list(task.class_names), "said": task.said[0].replace(str(folder), folder.name)}
    for use in USES:
        batches = getattr(task, use)
        found[use] = batches and [list(batches.arrays.inputs), batches.arrays.targets.tolist()]
    return found


def check_alike(modules, folder, manifest, seed=0, check=np.testing.assert_array_equal):
    """Check what the page reads of a folder against the SDK, and return it."""
    found, wanted = on_the_page(modules, folder, manifest, seed), of_the_sdk(folder, manifest, seed)
    assert isinstance(found, dict), found
    assert (found["names"], found["said"]) == (wanted["names"], wanted["said"])
    for use in USES:
        if wanted[use] is None:
            assert found[use] is None
            continue
        samples, targets = found[use]
        assert targets == wanted[use][1]
        assert len(samples) == len(targets)
        for (kind, shape, values), raw in zip(samples, wanted[use][0], strict=True):
            assert kind == {"uint8": "Uint8Array", "float32": "Float32Array"}[raw.dtype.name]
            check(np.reshape(values, shape), raw)
    return found


# --- pictures ----------------------------------------------------------------------------------------------------


def noise(height, width, channels=3, seed=0):
    chance = np.random.default_rng([seed, height, width])
    return chance.integers(0, 256, (height, width, channels)[: 2 + (channels > 1)], dtype=np.uint8)


def smooth(height, width):
    """A picture that a JPEG file keeps well."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 255 // height, columns * 255 // width, 0 * rows + 99], 2).astype(np.uint8)


def packed(array, kind="PNG", **how):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **how)
    return file.getvalue()


def opaque(array):
    return np.dstack([array, np.full(array.shape[:2], 255, np.uint8)])


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def written(folder, files):
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return folder


LOSSLESS = {
    **{f"cat/{place}.png": packed(noise(20 + place, 31 - place)) for place in range(9)},
    "dog/grey.png": packed(noise(16, 9, channels=1)),
    "dog/palette.gif": packed(noise(8, 8, channels=1), "GIF"),
    "dog/bitmap.bmp": packed(noise(9, 8), "BMP"),
    "dog/plain.webp": packed(noise(17, 30), "WEBP", lossless=True),
    "dog/upside down.png": packed(noise(12, 30), exif=turned(3)),
    "dog/z.PNG": packed(noise(12, 31)),
}


@pytest.mark.parametrize("seed", [0, 2**62 + 3])
def test_pictures_are_read_as_by_the_sdk(modules, tmp_path, seed):
    folder = written(tmp_path / "photos", LOSSLESS)
    found = check_alike(modules, folder, federation(), seed)
    assert found["said"] == "photos: 15 samples (9 train, 1 check, 5 test); class: cat 9, dog 6; up to uint8 28x31x3"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright(modules, tmp_path, orientation):
    files = {
        f"{name}/{place}.jpg": packed(smooth(40 + place, 64), "JPEG", quality=90, exif=turned(orientation))
        for place, name in enumerate(("cat", "dog", "cat", "dog"))
    }

    def check(found, raw):
        assert found.shape == raw.shape
        difference = np.abs(found.astype(int) - raw)
        assert difference.mean() <= 1
        assert difference.max() <= 2

    check_alike(modules, written(tmp_path / "photos", files), federation(), check=check)


def test_opaque_pictures_are_exact_and_transparent_ones_close(modules, tmp_path):
    """The SDK says of every file with alpha that it is left out, the page of those that are transparent."""
    whole = {f"cat/{place}.png": packed(opaque(noise(9, 9, seed=place))) for place in range(4)}
    folder, manifest = written(tmp_path / "photos", whole), federation()
    found, wanted = on_the_page(modules, folder, manifest), of_the_sdk(folder, manifest)
    assert found["said"] + "; transparency is left out (4 pictures)" == wanted["said"]
    for use in USES:
        for (_, shape, values), raw in zip(found[use][0], wanted[use][0], strict=True):
            np.testing.assert_array_equal(np.reshape(values, shape), raw)
    half = noise(9, 9, channels=4)
    half[..., 3] = 128
    written(folder, {f"cat/{place}.png": packed(half) for place in range(4)})

    def close_to(found, raw):
        np.testing.assert_allclose(found.astype(int), raw, atol=1)

    check_alike(modules, folder, manifest, check=close_to)


def test_parts_and_what_is_left_out(modules, tmp_path):
    def picture(seed):
        return packed(noise(8, 8, seed=seed))

    folder = written(
        tmp_path / "photos",
        {f"Train/{name}/{place}.png": picture(place) for name in ("cat", "dog") for place in range(10)}
        | {f"test/{name}/{place}.png": picture(place + 50) for name in ("cat", "dog") for place in range(2)}
        | {"Train/dog/notes.txt": b"a", "Train/dog/more": b"b", "Train/read.me": b"c", "list.csv": b"d"}
        | {"Train/cat/old/1.png": picture(90), "test/bird/song.txt": b"e"},
    )
    found = check_alike(modules, folder, federation())
    assert "1 .csv, 1 .me" in found["said"]
    plain = found["said"]
    written(folder, {"Train/cat/.DS_Store": b"a", "Train/cat/._1.png": b"b", "Thumbs.db": b"c", "__MACOSX/1.png": b"d"})
    assert on_the_page(modules, folder, federation())["said"] == f"{plain}; 4 hidden files were left out"


def check_refused(modules, folder, manifest, said):
    """Check that page and SDK refuse a folder, the page with these words."""
    with pytest.raises(DataError):
        of_the_sdk(folder, manifest)
    name, message = on_the_page(modules, folder, manifest)
    assert name == "DataError"
    assert said in message
    assert "=" not in message, "a page has no options"


GOOD = {f"{name}/{place}.png": packed(noise(8, 8)) for name in ("cat", "dog") for place in range(3)}
LARGE = packed(np.zeros((4097, 2, 3), np.uint8))
WRONG = {
    "broken": ({"cat/9.png": b"\x89PNG\r\n\x1a\n"}, "photos/cat/9.png: cannot be read as a picture; copy it again"),
    "truncated": ({"cat/9.jpg": packed(noise(200, 200), "JPEG")[:9000]}, "photos/cat/9.jpg: cannot be read as a"),
    "empty": ({"dog/9.png": b""}, "photos/dog/9.png: is empty; copy the picture again"),
    "too large": ({"dog/9.png": LARGE}, "photos/dog/9.png: has 2 x 4097 pixels; it must have at most 4096 x 4096"),
    "another class": ({"cow/9.png": GOOD["cat/0.png"]}, "photos: has the class 'cow'; the federation's are cat, dog"),
    "sounds among them": (
        {"dog/a.wav": b"RIFF"},
        "photos: holds 6 pictures, such as cat/0.png and 1 sound, such as dog/a.wav; put them into separate folders",
    ),
    "a part beside classes": (
        {"test/cat/1.png": GOOD["cat/0.png"]},
        "photos: test holds folders of classes, but cat, dog is beside it; name parts train, val and test",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders_are_refused_by_both(modules, tmp_path, case):
    files, said = WRONG[case]
    check_refused(modules, written(tmp_path / "photos", GOOD | files), federation(), said)


def test_folders_without_classes_are_refused_by_both(modules, tmp_path):
    flat = written(tmp_path / "flat", {"1.png": GOOD["cat/0.png"]})
    check_refused(modules, flat, federation(), "flat: holds 1 file and no folders; give a folder for each class")
    bare = written(tmp_path / "bare", {"cat/1.txt": b"a"})
    check_refused(modules, bare, federation(), "bare: holds no picture and no sound in folders of classes (1 .txt)")
    part = written(tmp_path / "part", {"val/cat/1.png": GOOD["cat/0.png"]})
    check_refused(modules, part, federation(), "part: has val, but no train; add it")
    long = written(tmp_path / "long", {f"{'c' * 201}/1.png": GOOD["cat/0.png"]})
    check_refused(modules, long, federation(), "has 201 characters; use at most 200")
    check_refused(modules, flat.parent / "bare", HEARD, "bare: holds no picture")
    pictures = written(tmp_path / "photos", GOOD)
    check_refused(
        modules, pictures, HEARD, "photos: holds pictures, the federation's samples are sounds; give a folder"
    )


@pytest.mark.parametrize(
    ("free", "shape", "said"),
    [
        ((), (8, 9, 3), "has 8 x 8 pixels, the federation's pictures have 9 x 8; scale it"),
        ((0, 1), (7, 8, 3), "has 8 x 8 pixels, the federation takes at most 8 x 7; make it smaller"),
    ],
)
def test_pictures_beyond_the_federations_are_refused_by_both(modules, tmp_path, free, shape, said):
    folder, manifest = written(tmp_path / "photos", GOOD), federation(free=free, shape=(3, 16, 12))
    description = manifest.preparation.model_copy(update={"shape": shape})
    check_refused(
        modules, folder, manifest.model_copy(update={"preparation": description}), f"photos/cat/0.png: {said}"
    )


@needs_runtime
def test_pictures_of_several_sizes_are_prepared_as_by_the_sdk(modules):
    files = [[name, in_base64(content)] for name, content in LOSSLESS.items()]
    found = modules(PREPARED, module="engine.js", argument=[federation().text, in_base64(PICTURES.graph), files])
    pictures = [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in LOSSLESS.values()]
    pictures[list(LOSSLESS).index("dog/upside down.png")] = pictures[13][::-1, ::-1]
    wanted = Preparer(PICTURES.graph)([np.ascontiguousarray(each) for each in pictures])
    np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, atol=1e-4)


# --- sounds ------------------------------------------------------------------------------------------------------


def tone(seconds, rate=RATE, pitch=440.0, loud=0.5):
    return (loud * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound(samples, rate=RATE, kind="WAV", subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def close(found, raw):
    assert found.shape == raw.shape
    np.testing.assert_allclose(found, raw, atol=1e-4)


HEARD_FILES = {
    **{f"beep/{place}.wav": sound(tone(0.2 + place / 10, pitch=300 + 50 * place)) for place in range(6)},
    "hum/a.wav": sound(tone(0.3, pitch=90), subtype="PCM_24"),
    "hum/b.flac": sound(tone(0.3, pitch=95), kind="FLAC"),
    "hum/c.wav": sound(np.stack([tone(0.25), tone(0.25, pitch=900)], 1)),
    "hum/d.wav": sound(np.zeros(1000)),
    "hum/e.wav": sound(1.5 * tone(0.25, loud=1.0), subtype="FLOAT"),
}


def test_sounds_are_read_as_by_the_sdk(modules, tmp_path):
    folder = written(tmp_path / "room", HEARD_FILES)
    said = check_alike(modules, folder, HEARD, check=close)["said"]
    assert said == (
        "room: 11 samples (6 train, 1 check, 4 test); class: beep 6, hum 5; up to float32 11200; the channels of 1 "
        "sound were averaged; 1 sound is silent"
    )


def test_sounds_of_another_rate_are_resampled(modules, tmp_path):
    both = np.stack([tone(0.5, 44_100), tone(0.5, 44_100, pitch=1200, loud=0.3)], 1)
    files = {f"beep/{place}.wav": sound(both[: 20_000 + 300 * place], 44_100) for place in range(4)}

    folder = written(tmp_path / "room", files)
    found, wanted = on_the_page(modules, folder, HEARD), of_the_sdk(folder, HEARD)
    assert found["said"].split("; ")[3:] == wanted["said"].split("; ")[3:]
    assert "4 sounds of 44,100 Hz" in found["said"]
    for use in USES:
        for (_, shape, values), raw in zip(found[use][0], wanted[use][0], strict=True):
            assert abs(shape[0] - len(raw)) <= 1
            length = min(shape[0], len(raw))
            assert np.corrcoef(values[:length], raw[:length])[0, 1] > 0.99


GOOD_SOUNDS = {f"beep/{place}.wav": sound(tone(0.2)) for place in range(4)}
WRONG_SOUNDS = {
    "broken": ({"beep/9.wav": b"RIFF" + b"x" * 300}, "room/beep/9.wav: cannot be read as a sound; copy it again"),
    "truncated": ({"beep/9.wav": sound(tone(0.5))[:5044]}, "room/beep/9.wav: is truncated, it ends after 0.156 s"),
    "truncated FLAC": (
        {"beep/9.flac": (whole := sound(tone(1.0), kind="FLAC"))[: len(whole) // 2]},
        "room/beep/9.flac: is truncated, it ends after",
    ),
    "empty": ({"beep/9.wav": b""}, "room/beep/9.wav: is empty; copy the sound again"),
    "short": ({"beep/9.wav": sound(tone(0.005))}, "room/beep/9.wav: lasts 5.00 ms, at least 10 ms are needed"),
    "long": ({"beep/9.wav": sound(np.zeros(2 * RATE))}, "lasts 2.000 s, the federation's sounds last at most 1.000 s"),
    "loud": ({"beep/9.wav": sound(tone(0.2) * 100, subtype="FLOAT")}, "beyond 1; scale them to -1 to 1"),
    "infinite": (
        {"beep/9.wav": sound(np.full(3200, np.inf), subtype="FLOAT")},
        "infinite or not a number; write it again",
    ),
    "pictures": ({"beep/9.png": GOOD["cat/0.png"]}, "room: holds 1 picture, such as"),
    "another class": (
        {"bang/9.wav": GOOD_SOUNDS["beep/0.wav"]},
        "has the class 'bang'; the federation's are beep, hum",
    ),
}


@pytest.mark.parametrize("case", WRONG_SOUNDS)
def test_wrong_sounds_are_refused_by_both(modules, tmp_path, case):
    files, said = WRONG_SOUNDS[case]
    description = HEARD.preparation.model_copy(update={"shape": (RATE,)})
    short = HEARD.model_copy(update={"preparation": description})
    check_refused(modules, written(tmp_path / "room", GOOD_SOUNDS | files), short, said)


@needs_runtime
def test_sounds_of_several_lengths_are_prepared_as_by_the_sdk(modules):
    names = [name for name in HEARD_FILES if name not in ("hum/c.wav", "hum/e.wav")]
    files = [[name, in_base64(HEARD_FILES[name])] for name in names]
    raw = [soundfile.read(io.BytesIO(HEARD_FILES[name]), dtype="float32")[0] for name in names]
    wanted = Preparer(SOUNDS.graph)(raw)
    manifest = federation(SOUNDS, names=("beep", "hum"), shape=wanted.shape[1:])
    found = np.reshape(
        modules(PREPARED, module="engine.js", argument=[manifest.text, in_base64(SOUNDS.graph), files]), wanted.shape
    )
    # a logarithm magnifies how browsers scale 16 bits where a band is all but silent
    loud = wanted > -4
    np.testing.assert_allclose(found[loud], wanted[loud], atol=1e-2)
    assert np.abs(found - wanted).mean() < 1e-2
    exact = names.index("hum/a.wav")
    np.testing.assert_allclose(found[exact], wanted[exact], atol=1e-4)


# --- what a person gives on the screen -----------------------------------------------------------------------------

SCREEN = """async ({ Giving }, [raw, task, act]) => {
  const page = new DOMParser().parseFromString(await (await fetch("/web/join.html")).text(), "text/html");
  document.body.replaceChildren(...page.querySelector("main").children);
  const { decoded, mediumOf } = await import("/web/raw.js"), sent = [];
  const request = async ({ read: { uses, ...rest } }) => {
    return { said: JSON.stringify([rest, Array.from(uses, ([use, { labels }]) => [use, labels])]) };
  };
  const giving = new Giving({ send: (message) => sent.push(message), request });
  const federation = {
    name: task, task, inputShape: [3, 16, 12], outputShape: [2], raw, names: ["cat", "dog"], columns: [], column: null,
  };
  const counts = { train: 0, validation: 0, test: 0, perClass: [0, 0] };
  const samples = { ...counts, source: "none", names: null, enough: false, lacks: "" };
  giving.draw({ federation, samples, phase: "ready", secure: true });
  const $ = (id) => document.getElementById(id), wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const until = async (holds) => { for (let at = 0; at < 200 && !holds(); at += 1) await wait(50); };
  const choose = (id, files) => {
    const given = new DataTransfer();
    for (const [name, content] of files) {
      given.items.add(new File([Uint8Array.from(atob(content), (character) => character.charCodeAt(0))], name));
    }
    $(id).files = given.files;
    for (const file of $(id).files) Object.defineProperty(file, "webkitRelativePath", { value: file.name });
    $(id).dispatchEvent(new Event("change"));
  };
  const [tabs, chips] = [[...$("ways").children].map(({ textContent }) => textContent), `${mediumOf(raw)}-classes`];
  $(chips).children[1].click();
  if (act.files) choose(`${mediumOf(raw)}-files`, act.files);
  if (act.folder) choose("folder", act.folder);
  for (const [id, ready] of act.press ?? []) {
    await until(() => !$(id).hidden && (!ready || $(ready).textContent || $(ready).videoWidth));
    if (ready) await wait(700);
    $(id).click();
  }
  await until(() => /dog\\.$|^\\[/.test($("data-said").textContent) || (act.folder && $("data-problem").textContent));
  giving.microphone.stop(false);
  giving.camera.close();
  const found = [];
  for (const { inputs, targets } of sent) {
    const samples = [];
    for (const each of inputs) {
      const { shape, values } = await decoded(each, raw);
      samples.push([shape, values.reduce((one, other) => Math.max(one, other))]);
    }
    found.push([samples, [...targets]]);
  }
  return { tabs, found, said: $("data-said").textContent, problem: $("data-problem").textContent };
}"""


def on_the_screen(modules, manifest, **act):
    described = manifest.preparation.model_dump(mode="json")
    raw = {key: described[key] for key in ("reader", "dtype", "shape", "axes", "free", "rate")}
    task = f"{raw['reader']} {' '.join(map(str, raw['free']))}"
    return modules(SCREEN, module="give.js", argument=[raw, task, act])


def test_pictures_are_chosen_under_a_class_and_a_broken_one_is_named(modules):
    files = [["a.png", GOOD["cat/0.png"]], ["b.png", b"broken"], ["c.png", packed(noise(30, 20))]]
    found = on_the_screen(modules, federation(), files=[[name, in_base64(content)] for name, content in files])
    assert found["tabs"] == ["Pictures", "Folder"]
    assert [[shape for shape, _ in samples] for samples, _ in found["found"]] == [[[8, 8, 3], [30, 20, 3]]]
    assert found["found"][0][1] == [1, 1]
    assert found["said"] == "2 pictures kept as dog."
    assert found["problem"] == "b.png: cannot be read as a picture; copy it again, or save it as PNG, JPEG or WebP"


def test_a_folder_is_chosen(modules):
    files = [[f"photos/{name}", in_base64(content)] for name, content in GOOD.items()]
    found = on_the_screen(modules, federation(), folder=files)
    read = {"source": "photos", "each": "each uint8 8x8x3", "said": []}
    assert json.loads(found["said"].removesuffix(".")) == [read, [["", ["cat"] * 3 + ["dog"] * 3]]]
    found = on_the_screen(modules, HEARD, folder=files)
    assert found["said"] == ""
    assert found["problem"].startswith("photos: holds pictures, the federation's samples are sounds")


@pytest.mark.parametrize(("free", "shape"), [((0, 1), (4096, 4096, 3)), ((0, 1), (120, 4096, 3)), ((), (24, 20, 3))])
def test_a_camera_gives_a_picture(modules, free, shape):
    manifest = federation(free=free)
    description = manifest.preparation.model_copy(update={"shape": shape})
    pressed = [["picture-live", None], ["camera-shoot", "camera-view"]]
    found = on_the_screen(modules, manifest.model_copy(update={"preparation": description}), press=pressed)
    ((((height, width, channels), brightest),), targets) = found["found"][0]
    assert (channels, targets, found["said"], found["problem"]) == (3, [1], "Kept as dog.", "")
    assert brightest > 100
    if free:
        assert height == min(480, shape[0])
        assert abs(width / height - 4 / 3) < 0.02
    else:
        assert (height, width) == shape[:2]


def test_a_microphone_gives_a_sound(modules):
    pressed = [["sound-record", None], ["sound-record", "sound-state"]]
    found = on_the_screen(modules, HEARD, press=pressed)
    ((((length,), loudest),), targets) = found["found"][0]
    assert (found["tabs"], targets, found["said"], found["problem"]) == (["Sounds", "Folder"], [1], "Kept as dog.", "")
    assert 0.2 * RATE < length < 5 * RATE
    assert 0 < loudest <= 1


def test_a_recording_ends_when_it_is_as_long_as_sounds_may_be(modules):
    description = HEARD.preparation.model_copy(update={"shape": (RATE // 2,)})
    found = on_the_screen(
        modules, HEARD.model_copy(update={"preparation": description}), press=[["sound-record", None]]
    )
    ((((length,), _),), _) = found["found"][0]
    assert 0.1 * RATE < length <= RATE // 2


KEPT = """async ({ Store }, [text, files]) => {
  const { Manifest } = await import("/web/manifest.js"), { decoded } = await import("/web/raw.js");
  const { readMedium } = await import("/web/folders.js"), { preparation } = new Manifest(text), inputs = [];
  for (const [name, content] of files) {
    const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
    inputs.push((await readMedium(new File([bytes], name), preparation)).kept);
  }
  const store = await Store.open("media");
  await store.put({ samples: { inputs } });
  const found = [];
  for (const each of (await store.get("samples")).inputs) {
    const { values, shape } = await decoded(each, preparation);
    found.push([each.name ?? null, shape, Array.from(values)]);
  }
  await store.delete();
  return found;
}"""


def test_a_browser_keeps_pictures_as_files_and_sounds_as_samples(modules):
    name, content = "cat/3.png", LOSSLESS["cat/3.png"]
    found = modules(KEPT, module="store.js", argument=[federation().text, [[name, in_base64(content)]]])
    assert found == [[name, [23, 28, 3], noise(23, 28).ravel().tolist()]]
    ((name, shape, values),) = modules(
        KEPT, module="store.js", argument=[HEARD.text, [["a.wav", in_base64(HEARD_FILES["hum/a.wav"])]]]
    )
    assert (name, shape) == (None, [4800])
    close(np.array(values), soundfile.read(io.BytesIO(HEARD_FILES["hum/a.wav"]), dtype="float32")[0])


def test_other_samples_than_pictures_and_sounds_come_from_files(modules):
    """Such as pictures of one channel, which only arrays can hold."""
    grey = Preparation(reader="images", dtype="uint8", shape=(8, 8, 1), axes="HWC")
    silent = Preparation(reader="audio", shape=(800,), axes="T")
    for described in (grey, silent):
        raw = described.model_dump(mode="json")
        assert modules("({ mediumOf }, raw) => mediumOf(raw)", module="raw.js", argument=raw) is None
