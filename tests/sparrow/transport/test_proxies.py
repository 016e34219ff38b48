"""Proxies of the environment: their variables, the hosts without one, and the messages that name them."""

from __future__ import annotations

import http.server
import os
import socket
import threading

import pytest

from edge_sdk.device.transport import Transport
from edge_sdk.errors import BadArgument, Unreachable
from sparrow.command_line.exits import Exit
from sparrow.transport import connect, httpx
from sparrow.transport.proxies import covers


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def set_to(monkeypatch):
    def set_all(text):
        for entry in text.split(" "):
            monkeypatch.setenv(*entry.split("=", 1))

    return set_all


@pytest.mark.parametrize(
    ("no_proxy", "server"),
    [
        ("*", "http://here"),
        ("here", "http://here:8000"),
        ("example.org", "https://lab.example.org"),
        (".example.org", "https://lab.example.org"),
        ("*.example.org", "https://lab.example.org."),
        ("EXAMPLE.org", "https://Example.ORG"),
        ("a, here", "http://here"),
        ("a here", "http://here"),
        ("here:8000", "http://here:8000"),
        ("here:80", "http://here"),
        ("http://here", "http://here"),
        ("10.0.0.0/8", "http://10.1.2.3"),
        ("10.1.2.3/8", "http://10.1.2.4"),
        ("127.0.0.0/8", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("fe80::/10", "http://[fe80::2]"),
        ("[fe80::]/10", "http://[fe80::2]"),
        ("0:0:0:0:0:0:0:1", "http://[::1]"),
        ("10.0.0.0/8", "http://[::ffff:10.0.0.1]"),
        ("xn--bcher-kva.example", "http://bücher.example"),
        ("bücher.example", "http://bücher.example"),
    ],
)
def test_no_proxy_covers_a_host(no_proxy, server, set_to):
    assert covers(no_proxy, httpx.URL(server))
    set_to("all_proxy=socks://nowhere")
    os.environ["no_proxy"] = no_proxy
    with connect(server) as client:
        assert client.through is None


@pytest.mark.parametrize(
    ("no_proxy", "server"),
    [
        ("", "http://here"),
        (",,", "http://here"),
        ("here", "http://there"),
        ("here", "http://nothere"),
        ("ample.org", "http://example.org"),
        ("here:8001", "http://here:8000"),
        ("https://here", "http://here"),
        ("10.0.0.0/8", "http://11.0.0.1"),
        ("fe80::/10", "http://[2001:db8::1]"),
        ("10.0.0.0/99", "http://10.0.0.1"),
        ("[", "http://10.0.0.1"),
        (":::", "http://[::1]"),
        ("0.0.0.0/0", "http://[::1]"),
    ],
)
def test_no_proxy_does_not_cover_a_host(no_proxy, server):
    assert not covers(no_proxy, httpx.URL(server))


@pytest.mark.parametrize(
    ("environment", "server", "variable"),
    [
        ("http_proxy=http://a", "http://here", "http_proxy"),
        ("HTTP_PROXY=http://a", "http://here", "HTTP_PROXY"),
        ("http_proxy=a:3128 HTTP_PROXY=http://b", "http://here", "http_proxy"),
        ("HTTPS_PROXY=https://a", "https://here", "HTTPS_PROXY"),
        ("all_proxy=http://a", "https://here", "all_proxy"),
        ("all_proxy=socks://a http_proxy=http://b", "http://here", "http_proxy"),
        ("https_proxy=http://a", "http://here", None),
        ("ftp_proxy=http://a", "http://here", None),
        ("http_proxy= HTTP_PROXY=http://a", "http://here", None),
    ],
)
def test_the_variable_of_a_scheme_has_priority(environment, server, variable, set_to):
    set_to(environment)
    with connect(server) as client:
        assert (client.through and client.through.variable) == variable


@pytest.mark.parametrize(
    "value",
    ["socks://a:1", "socks4://a", "ftp://a", "http://", ":3128", "http://a:b", "http://a:99999", "http://[::1", "a\nb"],
)
@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_that_cannot_be_used_is_named(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadArgument) as refused:
        connect("http://here:8000")
    assert str(refused.value).startswith(f"{variable}={value}".replace("\n", "\\n"))
    assert "add here to no_proxy" in str(refused.value)
    assert refused.value.exit_code == Exit.USAGE


def test_socks_needs_its_package(monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5h://ann:secret@a")
    monkeypatch.setitem(__import__("sys").modules, "socksio", None)
    with pytest.raises(BadArgument, match="pip install socksio") as refused:
        connect("http://here")
    assert "secret" not in str(refused.value)


def test_a_silent_proxy_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        proxy = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", f"http://ann:secret@{proxy}")
        with connect("http://coordinator.example") as client, pytest.raises(Unreachable) as silent:
            Transport(client, patience_seconds=0).federations()
    assert f"http_proxy=http://***@{proxy}" in str(silent.value)
    assert "add coordinator.example to no_proxy" in str(silent.value)


def test_calls_go_through_the_proxy(monkeypatch):
    asked = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Proxy-Authorization"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("all_proxy", f"ann:secret@127.0.0.1:{server.server_port}")
        try:
            with connect("http://coordinator.example/lab") as client:
                assert Transport(client, patience_seconds=0).federations() == []
        finally:
            server.shutdown()
            thread.join()
    assert asked == [("http://coordinator.example/lab/v1/federations", "Basic YW5uOnNlY3JldA==")]
