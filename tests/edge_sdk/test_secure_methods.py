"""Secure federations of each method that can be one, beside the same ones without: the same models come out."""

from __future__ import annotations

import asyncio

import pytest

from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation.simulate import SimulationOptions, simulate
from sparrow.transport import httpx

from ..kinds import METHODS as KINDS
from ..kinds import chosen

pytestmark = pytest.mark.integration

URL = "http://127.0.0.1"
METHODS = {
    "fedavg": {},
    "fedprox": {},
    "fedper": {},
    "fedrep": {},
    "ditto": {},
    "apfl": {},
    "fedem": {},
    "fedmd": {},
    "pfedme": {},
    "perfedavg": {},
    "lgfedavg": {},
    "fjord": {},
    "heterofl": {"rows": "all"},
    "fedsgc": {"adjust_interval": 0},
    "feddst": {"adjust_interval": 0},
    "votedst": {"adjust_interval": 0},
}
"""Methods whose devices train the same with and without, and what they must be set to."""
DRAWN = {"fedspu": {}, "feddrop": {}}
"""Methods whose neurons are drawn, by cell and from bytes that nobody knows: no two runs are the same."""


def last_record(folder, method, **settings):
    """Play two rounds on digits, whose model has running statistics; return the last record."""
    app = create_app(Settings(data_dir=folder, default_task=""))
    budgets = (0.5, 1.0) if method in ("fjord", "heterofl", *DRAWN) else (1.0,)
    simulate(
        app=app, task="digits", devices=6, cohort=6, rounds=2, local_epochs=1, learning_rate=0.01, method=method,
        method_settings=(METHODS | DRAWN)[method], budgets=budgets, early_stopping="off", evaluation_interval=1,
        data="public=0.1" if method == "fedmd" else None, quiet=True,
        options=SimulationOptions(in_memory=True), **settings,
    )  # fmt: skip

    async def ask():
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return (await client.get("/v1/federations/default/rounds")).json()[-1]

    return asyncio.run(ask())


@pytest.mark.parametrize("method", chosen(METHODS, (*KINDS, "votedst")))
def test_the_same_model_comes_out_with_and_without(tmp_path, method):
    plain = last_record(tmp_path / "plain", method)
    wide = {"secure_range": 16.0} if method == "fedmd" else {}  # of scores, not of weights
    secure = last_record(tmp_path / "secure", method, secure=True, secure_metrics=False, secure_bits=32, **wide)
    assert secure["notes"]["secure_cells"] == (2 if method in ("fjord", "heterofl") else 1)
    assert (secure["updates"], secure["counts"]["clipped_values"]) == (6, 0)
    judged = {name for name in ("loss_personal", "loss_global", "train_loss") if plain[name] is not None}
    assert len(judged) > 1
    for name in judged:
        assert secure[name] == pytest.approx(plain[name], rel=1e-4), name


@pytest.mark.parametrize("method", DRAWN)
def test_cells_of_drawn_neurons_train(tmp_path, method):
    secure = last_record(tmp_path, method, secure=True, secure_metrics=False)
    assert (secure["updates"], secure["notes"]["secure_cells"]) == (6, 2)
    assert secure["loss_global"] < 2.5


def test_metrics_under_masks_are_those_that_devices_would_have_told(tmp_path):
    """The loss of training is the mean of those that devices report; the received model's, that of the round before."""
    told = last_record(tmp_path / "told", "fedspu", secure=True, secure_metrics=False)
    masked = last_record(tmp_path / "masked", "ditto", secure=True, secure_bits=32)
    plain = last_record(tmp_path / "plain", "ditto")
    assert masked["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-3)
    assert masked["accuracy_personal"] == pytest.approx(plain["accuracy_personal"], abs=0.05)
    assert masked["loss_global"] is not None
    assert told["accuracy_personal_decile"] is not None
    assert masked["accuracy_personal_decile"] is None
