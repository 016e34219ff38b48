"""The Grafana dashboard and Prometheus' configuration: what they ask for is in the answers of a running coordinator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import Assignment
from sparrow.transport import httpx

from ..system.conftest import Coordinator, wait_until

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
OPERATING = (ROOT / "docs" / "operating.md").read_text()
OBSERVER = "an-observer-token-0123"
OURS = "${datasource}"
DIGITS = load_builtin("digits").manifest
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\w|\s*\()")
GROUPING = re.compile(r"\b(by|without)\s*\(([^)]*)\)")
WORDS = {"or", "and", "unless", "on", "ignoring", "group_left", "group_right", "offset", "bool"}


def panels():
    return [inner for panel in DASHBOARD["panels"] for inner in (panel, *panel.get("panels", ()))]


def queries():
    """Every query with the title of what asks it."""
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", ())]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            asked.append((f"variable {variable['name']}", f"sum by ({label}) ({metric})"))
    return asked


def used(query):
    """The metrics of a query, each with the labels that are asked of it; grouping labels count for all of them."""
    bare = re.sub(r"\[[^\]]*\]", "", query)
    grouped = {label.strip() for _, labels in GROUPING.findall(bare) for label in labels.split(",")}
    found = {}
    for name, matchers in SELECTOR.findall(re.sub(r"\b\d[\w.]*", "", GROUPING.sub("", bare))):
        if name not in WORDS:
            found.setdefault(name, set()).update(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers), grouped)
    return found


def ours(offered):
    """Our own metrics; ``_created`` says when a counter began."""
    names = [name for name in offered if name.startswith("sparrow_") and not name.endswith("_created")]
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


@pytest.fixture(scope="module")
def offered(tmp_path_factory, train, sign, take_apart):
    """Series of a coordinator after a round with an outlier, a refused update and an evaluation: name -> labels."""
    coordinator = Coordinator(tmp_path_factory.mktemp("dashboard"), COORDINATOR_OBSERVER_TOKEN=OBSERVER)
    coordinator.start()
    try:
        settings = {"rounds": 2, "min_devices": 5, "outlier_mads": 5, "evaluation_interval": 1, "early_stopping": "off"}
        coordinator.create("ward", method="fedspu", **settings)
        devices = [_enrol(coordinator, f"device-{number}") for number in range(5)]
        for number, device in enumerate(devices):
            assignment = _ask(coordinator, device)
            header, data = take_apart(train(DIGITS, assignment))
            scale = 100 if number == 4 else 0.01
            body = sign(header, (np.frombuffer(data, "<f4") * np.float32(scale)).tobytes())
            if number == 0:
                assert _put(coordinator, device, assignment, body[:-4]).status_code == 422
            assert _put(coordinator, device, assignment, body).status_code == 201
        headers = {"Authorization": f"Bearer {OBSERVER}"}
        texts = []

        def closed():
            texts.append(coordinator.http.get("/metrics", headers=headers).raise_for_status().text)
            return "sparrow_round_duration_seconds_count{" in texts[-1] and "sparrow_open_assignments{" in texts[-1]

        wait_until(closed, "the round in the metrics", interval=0.1)
        for device in devices[:1]:
            _evaluate(coordinator, device)
        wait_until(lambda: closed() and "sparrow_accuracy_ratio{" in texts[-1], "an accuracy", interval=0.1)
    finally:
        coordinator.close()
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(texts[-1]):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def _enrol(coordinator, name):
    body = {"name": name, "enrolment_key": name.ljust(32, "k")}
    answer = coordinator.http.post("/v1/federations/ward/devices", json=body).raise_for_status()
    return {"Authorization": f"Bearer {answer.json()['token']}"}


def _ask(coordinator, device):
    answer = coordinator.http.get("/v1/federations/ward/assignment", params={"wait": 5}, headers=device)
    assert answer.status_code == 200, answer.text
    return Assignment.model_validate(answer.json())


def _put(coordinator, device, assignment, body) -> httpx.Response:
    headers = {**device, "Content-Type": bundle.MEDIA_TYPE}
    return coordinator.http.put(f"/v1/assignments/{assignment.assignment_id}/update", content=body, headers=headers)


def _evaluate(coordinator, device):
    assignment = _ask(coordinator, device)
    assert assignment.kind == "evaluate"
    report = {"personal": {"accuracy": 0.5, "loss": 1.0, "num_examples": 10}}
    headers = {**device, "Content-Type": "application/json"}
    answer = coordinator.http.put(f"/v1/assignments/{assignment.assignment_id}/update", json=report, headers=headers)
    assert answer.status_code == 201, answer.text


def test_a_query_is_taken_apart():
    query = 'histogram_quantile(0.9, sum by (le, b) (rate(a_bucket{c=~"$x", d!="2"}[5m]))) / 3 or vector(0)'
    assert used(query) == {"a_bucket": {"c", "d", "le", "b"}}


def test_every_metric_and_label_is_in_the_answer_of_a_running_coordinator(offered):
    missing, asked = [], set()
    for title, query in queries():
        metrics = used(query)
        assert metrics, f"{title}: {query} asks for no metric"
        asked |= set(metrics)
        missing += [f"{title}: {name}" for name in metrics if name not in offered]
        missing += [
            f"{title}: {name}{{{each}}}" for name in metrics for each in metrics[name] - offered.get(name, set())
        ]
    assert not missing
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert bases == ours(offered), "the dashboard shows every metric of ours"


def test_the_page_lists_the_metrics_that_there_are(offered):
    told = set(re.findall(r"`(sparrow_\w+)`", OPERATING.split("## Metrics and health")[1].split("\n## ")[0]))
    assert told - {"sparrow_privacy_epsilon", "sparrow_tagged_devices"} == ours(offered)


def test_panels_have_ids_of_their_own_and_ask_the_chosen_source():
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    (source,) = (each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource")
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    for panel in panels():
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == OURS
            assert panel["targets"], panel["title"]
            assert all(target["datasource"]["uid"] == OURS for target in panel["targets"])
            assert panel["description"], panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_do_not_overlap():
    taken = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert taken.setdefault(cell, panel["id"]) == panel["id"], f"{panel['title']} covers another panel"


def test_prometheus_is_told_where_the_metrics_are():
    (block,) = (text for text in re.findall(r"^```yaml\n(.*?)^```", OPERATING, re.M | re.S) if "scrape_configs" in text)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert job["job_name"] == "sparrow"
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["authorization"]["credentials_file"]
    assert job["scheme"] == "https"
    assert all(re.fullmatch(r"[\w.-]+:\d+", target) for each in job["static_configs"] for target in each["targets"])
