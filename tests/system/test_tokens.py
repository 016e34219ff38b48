"""A federation behind tokens: who was given the right one can publish, join, leave and come again."""

from __future__ import annotations

import threading

import pytest

from edge_sdk.errors import Refused
from edge_sdk.join import JoinOptions, Result, join
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import load_task
from sparrow.transport import httpx

from .conftest import Coordinator

TOKENS = {kind: f"{kind}-secret-0123" for kind in ("admin", "observer", "enrolment")}
NAMES = ("pi-1", "pi-2")


@pytest.fixture
def guarded(tmp_path):
    coordinator = Coordinator(
        tmp_path / "machine", **{f"COORDINATOR_{kind.upper()}_TOKEN": token for kind, token in TOKENS.items()}
    )
    coordinator.start()
    yield coordinator
    coordinator.close()


def take_part(coordinator: Coordinator, folder, name: str, token: str | None) -> Result:
    index = NAMES.index(name)
    return join(
        coordinator.url,
        lambda info: load_task("digits", f"index={index},of=2", device=name, seed=0, batch_size=16),
        federation="night",
        name=name,
        state_dir=folder / name,
        export=folder / f"{name}.onnx",
        options=JoinOptions(enrolment_token=token, patience_seconds=20),
        quiet=True,
    )


def test_devices_join_with_tokens_and_return_with_their_own(guarded, tmp_path):
    settings = {"rounds": 1, "local_steps": 2, "min_devices": 2, "early_stopping": "off"}
    with pytest.raises(Refused, match="SPARROW_ADMIN_TOKEN"):
        publish(guarded.url, "night", "digits", **settings)
    publish(guarded.url, "night", "digits", options=PublishOptions(admin_token=TOKENS["admin"]), **settings)
    with pytest.raises(Refused, match="SPARROW_ENROLMENT_TOKEN"):
        take_part(guarded, tmp_path, NAMES[0], None)

    results: dict[str, Result] = {}

    def run(name: str) -> None:
        results[name] = take_part(guarded, tmp_path, name, TOKENS["enrolment"])

    threads = [threading.Thread(target=run, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {result.rounds for result in results.values()} == {1}
    assert all((tmp_path / f"{name}.onnx").exists() for name in NAMES)

    again = take_part(guarded, tmp_path, NAMES[0], None)
    assert again.rounds == 1, "its own token lets it in"

    url = f"{guarded.url}/v1/federations/night"
    assert httpx.get(url).status_code == 401
    seen = httpx.get(f"{url}/rounds", headers={"Authorization": f"Bearer {TOKENS['observer']}"}).json()
    assert seen[0]["updates"] == 2
