"""A page joins a federation that was published from a table with a table of its own, predicts and exports by name."""

from __future__ import annotations

import json
import re

import numpy as np
import onnxruntime
import pytest

from edge_sdk.publish import publish
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks import own
from sparrow.coordinator.web import runtime

from . import browsers
from .browsers import playwright

browser, open_page = browsers.browser, browsers.open_page
expect = playwright.expect

pytestmark = pytest.mark.skipif(runtime.missing(), reason="no runtime for pages here: run sparrow web")

ALONE = {"method": "fedavg", "cohort": 1, "min_devices": 1, "early_stopping": "off", "learning_rate": 0.1}
ROOMS = {"attic": (31.0, "none"), "hall": (17.0, "gas"), "kitchen": (24.0, "wood")}
"""Rooms, and how warm they are and heated."""
FIELDS = {"heat": "17.25", "fuel": "gas", "load": "1.5"}


KEPT = """async (federation) => {
  const { Store } = await import("/web/store.js");
  const store = await Store.open(federation), { parts, ...added } = await store.get("samples");
  store.database.close();
  return Object.values(parts ?? { added }).map(({ inputs }) => [inputs.constructor.name, inputs.length]);
}"""
"""Types and lengths of the samples that the browser keeps: raw ones."""


def rows_of(rooms, each, seed):
    """Rows (heat, fuel, load, room) of some rooms in turn."""
    chance = np.random.default_rng(seed)
    for place in range(each * len(rooms)):
        heat, fuel = ROOMS[rooms[place % len(rooms)]]
        yield heat + chance.normal(0, 0.8), fuel, chance.normal(2, 1), rooms[place % len(rooms)]


@pytest.fixture
def published(coordinator, tmp_path, compiling):
    """A federation of three rooms, from a table."""
    table = tmp_path / "all.csv"
    lines = [f"{heat:.3f},{fuel},{load:.3f},{room}" for heat, fuel, load, room in rows_of(list(ROOMS), 20, 1)]
    table.write_text("\n".join(["heat,fuel,load,room", *lines]) + "\n")
    task = own.load(f"{table},label=room", device="publisher", seed=0, batch_size=8)
    publish(coordinator.url, "rooms", task, **ALONE, rounds=3, local_epochs=20)
    return coordinator


def mine(folder):
    """A page's own table, as a spreadsheet of another country writes it, of two of the rooms, with one column more."""
    table = folder / "mine.csv"
    lines = [
        f"{room};{load:.3f};{heat:.3f};x;{fuel}".replace(".", ",")
        for heat, fuel, load, room in rows_of(["hall", "kitchen"], 12, 2)
    ]
    table.write_bytes("\r\n".join(["Room;Load;Heat;note;Fuel", *lines]).encode("utf-16"))
    return table


def test_a_page_trains_predicts_and_exports_with_its_own_table(published, open_page, tmp_path):
    signer = Publisher.load().fingerprint
    page = open_page(f"{published.url}/join/rooms#publisher={signer.replace('-', '')}")
    expect(page.locator("#signed")).to_have_text(f"Model: signed by {signer}")
    assert page.evaluate("location.hash") == ""
    expect(page.locator("#file-hint")).to_contain_text('the columns heat, fuel, load, and "room" with the classes')
    page.locator("#file").set_input_files(mine(tmp_path))
    line = "mine.csv: 24 rows (14 train, 2 check, 8 test); Room: hall 12, kitchen 12; columns heat, fuel, load; "
    expect(page.locator("#source")).to_have_text(re.compile(re.escape(line)))
    expect(page.locator("#source")).to_contain_text("the federation does not use 1 column, left out: note")
    expect(page.locator("#file-classes")).to_have_text("attic: 0, hall: 12, kitchen: 12")

    page.get_by_role("button", name="Take part").click()
    expect(page.locator("#phase")).to_have_text("finished", timeout=60_000)
    expect(page.locator("#cost")).to_contain_text("3 rounds")
    assert published.rounds("rooms")[-1]["updates"] == 1

    for name, text in FIELDS.items():
        field = page.locator("#trial-fields").get_by_label(name)
        field.select_option(text) if name == "fuel" else field.fill(text)
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#predicted")).to_have_text(re.compile("^hall, "))
    shown = {}
    for row in page.locator("#scores li").all_inner_texts():
        name, share, _ = row.split()
        shown[name] = float(share) / 100
    assert set(shown) == set(ROOMS)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download the model (.onnx)").click()
    download.value.save_as(tmp_path / "rooms.onnx")
    model = onnxruntime.InferenceSession(tmp_path / "rooms.onnx", providers=["CPUExecutionProvider"])
    said = model.get_modelmeta().custom_metadata_map
    names = json.loads(said["class_names"])
    (taken,) = model.get_inputs()
    assert (taken.name, taken.shape[1:], names) == ("input", [3], list(ROOMS))
    columns = json.loads(said["preparation"])["columns"]
    assert [column["name"] for column in columns] == list(FIELDS)
    row = [
        column["categories"].index(FIELDS[column["name"]]) if column["categories"] else float(FIELDS[column["name"]])
        for column in columns
    ]
    (scores,) = model.run(None, {"input": np.array([row], np.float32)})
    powers = np.exp(scores[0] - scores[0].max())
    for name, share in zip(names, powers / powers.sum(), strict=True):
        assert shown[name] == pytest.approx(share, abs=6e-4)

    page.reload()
    expect(page.locator("#source")).to_have_text(re.compile(re.escape(line)))
    assert page.evaluate(KEPT, "rooms") == [["Float32Array", 3 * 14], ["Float32Array", 3 * 2], ["Float32Array", 3 * 8]]


def test_a_table_that_does_not_fit_is_refused_in_words(published, open_page, tmp_path):
    page = open_page(f"{published.url}/join/rooms")
    expect(page.locator("#file-hint")).to_be_visible()
    table = tmp_path / "mine.csv"
    table.write_text("heat,fuel,load,room\n17,gas,2,hall\n18,gas,,hall\n24,wood,1,kitchen\n")
    page.locator("#file").set_input_files(table)
    expect(page.locator("#data-problem")).to_have_text(
        "mine.csv: line 3, column load: the value is missing (''; 1 in this column); leave such rows out of the file, "
        "or fill in the values"
    )
    table.write_text("heat,fuel,load,room\n17,gas,2,hall\n18,gas,1,cellar\n24,wood,1,kitchen\n")
    page.locator("#file").set_input_files(table)
    expect(page.locator("#data-problem")).to_contain_text(
        "has the class 'cellar'; the federation's are attic, hall, kitchen"
    )
    expect(page.locator("#samples")).to_have_text("No samples yet")


def test_drawings_are_kept_raw_under_the_names_of_classes(coordinator, open_page, tmp_path, compiling):
    chance = np.random.default_rng(4)
    names = np.array(["ring", "stroke"])[np.arange(20) % 2]
    np.savez(tmp_path / "all.npz", x=chance.integers(0, 256, (20, 8, 8), dtype=np.uint8), y=names)
    task = own.load(str(tmp_path / "all.npz"), device="publisher", seed=0, batch_size=8)
    publish(coordinator.url, "signs", task, **ALONE)
    page = open_page(f"{coordinator.url}/join/signs")
    canvas = page.get_by_role("application", name="Draw a sample")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 90, box["y"] + 150, steps=5)
    page.mouse.up()
    page.get_by_role("group", name="Keep the drawing as").get_by_role("button", name=re.compile("^stroke ")).click()
    expect(page.locator("#data-said")).to_have_text("Kept as stroke.")
    expect(page.locator("#samples")).to_contain_text("1 sample")
    assert page.evaluate(KEPT, "signs") == [["Uint8Array", 64]]
    expect(page.get_by_role("tab", name="File")).to_be_visible()
