"""The way to HTTPS of docs/phone.md: its commands make certificates with which a page has threads."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.bench.server import free_port
from sparrow.transport import httpx

from .browsers import browser, open_page  # noqa: F401
from .conftest import environment, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "phone.md"

pytestmark = pytest.mark.integration


@pytest.fixture
def certificates(tmp_path):
    """The folder in which the page's commands were run, but for the last one, which serves."""
    block = next(each for each in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "openssl" in each)
    script = block.replace("ADDRESS=192.168.1.5", "ADDRESS=127.0.0.1").partition("sparrow serve")[0]
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_a_page_over_https_is_secure_and_has_threads(certificates, open_page):  # noqa: F811
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "coordinator.main:app", "--port", str(port)]
    tls = ["--ssl-certfile", str(certificates / "cert.pem"), "--ssl-keyfile", str(certificates / "key.pem")]
    settings = environment(COORDINATOR_DATA_DIR=str(certificates / "data"))
    with subprocess.Popen(
        [*command, *tls], env=settings, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as server:
        try:
            trusted = ssl.create_default_context(cafile=str(certificates / "ca.pem"))

            def answers():
                try:
                    return httpx.get(f"https://127.0.0.1:{port}/healthz", verify=trusted).status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers, "the coordinator behind TLS")
            page = open_page(f"https://127.0.0.1:{port}/join/default", ignore_https_errors=True)
            assert page.evaluate("[isSecureContext, crossOriginIsolated]") == [True, True]
            page.get_by_text("Your data", exact=True).wait_for()
            assert page.locator("#insecure").is_hidden()
        finally:
            server.terminate()
