"""``python -m benchmarks.browser``: compare training steps of a page and of the SDK on one machine.

    python -m benchmarks.browser               measure and write its rows and its section of docs/results/speed.md
    python -m benchmarks.browser page          write the page of the recorded results

A page in headless Chromium takes part in a federation of one round with a real coordinator. Its milliseconds per step
are those on its screen, the median of its last 50 steps with optimiser and all overhead. The SDK's engine on ONNX
Runtime is measured before and after each page on the same shapes. Data are random, because their values do not affect
the time. Needs Chromium, and the runtime that ``sparrow web`` downloads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS, write_section
from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import Part
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from sparrow.bench.server import coordinator
from sparrow.graphs import Graphs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronDraw, draw_neurons
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import connect, httpx

TASKS = ("mnist", "mnist:leaf")
BATCH = 32
STEPS = 120
TURNS = 3
SAMPLES = 640
HOST = "phones.test"
"""A name under which a page is not isolated, so that it has one thread."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVE = """async ([federation, classes, size, samples, budget]) => {
  const opened = performance.now();
  const worker = new Worker("/web/worker.js", { type: "module" });
  const state = new Promise((resolve, reject) => {
    let first = null;
    worker.onmessage = ({ data }) => {
      const now = data.state;
      if (now?.work?.step > 0) first ??= performance.now() - opened;
      if (now?.phase === "failed" || data.say === "refused") reject(new Error(now?.detail ?? data.detail));
      if (now?.phase === "finished") resolve({ ...now, firstStep: first / 1000 });
    };
    worker.onerror = (event) => reject(new Error(event.message));
  });
  const part = (count) => ({
    inputs: Float32Array.from({ length: count * size }, () => Math.random()),
    targets: Int32Array.from({ length: count }, (_, place) => place % classes), count,
  });
  worker.postMessage({ do: "open", federation, token: null });
  worker.postMessage({ do: "files", train: part(samples), validation: part(32), test: part(32) });
  worker.postMessage({ do: "join", name: "page", budget });
  return state;
}"""


def sdk_milliseconds(task: str, budget: float, threads: int) -> float:
    """Return the median milliseconds of a step of the SDK's engine, optimiser included."""
    built_in = load_builtin(task)
    manifest = built_in.manifest
    graphs = Graphs(built_in.graphs["step"], built_in.graphs["evaluation"])
    network = Network(manifest, Sessions(graphs, threads=threads))
    network.load(initial_values(manifest, 0))
    chance = np.random.default_rng(0)
    count = SAMPLES
    inputs = chance.random((count, *manifest.input_shape), np.float32)
    batches = ArrayBatches(Arrays(inputs, np.arange(count) % manifest.output_shape[0]), BATCH)
    mask = draw_neurons(manifest, NeuronDraw("any", budget)) if budget < 1 else None
    times = [time.perf_counter()]
    OnnxEngine(network, classification=True).train(
        batches,
        FederationSettings(local_steps=STEPS),
        Part(mask),
        learning_rate=0.01,
        seed=0,
        progress=lambda done, total, loss: times.append(time.perf_counter()),
    )
    return 1e3 * float(np.median(np.diff(times)[-50:]))


def page_row(browser: Any, address: str, task: str, budget: float, threads: int) -> dict[str, Any]:
    """Return a page's figures for one round: milliseconds per step, seconds to the first step, memory."""
    manifest = load_builtin(task).manifest
    name = f"{task.replace(':', '-')}-{threads}-{int(100 * budget)}"
    settings: dict[str, object] = {
        "rounds": 1,
        "cohort": 1,
        "min_devices": 1,
        "local_steps": STEPS,
        "batch_size": BATCH,
    }
    settings |= {"method": "fedspu", "early_stopping": "off", "learning_rate": 0.01}
    wanted = {"name": name, "task": task, "settings": settings}
    with connect(address) as client:
        client.post("/v1/federations", json=wanted).raise_for_status()
    before = {process.pid for process in _renderers()}
    context = browser.new_context()
    try:
        page = context.new_page()
        port = httpx.URL(address).port
        page.goto(f"{address if threads > 1 else f'http://{HOST}:{port}'}/web/onnxruntime-web.LICENSE.txt")
        own = [process for process in _renderers() if process.pid not in before]
        size = int(np.prod(manifest.input_shape))
        state = page.evaluate(DRIVE, [name, manifest.output_shape[0], size, SAMPLES, budget])
        memory = max(map(_pss, own))
    finally:
        context.close()
        with connect(address) as client:
            client.delete(f"/v1/federations/{name}")
    assert state["threads"] == threads, "of the page"
    return {"ms": state["stepMilliseconds"], "first_step": state["firstStep"], "page_mb": memory / 1e6}


def _renderers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        # A process may end meanwhile.
        with suppress(psutil.Error):
            found += [process] if "--type=renderer" in " ".join(process.cmdline()) else []
    return found


def _pss(process: psutil.Process) -> int:
    # Chromium ends processes that it kept in reserve.
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each network, share of neurons, number of threads and turn."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, NAMES)))
    flags = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules=MAP {HOST} 127.0.0.1"]
    folder = tempfile.TemporaryDirectory()
    with folder, coordinator(Path(folder.name)) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=flags)
        version = browser.version
        for turn in range(TURNS):
            for task in TASKS:
                for budget in (1.0, 0.25):
                    for threads in (1, 2):
                        row = {"task": task, "budget": budget, "threads": threads, "turn": turn, "chromium": version}
                        native = [sdk_milliseconds(task, budget, threads)]
                        page = page_row(browser, address, task, budget, threads)
                        native.append(sdk_milliseconds(task, budget, threads))
                        yield {**row, "sdk_ms": statistics.mean(native), **page}
        browser.close()


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of the results."""
    table = []
    for task in TASKS:
        for budget in (1.0, 0.25):
            for threads in (1, 2):
                some = [r for r in rows if (r["task"], r["budget"], r["threads"]) == (task, budget, threads)]
                ratios = [row["ms"] / row["sdk_ms"] for row in some]

                def middle(name: str, some: Sequence[dict[str, Any]] = some) -> float:
                    return float(statistics.median(row[name] for row in some))

                table.append(
                    [
                        f"{task}, {budget:.0%} of the neurons",
                        str(threads),
                        f"{middle('sdk_ms'):.1f}",
                        f"{middle('ms'):.1f}",
                        f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
                        f"{middle('first_step'):.1f}",
                        f"{middle('page_mb'):.0f}",
                    ]
                )
    heads = ["network", "threads", "SDK, ms a step", "page, ms a step", "ratio (range)", "first step, s", "page, MB"]
    return f"""# The training step in a browser

Made by `python -m benchmarks.browser` from [browser.jsonl](../../benchmarks/rows/browser.jsonl): {TURNS} turns, each
page between two runs of the SDK's engine on the same machine (ONNX Runtime, the same number of threads), Chromium
{rows[-1]["chromium"]}, headless, batch size {BATCH}, FedSPU. A step is forward pass, backward pass and optimiser; the
page's time is the one that its screen shows. Ratios are medians over turns, with their range.

{markdown_table(heads, table)}

- *First step* is the time from the opening of the page's worker to the end of its first training step. In this time
  the runtime of 3.7 MB (compressed) is downloaded and compiled, the device enrols, and the model is downloaded, over
  the loopback.
- *page, MB* is the proportional memory (PSS) of the page's process after the last step, including the browser's own
  code.
- Two threads need a page that is isolated from other origins, which requires HTTPS or the loopback. One thread was
  measured under a host name without either.
- At 25 % of the neurons only the errors of active weights are computed ([budget.md](../budget.md)).
"""


def main() -> None:
    """Measure, and write rows and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.browser", description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("page",), help="write only the page")
    options = parser.parse_args()
    rows_file = ROWS / "browser.jsonl"
    if options.what is None:
        with rows_file.open("w") as file:
            for row in measure():
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    write_section("speed", "browser", page(rows))


if __name__ == "__main__":
    main()
