"""Proxies before a coordinator: the configurations of docs/operating.md, limits of a body, refused calls."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import trustme
from torch.utils.data import DataLoader, TensorDataset

from edge_sdk import join as join_command
from edge_sdk.errors import Blocked
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import Task
from sparrow import evaluate
from sparrow.bench.server import free_port
from sparrow.transport import connect
from sparrow.transport.tls import Tls

from .conftest import Coordinator, wait_until

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
LIMITED = """server {
  listen 127.0.0.1:443;
  location /lab/ { proxy_pass http://127.0.0.1:8000/; %s }
}
"""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    made = Coordinator(tmp_path_factory.mktemp("coordinator"))
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "lab.pem")
    issued.private_key_pem.write_to_path(folder / "lab.key")
    return folder


def documented(language):
    """The configuration in the documentation."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", OPERATING.read_text(), re.MULTILINE | re.DOTALL)
    return found


@contextmanager
def nginx(folder, text, coordinator, certificate):
    """The port of an nginx with this server."""
    port = free_port()
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("127.0.0.1:443", f"127.0.0.1:{port}")
    logs = "error_log stderr; pid nginx.pid; daemon off;"
    paths = "".join(
        f"{each}_temp_path {folder / each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    http = f"events {{}} http {{ access_log off; {paths} {_ours(text, coordinator, certificate)} }}"
    (folder / "nginx.conf").write_text(f"user root; {logs} {http}")
    with _running(folder, port, "nginx", "-p", folder, "-c", folder / "nginx.conf", "-e", "stderr"):
        yield port


@contextmanager
def caddy(folder, text, coordinator, certificate):
    """The port of a Caddy with this site."""
    port = free_port()
    text = text.replace("lab.example.org", f"https://localhost:{port}")
    options = "{\n  admin off\n  auto_https disable_redirects\n  grace_period 1s\n  skip_install_trust\n}\n"
    (folder / "Caddyfile").write_text(options + _ours(text, coordinator, certificate))
    with _running(folder, port, "caddy", "run", "--config", folder / "Caddyfile", "--adapter", "caddyfile"):
        yield port


def _ours(text, coordinator, certificate):
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{coordinator.port}").replace("lab.example.org", "localhost")
    return text.replace("/etc/sparrow", str(certificate))


@contextmanager
def _running(folder, port, program, *arguments):
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed")
    environment = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([found, *map(str, arguments)], env=environment, cwd=folder, stdout=log, stderr=log)
    try:

        def listens():
            assert process.poll() is None, (folder / "log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, f"{program} to listen")
        yield
    finally:
        process.terminate()
        process.wait(20)


def large(name):
    """A task whose model and updates have 1.2 MB."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 8)
    batches = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), 16)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 500), torch.nn.ReLU(), torch.nn.Linear(500, 600), torch.nn.Linear(600, 2)
    )
    return Task(name, model, torch.nn.CrossEntropyLoss(), batches, batches)


def play(server, name, folder, trust=None):
    """Publish a federation and finish it with one device."""
    settings = {
        "method": "fedavg",
        "rounds": 1,
        "min_devices": 1,
        "cohort": 1,
        "local_steps": 1,
        "early_stopping": "off",
    }
    publish(server, name, large(name), options=PublishOptions(trust=trust), **settings)
    options = JoinOptions(trust=trust, budget=1.0)
    return join(server, large(name), federation=name, name="one", state_dir=folder / name, options=options, quiet=True)


@pytest.mark.parametrize("proxy", [nginx, caddy], ids=lambda proxy: proxy.__name__)
def test_a_documented_configuration_works(proxy, coordinator, certificate, tmp_path):
    with proxy(tmp_path, documented(proxy.__name__), coordinator, certificate) as port:
        server = f"https://localhost:{port}"
        trust = Tls(certificate / "ca.pem")
        assert play(server, f"with-{proxy.__name__}", tmp_path, trust).rounds == 1
        with (
            connect(server, trust) as client,
            client.stream("GET", f"/v1/federations/with-{proxy.__name__}/events") as events,
        ):
            assert next(events.iter_lines()).startswith(("event:", "retry:", "data:", ":", "id:"))


@pytest.mark.parametrize("limit", ["1m", "100k", "20k"])
def test_a_limit_of_bodies_is_met_with_parts(limit, coordinator, certificate, tmp_path):
    text = LIMITED % f"client_max_body_size {limit};"
    name = f"limit-{limit}"
    with nginx(tmp_path, text, coordinator, certificate) as port:
        server = f"http://127.0.0.1:{port}/lab"
        assert play(server, name, tmp_path).rounds == 1
        data = tmp_path / "test.npz"
        np.savez(data, inputs=np.zeros((40_000, 8), np.float32), targets=np.zeros(40_000, np.int64))
        assert evaluate.main([name, "--server", server, "--data", str(data)]) == 0
    assert list(coordinator.data.rglob("*.part")) == []


def test_a_limit_below_the_smallest_part_is_named(coordinator, certificate, tmp_path):
    with (
        nginx(tmp_path, LIMITED % "client_max_body_size 10k;", coordinator, certificate) as port,
        pytest.raises(Blocked, match="with a body of 16,384 bytes with HTTP 413; raise its limit"),
    ):
        publish(f"http://127.0.0.1:{port}/lab", "small", large("small"), method="fedavg")


@pytest.mark.parametrize(
    ("rule", "status"),
    [("limit_except GET POST { deny all; }", 403), ("if ($request_method = PUT) { return 405; }", 405)],
)
def test_a_refused_call_ends_the_command(rule, status, coordinator, certificate, tmp_path, capsys):
    name = f"refused-{status}"
    coordinator.create(name, rounds=1, min_devices=1, cohort=1, local_steps=1)
    with nginx(tmp_path, LIMITED % rule, coordinator, certificate) as port:
        server = f"http://127.0.0.1:{port}/lab"
        words = [
            "--server",
            server,
            "--federation",
            name,
            "--state-dir",
            str(tmp_path / "state"),
            "--data",
            "index=0,of=1",
        ]
        assert join_command.main([*words, "--budget", "1", "--policy", "none", "--quiet"]) == Blocked.exit_code
    assert f"HTTP {status}" in capsys.readouterr().err
