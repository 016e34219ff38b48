"""Training steps for pages: made once for all who ask, in few processes, while other calls are answered."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparrow.coordinator.web import steps
from sparrow.graphs.steps import step_of_neurons
from sparrow.protocol.masks import NeuronDraw, draw_neurons
from sparrow.transport import httpx

from .test_contract import DIGITS, ask, assert_problem, enrol, open_app, put, settings_of

pytestmark = pytest.mark.integration  # serves from a real port to many threads

__all__ = ["open_app", "settings_of"]  # fixtures

PATH = "/v1/federations/default/fast-step.onnx"


@pytest.mark.parametrize("ratio", [1.0, 0.15])
def test_a_step_is_made_for_a_share_of_the_neurons(open_app, ratio, monkeypatch):
    client, step = open_app(), DIGITS.graphs["step"]
    mask = draw_neurons(DIGITS.manifest, NeuronDraw("any", ratio)) if ratio < 1 else None
    found = client.get(PATH, params={"ratio": ratio})
    assert found.content == step_of_neurons(step, DIGITS.manifest, mask)
    monkeypatch.setattr(steps, "run_limited", None)
    assert client.get(PATH, params={"ratio": ratio}).headers["etag"] == found.headers["etag"], "it is kept"


@pytest.mark.parametrize("ratio", [0.33, 0.2500001 * 0.999, 0.01, 0.999])
def test_there_are_few_shares(open_app, ratio):
    assert_problem(
        open_app().get(PATH, params={"ratio": ratio}), 422, "is not a multiple of 0.05; choose such a budget"
    )


def test_a_step_that_takes_too_long_is_given_up(open_app, monkeypatch):
    monkeypatch.setattr(steps, "SECONDS", 0.05)
    answer = open_app().get(PATH)
    assert_problem(answer, 503, "it takes longer than 0.05 s; try again, or publish a smaller model")
    assert answer.headers["retry-after"] == "5"


def test_while_steps_are_made_others_are_answered(open_app, monkeypatch, train):
    """60 calls for all shares: two steps are made, sixteen wait, and the others come again later."""
    free, made = threading.Event(), []

    def held(*arguments, **named):
        made.append(arguments)
        assert free.wait(60)
        return b"step"

    monkeypatch.setattr(steps, "run_limited", held)
    client = open_app()
    (_, first), (_, second) = (enrol(client, name) for name in ("one", "two"))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx.Client(base_url=client.base_url, timeout=60, limits=limits) as crowd, ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(crowd.get, PATH, params={"ratio": (1 + number % 20) / 20}) for number in range(60)]
        while sum(call.done() for call in calls) < 60 - 3 * (steps.REWRITERS + steps.MOST_WAITING):
            free.wait(0.01)
        assert client.get("/readyz").status_code == 200
        assignment = ask(client, first)
        assert put(client, first, assignment, train(DIGITS.manifest, assignment)).status_code == 201
        assert ask(client, second).round == 1
        assert len(made) == steps.REWRITERS
        free.set()
        answers = [call.result() for call in calls]
    assert {answer.status_code for answer in answers} == {200, 503}
    assert sum(answer.status_code == 200 for answer in answers) >= 3 * (steps.REWRITERS + steps.MOST_WAITING)
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "5"}
