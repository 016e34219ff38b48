"""The page that is a device, in a real browser: what a person does on its screen by finger and by keys, and no more.

Screenshots of it are kept in the folder that ``SPARROW_SCREENSHOTS`` names, else in pytest's own.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import onnxruntime
import pytest

from . import browsers
from .browsers import playwright
from .conftest import wait_until

browser, open_page = browsers.browser, browsers.open_page
pictures, new_coordinator = browsers.pictures, browsers.new_coordinator
expect = playwright.expect

PHONE = {
    "viewport": {"width": 360, "height": 640},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
    "user_agent": "Mozilla/5.0 (Linux; Android 15; Pixel 9) AppleWebKit/537.36 Chrome/140.0 Mobile Safari/537.36",
}
ALONE = {"method": "fedavg", "cohort": 1, "min_devices": 1, "early_stopping": "off"}
"""Settings of a federation in which one page takes part."""
SECRET = "an-enrolment-token-of-this-lab"

FIGURES = {
    0: [(50, 0), (20, 15), (10, 50), (20, 85), (50, 100), (80, 85), (90, 50), (80, 15), (50, 0)],
    1: [(30, 20), (50, 0), (50, 100)],
    2: [(10, 20), (30, 0), (70, 0), (90, 25), (70, 55), (10, 100), (90, 100)],
    3: [(10, 5), (70, 0), (85, 25), (40, 47), (85, 70), (70, 97), (10, 95)],
    4: [(70, 100), (70, 0), (5, 65), (95, 65)],
    5: [(90, 0), (20, 0), (15, 45), (60, 40), (90, 65), (70, 95), (10, 100)],
    6: [(80, 0), (30, 30), (10, 70), (30, 100), (75, 95), (85, 70), (50, 55), (15, 70)],
    7: [(10, 0), (90, 0), (40, 100)],
    8: [(50, 45), (20, 25), (50, 0), (80, 25), (50, 45), (15, 75), (50, 100), (85, 75), (50, 45)],
    9: [(85, 30), (50, 45), (15, 25), (50, 0), (85, 20), (75, 60), (60, 100)],
}
"""Digits as one stroke each: x to the right, y down, from 0 to 100."""


def drawn(digit, chance):
    """A digit's stroke as it comes out this time, within 0 and 1."""
    angle, (wide, high) = chance.normal(0, 0.08), chance.uniform(0.5, 0.75, 2)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    points = (np.array(FIGURES[digit]) / 100 - 0.5) * (wide * 0.8, high) + chance.normal(
        0, 0.015, (len(FIGURES[digit]), 2)
    )
    return points @ turn + 0.5


class Finger:
    """Touches the screen of a page."""

    def __init__(self, page):
        self._page = page
        self._session = page.context.new_cdp_session(page)

    def draw(self, canvas, stroke):
        """Draw a stroke, whose points are shares of the canvas."""
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        points = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for x, y in stroke]
        self._touch("touchStart", points[0])
        for point in points[1:]:
            self._touch("touchMove", point)
        self._touch("touchEnd")

    def give(self, digits, chance):
        """Draw digits, and press the class of each."""
        for digit in digits:
            self.draw(self._page.get_by_role("application", name="Draw a sample"), drawn(digit, chance))
            label(self._page, digit).tap()

    def press(self, name):
        """Press the button that has this name."""
        self._page.get_by_role("button", name=name, exact=True).tap()

    def _touch(self, kind, *points):
        self._session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})


class Keys:
    """Presses the keys of a page's user, who has neither mouse nor touchscreen."""

    def __init__(self, page):
        self._page = page

    def press(self, *keys):
        for key in keys:
            self._page.keyboard.press(key)

    def reach(self, target):
        """Press Tab until the target has the focus, which must be visible wherever it is."""
        for _ in range(60):
            self.press("Tab")
            assert self._page.evaluate(FOCUS_IS_VISIBLE), self._page.evaluate("document.activeElement.outerHTML")
            if target.evaluate("one => one === document.activeElement"):
                return
        pytest.fail(f"Tab does not reach {target}")

    def walk(self):
        """Press Tab from the first control to the last; returns the ids of those, or what is written on them."""
        self._page.evaluate("document.activeElement.blur()")
        reached = []
        while (held := self._page.evaluate(HELD)) not in reached[1:]:
            assert self._page.evaluate(FOCUS_IS_VISIBLE), held
            reached.append(held)
            self.press("Tab")
        return set(reached)

    def use(self, name):
        """Reach the button that has this name, and press it."""
        self.reach(self._page.get_by_role("button", name=name, exact=True))
        self.press("Enter")


HELD = "document.activeElement.id || document.activeElement.textContent.trim()"

FOCUS_IS_VISIBLE = """() => {
  const focused = document.activeElement;
  if (focused === document.body) return true; // between the last control and the first
  const { outlineStyle, outlineWidth } = getComputedStyle(focused), box = focused.getBoundingClientRect();
  const isThere = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return isThere && outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
}"""


def label(page, digit):
    """The button of a class."""
    return page.get_by_role("group", name="Keep the drawing as").get_by_role("button", name=re.compile(f"^{digit} "))


def when(page, condition, wanted=None):
    """Wait for a condition, a function in JavaScript of what is wanted, that may hold for a moment alone."""
    page.wait_for_function(condition, arg=wanted, timeout=90_000)


def phase(page, wanted):
    when(page, "(wanted) => document.getElementById('phase').textContent === wanted", wanted)


def training_in_round(page, wanted):
    """Wait until a page is well in the middle of this round's training, or a later one's."""
    when(page, IN_THE_MIDDLE, wanted)


IN_THE_MIDDLE = """(wanted) => {
  const [phase, said, step] = ["phase", "round", "step"].map((id) => document.getElementById(id));
  const round = Number(said.textContent.split(" ")[1]); // "Round 2 of 3"
  return phase.textContent === "training" && round >= wanted && step.value > 0.1 * step.max;
}"""


PUBLISHED = ["info", "manifest.json", "trust"]
"""What the page asks for when it is opened, and everybody else may: nothing in it is of the device."""

KEPT = """async () => {
  const kept = [];
  for (const { name } of await indexedDB.databases()) {
    const opening = indexedDB.open(name);
    const database = await new Promise((resolve) => (opening.onsuccess = () => resolve(opening.result)));
    for (const store of database.objectStoreNames) {
      const keys = database.transaction(store).objectStore(store).getAllKeys();
      kept.push(...(await new Promise((resolve) => (keys.onsuccess = () => resolve(keys.result)))));
    }
    database.close();
  }
  return kept;
}"""

CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, summary, canvas[tabindex]")]
  .filter((each) => each.checkVisibility() && !each.disabled && each.tabIndex >= 0)
  .map((each) => each.id || each.textContent.trim())"""
"""What Tab must reach."""

TOO_SMALL = """() => [...document.querySelectorAll("a[href], button, input:not([type=checkbox]), select, summary")]
  .filter((each) => each.checkVisibility() && each.getBoundingClientRect().height < 44)
  .map((each) => `${each.id || each.textContent.trim()}: ${each.getBoundingClientRect().height}`)"""

WRONG_IDS = """() => {
  const ids = Array.from(document.querySelectorAll("[id]"), ({ id }) => id);
  const wrong = ids.filter((id, place) => ids.indexOf(id) !== place);
  for (const attribute of ["for", "aria-labelledby", "aria-describedby", "aria-controls"]) {
    const all = [...document.querySelectorAll(`[${attribute}]`)].filter((each) => each.checkVisibility());
    const named = all.flatMap((each) => each.getAttribute(attribute).split(" "));
    wrong.push(...named.filter((id) => !ids.includes(id)));
  }
  return wrong;
}"""

TO_BE_NAMED = {"image", "img", "progressbar", "dialog", "tablist", "tabpanel", "region"}

SENSORS = ("accelerometer", "linear-acceleration", "gyroscope")


def shown_scores(page):
    """The shares of the best classes, as the page says them."""
    rows = [row.split() for row in page.locator("#scores li").all_inner_texts()]
    return {int(name): float(share) / 100 for name, share, _ in rows}


def picture_of(page, canvas):
    """What a model gets of a drawing."""
    levels = canvas.evaluate("async (canvas) => [...(await import('/web/drawing.js')).toImage(canvas, [1, 8, 8])]")
    return np.float32(levels).reshape(1, 1, 8, 8) / np.float32(255)


def shares(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def hosts(page):
    """Where its requests, and its worker's, went."""
    return {re.match("[a-z]+://[^/]+", request.url)[0] for request in page.requests if request.url.startswith("http")}


def need_not_scroll_sideways(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def show_at(page, target, place):
    """Scroll, and wait until nothing moves or fades any more."""
    target.evaluate("(one, place) => one.scrollIntoView({ block: place })", place)
    page.wait_for_timeout(400)


def check_screen(page):
    """Fail where a control has no name or is too small for a thumb, or an id that is referred to is not there."""
    need_not_scroll_sideways(page)
    assert page.evaluate(TOO_SMALL) == []
    assert page.evaluate(WRONG_IDS) == []
    levels = page.locator("h1, h2, h3").evaluate_all(
        "all => all.filter(each => each.checkVisibility()).map(each => Number(each.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    session = page.context.new_cdp_session(page)
    nodes = [node for node in session.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named = [node for node in nodes if is_focusable(node) or node["role"]["value"] in TO_BE_NAMED]
    assert len(named) >= 3  # a dialog's alone, while there is one
    assert [node["role"]["value"] for node in named if not node.get("name", {}).get("value", "").strip()] == []
    session.detach()


def is_focusable(node):
    held = {each["name"]: each["value"].get("value") for each in node.get("properties", [])}
    return held.get("focusable") and node["role"]["value"] not in ("main", "RootWebArea", "paragraph")


def not_isolated(page):
    """Forget what Chromium notes as an error over plain HTTP."""
    ignored = "The Cross-Origin-Opener-Policy header has been ignored"
    page.troubles[:] = [text for text in page.troubles if not text.startswith(ignored)]


@pytest.mark.timeout(300)
def test_a_phone_takes_part_from_the_link_alone(new_coordinator, open_page, pictures, tmp_path):
    server = new_coordinator(COORDINATOR_ENROLMENT_TOKEN=SECRET)
    server.start()
    server.create("lab", **ALONE, rounds=3, local_epochs=300, learning_rate=0.1)
    page = open_page(f"{server.url}/join/lab#token={SECRET}", **PHONE)
    finger, chance = Finger(page), np.random.default_rng(7)
    assert page.evaluate("location.href") == f"{server.url}/join/lab"
    need_not_scroll_sideways(page)

    finger.give([*range(10)] * 3 + [*range(8)], chance)
    canvas = page.get_by_role("application", name="Draw a sample")
    finger.draw(canvas, drawn(8, chance))
    show_at(page, page.locator("#draw-classes"), "end")
    page.screenshot(path=pictures / "phone-data.png")
    label(page, 8).tap()
    finger.give([9], chance)
    expect(page.locator("#samples")).to_have_text("40 samples: 24 to train, 4 to check, 12 to test")
    need_not_scroll_sideways(page)

    assert re.fullmatch("phone-[a-z0-9]{4}", page.get_by_label("Name of this device").input_value())
    finger.press("Take part")
    training_in_round(page, 2)
    show_at(page, page.locator("#part"), "start")
    page.screenshot(path=pictures / "phone-training.png")
    need_not_scroll_sideways(page)
    phase(page, "finished")
    expect(page.locator("#cost")).to_contain_text("3 rounds")
    need_not_scroll_sideways(page)

    trial, asked = page.get_by_role("application", name="Draw something to be recognised"), []
    for digit in range(10):
        finger.draw(trial, drawn(digit, chance))
        page.locator("#answer").wait_for()
        best = int(page.locator("#predicted").text_content().partition(",")[0])
        asked.append((digit, best, shown_scores(page), picture_of(page, trial)))
        expect(page.locator("#predicted")).to_be_in_viewport()
        if digit == 7:
            show_at(page, page.locator("#trial"), "start")
            page.screenshot(path=pictures / "phone-try.png")
        page.locator("#trial").get_by_role("button", name="Clear").tap()
        expect(page.locator("#answer")).to_be_hidden()
    assert sum(digit == best for digit, best, _, _ in asked) >= 8, [each[:2] for each in asked]
    need_not_scroll_sideways(page)

    with page.expect_download() as download:
        finger.press("Download the model (.onnx)")
    assert download.value.suggested_filename == "lab.onnx"
    download.value.save_as(tmp_path / "lab.onnx")
    model = onnxruntime.InferenceSession(tmp_path / "lab.onnx")
    for _, best, scores, picture in asked:
        (answer,) = model.run(None, {model.get_inputs()[0].name: picture})
        assert answer[0].argmax() == best
        assert {each: pytest.approx(shares(answer[0])[each], abs=6e-4) for each in scores} == scores

    assert hosts(page) == {server.url}
    assert any(request.method == "PUT" for request in page.requests), "the worker's requests are among them"
    assert not [request.url for request in page.requests if SECRET in request.url]
    assert SECRET not in server.log.read_text()


def test_keys_alone_are_enough(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=100_000, local_epochs=300)
    page = open_page(f"{coordinator.url}/join/lab")
    keys = Keys(page)
    canvas = page.get_by_role("application", name="Draw a sample")
    canvas.wait_for()
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    keys.press("Enter")

    keys.reach(page.get_by_role("tab", name="Draw"))
    keys.press("ArrowRight", "ArrowRight")
    expect(page.get_by_role("tabpanel", name="File")).to_be_visible()
    keys.press("Home")
    keys.reach(canvas)
    ring = ["Shift+ArrowRight"] * 3 + ["Shift+ArrowDown"] * 3 + ["Shift+ArrowLeft"] * 3 + ["Shift+ArrowUp"] * 3
    for line in ["ArrowDown", "ArrowUp"] * 3:
        keys.press("Space", *[f"Shift+{line}"] * 4, "Space", "1")
        expect(page.locator("#data-said")).to_have_text("Kept as 1.")
        keys.press("p", *ring, "p", "0")
        expect(page.locator("#data-said")).to_have_text("Kept as 0.")
    expect(page.locator("#samples")).to_contain_text("12 samples")
    expect(label(page, 0)).to_contain_text("6")
    keys.press("Space", "Shift+ArrowDown", "Backspace", "2")
    expect(page.locator("#data-said")).to_have_text("Draw something first.")

    keys.reach(page.get_by_label("Name of this device"))
    keys.press("Control+a")
    page.keyboard.type("desk-1")
    keys.reach(page.get_by_role("checkbox", name="while this page is in the foreground"))
    keys.press("Space")
    keys.use("Take part")
    phase(page, "training")
    keys.use("Pause")
    phase(page, "paused")
    expect(page.locator("#detail")).to_contain_text("you pressed Pause")
    expect(page.get_by_role("button", name="Continue", exact=True)).to_be_focused()
    keys.press("Enter")
    phase(page, "training")
    keys.use("Leave")
    phase(page, "left")
    expect(page.locator("#detail")).to_be_focused()
    rounds = coordinator.info("lab")["round"]

    trial = page.get_by_role("application", name="Draw something to be recognised")
    keys.reach(trial)
    keys.press("Space", *ring, "Space")
    expect(page.locator("#predicted")).to_have_text(re.compile(r"^\d, [\d.]+\s% sure$"))
    keys.reach(page.get_by_role("button", name="Download the model (.onnx)"))
    with page.expect_download():
        keys.press("Enter")

    keys.use("Continue")
    wait_until(lambda: coordinator.info("lab")["round"] > rounds + 1, "more rounds")
    keys.use("Forget me")
    dialog = page.get_by_role("dialog", name="Forget this device?")
    expect(dialog.get_by_role("button", name="Keep everything")).to_be_focused()
    keys.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Forget me")).to_be_focused()
    keys.press("Enter", "Tab")
    expect(dialog.get_by_role("button", name="Forget me")).to_be_focused()
    keys.press("Enter")
    expect(page.locator("#samples")).to_have_text("No samples yet")
    phase(page, "ready")
    expect(page.get_by_label("Name of this device")).to_be_editable()
    expect(page.locator("#remains")).to_contain_text("records of its rounds under the name desk-1")
    assert coordinator.get("/v1/federations/lab/devices").json() == []


def test_the_page_says_who_runs_a_federation_for_what_before_anyone_takes_part(coordinator, open_page):
    coordinator.create("lab", **ALONE, operator="Clinic of Ulm", purpose="To read digits on forms")
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    expect(page.locator("#consent")).to_contain_text("Run by Clinic of Ulm, for this purpose: To read digits on forms.")
    expect(page.locator("#consent")).to_contain_text("until round 30 ends or you leave")


def test_a_page_over_plain_http_takes_part_with_a_notice(new_coordinator, open_page):
    server = new_coordinator(COORDINATOR_HOSTS="phones.test")
    server.start()
    server.create("lab", **ALONE, rounds=2, local_epochs=5)
    address = f"http://phones.test:{server.port}/join/lab"
    page = open_page(address, **PHONE)
    assert not page.evaluate("isSecureContext")
    finger, chance = Finger(page), np.random.default_rng(7)
    finger.give([0, 1] * 6, chance)
    expect(page.locator("#limits")).to_contain_text("This page came over plain HTTP")
    expect(page.locator("#limits")).to_contain_text("motion sensors and live camera are not available")
    expect(page.locator("#limits")).to_contain_text(
        "neither be installed nor opened offline. Ask for a link with HTTPS"
    )
    expect(page.locator("#offline")).to_be_empty()
    page.get_by_role("tab", name="Pictures").tap()
    expect(page.locator("#picture-hint")).to_contain_text("A live camera in this page needs HTTPS")
    expect(page.get_by_role("button", name="Open the camera")).to_be_hidden()
    finger.press("Take part")
    phase(page, "finished")
    assert server.info("lab")["round"] == 2
    assert hosts(page) == {f"http://phones.test:{server.port}"}
    not_isolated(page)


def tried_again(page, wanted):
    """Press the button where there is one: a tab that is closed keeps its lock for a moment. True when it is over."""
    button = page.get_by_role("button", name="Try again")
    if button.is_visible():
        button.click()
    return page.locator("#phase").text_content() == wanted


def test_over_plain_http_a_tab_goes_on_when_the_other_is_closed(new_coordinator, open_page):
    server = new_coordinator(COORDINATOR_HOSTS="phones.test")
    server.start()
    server.create("lab", **ALONE)
    address = f"http://phones.test:{server.port}/join/lab"
    page = open_page(address)
    phase(page, "ready")
    other = open_page(address, beside=page)
    expect(other.get_by_role("alert")).to_contain_text("open in another tab")
    page.close()
    wait_until(lambda: tried_again(other, "ready"), "the other tab to go on", interval=0.5)
    not_isolated(page)


def test_another_name_is_taken_where_the_first_was_not_free(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=5)
    body = {"name": "taken", "enrolment_key": "k" * 32}
    coordinator.http.post("/v1/federations/lab/devices", json=body).raise_for_status()
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    page.get_by_label("Name of this device").fill("taken")
    finger.press("Take part")
    expect(page.locator("#detail")).to_have_text(re.compile("has this name; choose a different one"))
    page.troubles.clear()  # Chromium notes a 409 as an error
    page.get_by_label("Name of this device").fill("free")
    finger.press("Take part")
    wait_until(lambda: len(coordinator.get("/v1/federations/lab/devices").json()) == 2, "the enrolment")
    assert {each["name"] for each in coordinator.get("/v1/federations/lab/devices").json()} == {"free", "taken"}


def taken_part(coordinator, open_page, local_epochs):
    """A page, and the finger of its user, after a federation of one round that it alone took part in."""
    coordinator.create("lab", **ALONE, rounds=1, local_epochs=local_epochs)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    finger.press("Take part")
    phase(page, "finished")
    return page, finger


def test_a_device_whose_federation_was_deleted_can_be_forgotten(coordinator, open_page):
    page, finger = taken_part(coordinator, open_page, 5)
    coordinator.http.delete("/v1/federations/lab").raise_for_status()
    coordinator.create("lab", **ALONE)
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("the operator deleted this federation")
    finger.press("Forget me")
    page.get_by_role("dialog").get_by_role("button", name="Forget me").tap()
    phase(page, "ready")
    expect(page.locator("#samples")).to_have_text("No samples yet")
    expect(page.locator("#remains")).to_contain_text("Nothing that names this device remains at the coordinator")
    page.troubles.clear()  # Chromium notes a 401 as an error


def test_who_leaves_and_is_forgotten_need_not_wait_for_a_coordinator_that_is_away(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=100, local_epochs=1000)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    finger.press("Take part")
    training_in_round(page, 1)
    coordinator.kill()
    finger.press("Leave")
    phase(page, "left")
    finger.press("Forget me")
    page.get_by_role("dialog").get_by_role("button", name="Forget me").tap()
    phase(page, "opening")
    expect(page.locator("#opening")).to_have_text(re.compile("the coordinator does not answer; retrying in"))
    assert page.evaluate(KEPT) == []
    expect(page.locator("#remains")).to_contain_text("could not be asked to delete this device")
    coordinator.start()
    phase(page, "ready")
    expect(page.locator("#samples")).to_have_text("No samples yet")
    page.troubles.clear()  # Chromium notes refused connections as errors


def test_the_page_needs_no_token_but_its_calls_do(new_coordinator, open_page):
    server = new_coordinator(
        COORDINATOR_ADMIN_TOKEN="the-chief-s-secret",
        COORDINATOR_OBSERVER_TOKEN="an-observer-s-secret",
        COORDINATOR_ENROLMENT_TOKEN=SECRET,
    )
    server.start()
    server.http.headers["Authorization"] = "Bearer the-chief-s-secret"
    server.create("lab", **ALONE, rounds=2, local_epochs=5)
    page = open_page(f"{server.url}/join/lab", **PHONE)
    expect(page.get_by_role("alert")).to_contain_text("this link has no valid enrolment token")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator("#data")).to_be_hidden()
    page.troubles.clear()  # Chromium notes a 401 as an error

    page.goto(f"{server.url}/join/lab#token={SECRET}")  # only the part behind # has changed: no page is loaded
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    finger.press("Take part")
    phase(page, "finished")
    assert page.evaluate("location.href") == f"{server.url}/join/lab"
    assert SECRET not in server.log.read_text()

    files = {request.url for request in page.requests if re.search("/(join|web)/", request.url)}
    assert {url.rpartition("/")[2] for url in files} > {"lab", "page.js", "worker.js", "ort-wasm-simd-threaded.wasm"}
    del server.http.headers["Authorization"]
    for url in files:
        headers = server.http.get(url).raise_for_status().headers
        assert "default-src 'none'" in headers["Content-Security-Policy"], url
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin", url
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp", url
        assert headers["Content-Encoding"] == "gzip", url
        for_good = "/web/runtime/" in url
        assert headers["Cache-Control"] == ("public, max-age=31536000, immutable" if for_good else "no-cache"), url
    assert server.http.get("/v1/federations/lab").status_code == 401


def test_a_reload_in_mid_training_goes_on_and_forgetting_leaves_nothing(coordinator, open_page):
    coordinator.create("lab", **ALONE, rounds=3, local_epochs=1000)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger = Finger(page)
    finger.give([0, 1] * 6, np.random.default_rng(7))
    name = page.get_by_label("Name of this device").input_value()
    finger.press("Take part")
    for number in (1, 2):
        training_in_round(page, number)
        page.reload()
    training_in_round(page, 2)
    other = open_page(f"{coordinator.url}/join/lab", beside=page)
    expect(other.get_by_role("alert")).to_contain_text("open in another tab")
    phase(page, "finished")
    assert coordinator.info("lab")["round"] == 3
    (device,) = coordinator.get("/v1/federations/lab/devices").json()
    assert device["name"] == name
    assert len(coordinator.logged("POST /v1/federations/lab/devices ")) == 1
    page.close()
    wait_until(lambda: tried_again(other, "finished"), "the other tab to go on", interval=0.5)
    expect(other.locator("#samples")).to_contain_text("12 samples")
    assert {"identity", "samples", "progress"} <= set(other.evaluate(KEPT))

    Finger(other).press("Forget me")
    other.get_by_role("dialog").get_by_role("button", name="Forget me").tap()
    expect(other.locator("#samples")).to_have_text("No samples yet")
    phase(other, "ready")
    assert other.evaluate(KEPT) in ([], PUBLISHED)
    assert other.evaluate("localStorage.length + sessionStorage.length") == 0


def test_every_control_has_a_name_is_large_enough_and_shows_the_focus(coordinator, open_page):
    settings = {**ALONE, "method": "fedspu", "early_stopping": "validation"}
    coordinator.create("lab", **settings, rounds=3, local_epochs=1000)
    page = open_page(f"{coordinator.url}/join/lab", **PHONE)
    finger, keys, chance = Finger(page), Keys(page), np.random.default_rng(7)
    for way in ("Pictures", "File", "Draw"):
        page.get_by_role("tab", name=way).tap()
        check_screen(page)
    for closed in page.locator("summary").all():
        closed.tap()
    finger.give([0, 1] * 6, chance)
    check_screen(page)
    assert keys.walk() >= set(page.evaluate(CONTROLS))

    finger.press("Take part")
    training_in_round(page, 2)
    check_screen(page)
    phase(page, "finished")
    check_screen(page)
    expect(page.get_by_role("img", name=re.compile("^Right answers by round"))).to_be_visible()
    finger.draw(page.get_by_role("application", name="Draw something to be recognised"), drawn(1, chance))
    page.locator("#answer").wait_for()
    assert keys.walk() >= set(page.evaluate(CONTROLS))
    finger.press("Forget me")
    check_screen(page)
    page.get_by_role("dialog").get_by_role("button", name="Keep everything").tap()
    expect(page.locator("#samples")).to_contain_text("12 samples")


def test_a_recording_is_trained_on_or_tested_on_as_a_whole(coordinator, open_page):
    body = {"name": "walk", "task": "har", "settings": ALONE}
    coordinator.http.post("/v1/federations", json=body).raise_for_status()
    page = open_page(f"{coordinator.url}/join/walk", **PHONE)
    sensors = page.context.new_cdp_session(page)
    for kind in SENSORS:
        sensors.send("Emulation.setSensorOverrideEnabled", {"enabled": True, "type": kind, "metadata": {}})
    finger, chance = Finger(page), np.random.default_rng(7)
    expect(page.get_by_role("button", name=re.compile("^seated "))).to_have_attribute("aria-pressed", "true")
    kept = []
    for _ in range(2):
        finger.press("Record")
        while "Recording: 3 " not in page.locator("#motion-state").text_content():
            x, y, z = chance.normal(0, 3, 3)
            for kind in SENSORS:
                reading = {"xyz": {"x": x, "y": y, "z": 9.8 + z}}
                sensors.send("Emulation.setSensorOverrideReadings", {"type": kind, "reading": reading})
            page.wait_for_timeout(15)
        finger.press("Stop")
        expect(page.locator("#motion-state")).to_contain_text("kept. The last moments were left out.")
        kept.append(int(page.locator("#motion-state").text_content().split()[0]))
    expect(page.locator("#samples")).to_contain_text(f"{kept[0]} to train, 0 to check, {kept[1]} to test")
