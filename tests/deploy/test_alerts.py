"""Alerts: each fires for its cause, as Prometheus itself has it, and asks for series that exist from the start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ..system.conftest import Coordinator, wait_until
from .test_dashboard import ROOT, used

RULES = ROOT / "deploy" / "prometheus-rules.yml"
EXAMPLES = Path(__file__).with_name("alerts.yml")
OF_PROMETHEUS = {"up"}
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to each series."""


def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool here, so Prometheus does not check the rules: install Debian's package prometheus")
    return found


@pytest.mark.parametrize("words", [("check", "rules", RULES), ("test", "rules", EXAMPLES)], ids=lambda words: words[0])
def test_prometheus_accepts_the_rules_and_each_fires_for_its_cause(promtool, words):
    done = subprocess.run(
        [promtool, *map(str, words)], capture_output=True, text=True, cwd=EXAMPLES.parent, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_an_example_and_says_what_to_do():
    names = {rule["alert"] for rule in rules()}
    fires, silent = set(), set()
    for example in yaml.safe_load(EXAMPLES.read_text())["tests"]:
        for each in example["alert_rule_test"]:
            (fires if each["exp_alerts"] else silent).add(each["alertname"])
    assert fires == silent == names
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "action"} == set(rule["annotations"])


def test_all_their_series_exist_before_anything_has_happened(tmp_path):
    """A counter that begins with its first event has no increase then."""
    coordinator = Coordinator(tmp_path)
    coordinator.start()
    try:
        coordinator.create("lab", method="fedavg", min_devices=1)
        device = {"name": "pi", "enrolment_key": "k" * 32}
        coordinator.http.post("/v1/federations/lab/devices", json=device).raise_for_status()
        wait_until(lambda: coordinator.get("/v1/federations/lab/overview").json()["open_round"], "the first round")
        text = coordinator.get("/metrics").text
    finally:
        coordinator.close()
    offered = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            offered.setdefault(sample.name, []).append(sample)
    for rule in rules():
        for name, labels in used(rule["expr"]).items():
            if name in OF_PROMETHEUS:
                continue
            assert name in offered, f"{rule['alert']}: {name}"
            assert labels - ADDED <= set(offered[name][0].labels), f"{rule['alert']}: {name}"
    assert {sample.value for sample in offered["sparrow_updates_refused_total"]} == {0.0}
    assert "BadContent" in {sample.labels["reason"] for sample in offered["sparrow_updates_refused_total"]}
    assert [sample.value for sample in offered["sparrow_ready"]] == [1.0]
    assert offered["sparrow_federation_still_seconds"][0].value < 60
