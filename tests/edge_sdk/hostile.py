"""A coordinator that is wrong, or hostile: real answers, spoilt on their way to a device."""

from __future__ import annotations

import json

from sparrow.transport import httpx


class Lying(httpx.BaseTransport):
    """Passes calls on, and changes the answers of paths that end as ``answers`` has them."""

    def __init__(self, client):
        self.client = client
        self.calls = []
        self.answers = {}

    def handle_request(self, request):
        request.read()
        self.calls.append((request.method, request.url.path, request.content))
        # So that a payload has an answer of its own.
        request.headers["Accept"] = "application/json"
        if request.method == "DELETE":
            # The coordinator would let the device rest for a minute.
            return httpx.Response(204)
        answer = self.client.send(request)
        change = next((each for end, each in self.answers.items() if request.url.path.endswith(end)), None)
        return answer if change is None or answer.status_code != 200 else change(answer)

    def sent(self, method, end):
        """Return the bodies of the calls of a method whose path ends so."""
        return [body for called, path, body in self.calls if called == method and path.endswith(end)]


def changed(**values):
    """Return what replaces fields of an answer; a function is given the old value."""

    def spoil(answer):
        said = json.loads(answer.content)
        new = {name: value(said.get(name)) if callable(value) else value for name, value in values.items()}
        return httpx.Response(200, json={**said, **{name: new[name] for name in new if name in said}})

    return spoil
