"""The OpenAPI document: every reference leads somewhere, and what it says of answers is what comes."""

from __future__ import annotations

import re

import pytest

from sparrow.coordinator.calls.problems import STATUS
from sparrow.coordinator.settings import Settings

from .test_contract import serving


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving(Settings(data_dir=tmp_path_factory.mktemp("document") / "data")) as client:
        yield client


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def dictionaries(value):
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from dictionaries(each)


def calls(document):
    paths = document["paths"].items()
    return {call["operationId"]: (path, method, call) for path, each in paths for method, call in each.items()}


def test_every_reference_leads_somewhere(document):
    assert document["openapi"].startswith("3.1")
    references = {part["$ref"] for part in dictionaries(document) if isinstance(part.get("$ref"), str)}
    assert len(references) > 20
    for reference in references:
        found = document
        for word in reference.removeprefix("#/").split("/"):
            found = found[word]
    assert not [part for part in dictionaries(document) if "$defs" in part]


def test_calls_have_short_names_of_their_own_and_say_what_they_do(document):
    names = [call["operationId"] for each in document["paths"].values() for call in each.values()]
    assert len(set(names)) == len(names)
    assert all(len(name) < 24 for name in names)
    assert all(call["description"] for _, _, call in calls(document).values())


def test_every_status_of_an_error_is_declared_as_a_problem_document(document):
    wanted = {str(int(status)) for status in STATUS.values()}
    for name, (_, _, call) in calls(document).items():
        assert wanted <= call["responses"].keys(), name
    for answer in document["components"]["responses"].values():
        assert list(answer["content"]) == ["application/problem+json"]


def test_the_page_of_all_calls_loads_nothing_from_elsewhere(client):
    page = client.get("/docs")
    loaded = re.findall(r"""(?:src|href)=["']([^"'#]+)""", page.text)
    assert loaded == ["page/dashboard.css", "openapi.json"]
    assert "<script" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert client.get("/page/dashboard.css").status_code == 200


def test_a_body_has_one_media_type_except_an_updates(document):
    """Of two, generators of clients make one argument, and some of them none that can be used."""
    bodies = {
        name: list(call["requestBody"]["content"])
        for name, (_, _, call) in calls(document).items()
        if "requestBody" in call
    }
    assert bodies.pop("put_update") == ["application/octet-stream", "application/json"]
    assert {media_type for each in bodies.values() for media_type in each} == {
        "application/json",
        "application/octet-stream",
    }
    assert all(len(each) == 1 for each in bodies.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("get_model", {}),
        ("get_model_onnx", {}),
        ("get_manifest", {}),
        ("get_first", {}),
        ("get_graph", {"graph": "step"}),
        ("get_rounds", {}),
        ("list_devices", {}),
        ("metrics", {}),
    ],
)
def test_an_answer_has_the_declared_media_type(client, document, name, words):
    path, method, call = calls(document)[name]
    answer = client.request(method.upper(), path.format(name="default", **words))
    declared = list(call["responses"]["200"]["content"])
    if answer.status_code == 404:  # this federation has none: a problem document says so
        assert (name, answer.headers["content-type"]) == ("get_first", "application/problem+json")
    else:
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] in declared
