"""Corrupted images against sums done by hand, direct loops and the standard library."""

from __future__ import annotations

import colorsys
import io
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_sdk.tasks import load_task
from edge_sdk.tasks.corruption import CORRUPTIONS, PUBLISHED, corrupt, disk, gaussian_weights, read_published
from sparrow.reading.errors import DataError

FOLDER = Path(os.environ.get("SPARROW_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
PHOTOS = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
GREYS = PHOTOS[:, :28, :28, :1]
FOR_GREYS = [name for name in CORRUPTIONS if name != "saturate"]
NOISES = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")


def corrupted(images, name, severity, seed=0, device=0):
    return corrupt(np.asarray(images, np.uint8), name, severity, seed=seed, device=device)


def pixels(name, severity, *colours):
    """The corrupted colours of an image of one row."""
    return corrupted([[colours]], name, severity)[0, 0].tolist()


def flat(grey, count=40):
    return np.full((count, 32, 32, 3), grey, np.uint8)


# --- what all have in common


def test_the_eleven_kinds_have_their_published_names():
    assert set(CORRUPTIONS) == {
        *NOISES,
        *("gaussian_blur", "defocus_blur", "brightness", "contrast", "saturate", "pixelate", "jpeg_compression"),
    }
    assert len(CORRUPTIONS) + len(PUBLISHED) == 19
    assert not set(CORRUPTIONS) & set(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "images"), [*((each, PHOTOS) for each in CORRUPTIONS), *((each, GREYS) for each in FOR_GREYS)]
)
def test_every_corruption_keeps_shape_and_input(name, images):
    before = images.copy()
    results = [corrupted(images, name, severity) for severity in range(1, 6)]
    assert all(result.dtype == np.uint8 and result.shape == images.shape for result in results)
    assert np.array_equal(images, before)
    assert not any(np.array_equal(result, images) for result in results)
    assert not any(np.array_equal(one, other) for one, other in itertools.pairwise(results))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_draws_follow_from_seed_device_kind_and_severity(name):
    first = corrupted(PHOTOS, name, 3, seed=2**40, device=7)
    assert np.array_equal(first, corrupted(PHOTOS, name, 3, seed=2**40, device=7))
    others = [corrupted(PHOTOS, name, 3, seed=seed, device=device) for seed, device in ((2**40, 8), (0, 7))]
    assert [np.array_equal(first, other) for other in others] == [name not in NOISES] * 2


@pytest.mark.parametrize("name", FOR_GREYS)
def test_a_higher_severity_is_further_away(name):
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8)[:, None, None], (20, 32, 32, 3))
    images = (ramp // 2 + PHOTOS[:1] // 4).astype(np.uint8)
    away = [np.abs(corrupted(images, name, each).astype(int) - images).mean() for each in range(1, 6)]
    assert away == sorted(away)


def test_grey_images_have_no_saturation():
    with pytest.raises(DataError, match="saturate"):
        corrupted(GREYS, "saturate", 1)


@pytest.mark.parametrize("name", ["jpg", "Contrast", "../labels"])
def test_an_unknown_kind_is_told_with_those_there_are(name):
    with pytest.raises(DataError, match=r"gaussian_noise, .*test=published .*glass_blur"):
        corrupted(PHOTOS, name, 1)


@pytest.mark.parametrize("severity", [0, 6, -1])
def test_there_are_five_severities(severity):
    with pytest.raises(DataError, match=f"severity={severity}; choose 1 to 5"):
        corrupted(PHOTOS, "contrast", severity)


def test_what_is_no_image_of_bytes_is_refused():
    with pytest.raises(DataError, match=r"float32 of shape \(8, 8, 1\)"):
        corrupt(np.zeros((2, 8, 8, 1), np.float32), "contrast", 1, seed=0, device=0)
    with pytest.raises(DataError, match="grey or in colour"):
        corrupt(np.zeros((2, 8, 8, 4), np.uint8), "contrast", 1, seed=0, device=0)


# --- noise, in bytes; truncation takes half a grey level off the mean


@pytest.mark.parametrize(
    ("name", "severity", "deviation"),
    [
        ("gaussian_noise", 1, 0.04 * 255),
        ("gaussian_noise", 5, 0.10 * 255),
        ("speckle_noise", 1, 0.06 * 100),
        ("speckle_noise", 5, 0.20 * 100),
        ("shot_noise", 1, 255 * (100 / 255 / 500) ** 0.5),
        ("shot_noise", 5, 255 * (100 / 255 / 50) ** 0.5),
    ],
)
def test_noise_has_the_deviation_of_its_kind_and_no_bias(name, severity, deviation):
    result = corrupted(flat(100), name, severity).astype(float)  # 122,880 values
    assert result.std() == pytest.approx(deviation, rel=0.02)
    assert result.mean() == pytest.approx(99.5, abs=0.3)


@pytest.mark.parametrize(("severity", "share"), [*enumerate((0.01, 0.02, 0.03, 0.05, 0.07), start=1)])
def test_impulses_are_black_or_white_and_the_rest_stays(severity, share):
    result = corrupted(flat(100), "impulse_noise", severity)
    assert set(np.unique(result)) == {0, 100, 255}
    assert (result == 0).mean() == pytest.approx(share / 2, rel=0.1)
    assert (result == 255).mean() == pytest.approx(share / 2, rel=0.1)
    hit = (result != 100).any(axis=3)
    assert hit.mean() == pytest.approx(1 - (1 - share) ** 3, rel=0.1), "channels are hit one by one"


def test_black_has_no_speckles_and_no_photons():
    assert not corrupted(flat(0), "speckle_noise", 5).any()
    assert not corrupted(flat(0), "shot_noise", 5).any()


# --- blur


def convolved(images, weights, beyond):
    """By one loop over everything; ``beyond`` says which pixel stands for one outside."""
    values, (rows, columns) = images / 255, weights.shape
    total = np.zeros_like(values)
    height, width = images.shape[1:3]
    for y in range(height):
        for x in range(width):
            for row in range(rows):
                for column in range(columns):
                    source = beyond(y + row - rows // 2, height), beyond(x + column - columns // 2, width)
                    total[:, y, x] += weights[row, column] * values[:, source[0], source[1]]
    return (np.clip(total, 0, 1) * 255).astype(np.uint8)


def nearest(position, length):
    return min(max(position, 0), length - 1)


def mirrored(position, length):
    return length - 1 - abs(length - 1 - abs(position))


def test_the_weights_of_the_gaussians_are_the_cards():
    half = [0.000134, 0.004432, 0.053991, 0.241971, 0.398943]
    np.testing.assert_allclose(gaussian_weights(1.0, 4), [*half, *half[-2::-1]], atol=5e-7)
    np.testing.assert_allclose(gaussian_weights(0.4, 2)[:3], [3e-6, 0.040388, 0.919218], atol=6e-7)


@pytest.mark.parametrize(("severity", "deviation", "radius"), [(1, 0.4, 2), (3, 0.7, 3), (5, 1.0, 4)])
def test_gaussian_blur_is_a_direct_convolution_that_repeats_the_border(severity, deviation, radius):
    images = PHOTOS[:2, :7, :9]
    weights = gaussian_weights(deviation, radius)
    wanted = convolved(images, np.outer(weights, weights), nearest)
    assert np.abs(corrupted(images, "gaussian_blur", severity).astype(int) - wanted).max() <= 1


def test_disks_are_those_of_their_radius():
    cross = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]) / 5
    np.testing.assert_allclose(disk(1.0, 0.2)[1:4, 1:4], cross, atol=3e-6)
    np.testing.assert_allclose(disk(1.5, 0.1)[1:4, 1:4], np.full((3, 3), 1 / 9), atol=1e-12)
    point = gaussian_weights(0.4, 1)  # a radius below 1 leaves a point, and of the disk its soft edge
    np.testing.assert_allclose(disk(0.3, 0.4), np.outer(point, point))
    assert all(disk(*each).sum() == pytest.approx(1) for each in ((0.3, 0.4), (1.0, 0.2), (1.5, 0.1)))


@pytest.mark.parametrize(
    ("severity", "shape"), [*enumerate(((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)), start=1)]
)
def test_defocus_blur_is_a_direct_correlation_that_mirrors_the_border(severity, shape):
    images = PHOTOS[:2, :7, :9]
    wanted = convolved(images, disk(*shape), mirrored)
    assert np.abs(corrupted(images, "defocus_blur", severity).astype(int) - wanted).max() <= 1


def test_a_point_is_spread_over_the_disk():
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 4, 4] = 255
    spread = corrupted(image, "defocus_blur", 5)[0, :, :, 0]
    assert spread[3:6, 3:6].tolist() == [[28] * 3] * 3  # 255 / 9 = 28.3
    assert spread.sum() == 9 * 28


# --- light and colour


def test_contrast_by_hand():
    # Mean 100; severity 3 keeps 0.4 of the distance.
    found = pixels("contrast", 3, [0], [100], [200], [100])
    np.testing.assert_allclose(np.ravel(found), [60, 100, 140, 100], atol=1)
    # Channels have means of their own: 50 and 150 and 0.
    found = pixels("contrast", 2, [0, 100, 0], [100, 200, 0])
    np.testing.assert_allclose(found, [[25, 125, 0], [75, 175, 0]], atol=1)


def test_brightness_by_hand():
    # V = 100/255 + 0.15 is 138.25, times 1.3825; black becomes 0.15 * 255 = 38.25; 240 + 38 is clipped to 255.
    assert pixels("brightness", 3, [100, 50, 0], [0, 0, 0], [240, 120, 240]) == [
        [138, 69, 0],
        [38] * 3,
        [255, 127, 255],
    ]
    assert pixels("brightness", 5, [100]) == [[176]]  # 0.3 * 255 = 76.5


def test_saturation_by_hand():
    # (200, 150, 100) has V = 200 and s = 0.5; each channel is V - (V - x) s'/s.
    assert pixels("saturate", 1, [200, 150, 100]) == [[200, 185, 170]]  # s' = 0.15
    assert pixels("saturate", 2, [200, 150, 100]) == [[200, 195, 190]]
    np.testing.assert_allclose(pixels("saturate", 3, [200, 150, 100]), [[200, 125, 50]], atol=1)
    assert pixels("saturate", 5, [200, 150, 100]) == [[200, 100, 0]]  # 2.5 * 0.5 + 0.2 is clipped to 1
    # Grey has no hue and counts as red; black stays black.
    np.testing.assert_allclose(pixels("saturate", 4, [100] * 3, [0] * 3), [[100, 90, 90], [0, 0, 0]], atol=1)
    assert pixels("saturate", 3, [100] * 3) == [[100] * 3]


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colours_are_those_of_the_standard_library(name, severity):
    added = (0.05, 0.10, 0.15, 0.20, 0.30)[severity - 1]
    factor, more = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    colours = [*PHOTOS[0, 0], *np.repeat(PHOTOS[0, 1, :4, :1], 3, axis=1), [255, 255, 255], [7, 0, 0]]
    wanted = []
    for colour in colours:
        hue, saturation, value = colorsys.rgb_to_hsv(*(int(each) / 255 for each in colour))
        if name == "brightness":
            value = min(value + added, 1.0)
        else:
            saturation = min(saturation * factor + more, 1.0)
        wanted.append([255 * each for each in colorsys.hsv_to_rgb(hue, saturation, value)])
    found = np.array(pixels(name, severity, *colours))
    assert ((found <= np.array(wanted) + 1e-6) & (found > np.array(wanted) - 1 - 1e-6)).all(), "truncated"


# --- what Pillow computes


def test_pixelation_by_hand():
    # Severity 4 makes 3 pixels of 4: each is the mean of those whose middles it covers, so the second of 100 and 200.
    # Back: the middles of four lie at 0.375, 1.125, 1.875 and 2.625 of three.
    image = np.tile(np.array([0, 100, 200, 240], np.uint8), (4, 1))[None, :, :, None]
    assert corrupted(image, "pixelate", 4)[0, :, :, 0].tolist() == [[0, 150, 150, 240]] * 4


@pytest.mark.parametrize(("severity", "side"), [*enumerate((30, 28, 27, 24, 20), start=1)])
def test_pixelation_leaves_as_many_pixels_as_the_card_says(severity, side):
    result = corrupted(PHOTOS[:1], "pixelate", severity)[0]
    assert len(np.unique(result, axis=0)) == len(np.unique(result, axis=1).swapaxes(0, 1)) == side


@pytest.mark.parametrize(("severity", "quality"), [*enumerate((80, 65, 58, 50, 40), start=1)])
def test_jpeg_is_what_pillow_writes_and_reads(severity, quality):
    results = corrupted(PHOTOS[:2], "jpeg_compression", severity)
    for image, result in zip(PHOTOS, results, strict=False):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        with Image.open(file) as read:
            assert np.array_equal(result, np.asarray(read))
            assert max(layer[1] * layer[2] for layer in read.layer) == 4, "colours at half the resolution"


# --- a device's test images


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small CIFAR-10 with its published corruption ``fog``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data"
    (root / "CIFAR-10-C").mkdir(parents=True)
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (90, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(90) % 10
    np.savez(root / "cifar10.npz", x_train=images[:80], y_train=labels[:80], x_test=images[80:], y_test=labels[80:])
    np.save(root / "CIFAR-10-C" / "fog.npy", random.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8))
    np.save(root / "CIFAR-10-C" / "labels.npy", np.tile(labels[80:], 5).astype(np.uint8))
    return root


def load(folder, data):
    return load_task("cifar10", f"{folder},of=2,index=1,partition=iid,{data}", device="x", seed=0, batch_size=99)


def all_of(batches):
    """Inputs and targets in the order of the device's indices."""
    return batches.arrays.take(slice(0, len(batches.arrays)))


def as_bytes(inputs):
    return np.round(inputs * 127.5 + 127.5).astype(np.uint8).transpose(0, 2, 3, 1)  # FedSPU's scale


@pytest.mark.parametrize("test", ["own", "published"])
def test_only_a_devices_test_images_are_corrupted_before_they_are_scaled(folder, test):
    clean = load(folder, f"test={test}")
    task = load(folder, f"test={test},corruption=gaussian_noise,severity=4")
    for use in ("train", "validation"):
        assert all(
            np.array_equal(*each) for each in zip(all_of(getattr(task, use)), all_of(getattr(clean, use)), strict=True)
        )
    inputs, targets = all_of(task.test)
    assert np.array_equal(targets, all_of(clean.test)[1])
    wanted = corrupted(as_bytes(all_of(clean.test)[0]), "gaussian_noise", 4, seed=0, device=1)
    assert np.array_equal(as_bytes(inputs), wanted)


def test_published_arrays_are_read_for_the_devices_slice_of_the_published_test_images(folder):
    arrays = np.load(folder / "CIFAR-10-C" / "fog.npy")
    for data in (folder, folder / "cifar10.npz"):
        inputs, targets = all_of(load(data, "test=published,corruption=fog,severity=3").test)
        assert np.array_equal(as_bytes(inputs), arrays[20:30][1::2])
        assert targets.tolist() == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_arrays_go_with_the_published_test_images_alone(folder, name):
    with pytest.raises(
        DataError,
        match=f"corruption={name} .*test=published",
    ):
        load(folder, f"corruption={name},severity=1")


def test_published_arrays_that_are_missing_or_others_are_explained(folder):
    with pytest.raises(DataError, match=r"snow\.npy: .*CIFAR-10-C"):
        load(folder, "test=published,corruption=snow,severity=1")
    place = folder / "CIFAR-10-C"
    np.save(place / "snow.npy", np.zeros((40, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=r"\(40, 32, 32, 3\).*\(50, 32, 32, 3\)"):
        load(folder, "test=published,corruption=snow,severity=1")
    (place / "snow.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"snow\.npy: cannot be read"):
        load(folder, "test=published,corruption=snow,severity=1")
    np.save(place / "labels.npy", np.zeros(50, np.uint8))
    with pytest.raises(DataError, match="labels differ"):
        load(folder, "test=published,corruption=fog,severity=1")
    (place / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy: is missing"):
        read_published(folder, "fog", 1, np.arange(10), shape=(32, 32, 3))


@pytest.mark.parametrize(("task", "data"), [("digits", ""), ("har", "anywhere,")])
def test_tasks_without_images_of_bytes_refuse(task, data):
    with pytest.raises(DataError, match=rf"corruption=contrast .*\b{task}\b"):
        load_task(task, f"{data}index=0,corruption=contrast,severity=1", device="x", seed=0, batch_size=9)


@pytest.mark.skipif(not (FOLDER / "mnist.npz").is_file(), reason="mnist.npz is not in ../shared/data")
def test_real_digits_lose_their_contrast():
    data = f"{FOLDER},of=100,index=5,corruption=contrast,severity={{}}"
    spread = [
        all_of(load_task("mnist", data.format(severity), device="x", seed=0, batch_size=9).test)[0].std((1, 2, 3))
        for severity in (1, 5)
    ]
    assert (spread[1] / spread[0]).mean().item() == pytest.approx(0.15 / 0.75, rel=0.05)
