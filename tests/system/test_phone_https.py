"""The way to HTTPS of docs/phone.md: its commands make certificates with which a page has threads."""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from sparrow.bench.server import free_port
from sparrow.transport import httpx

from . import browsers
from .browsers import persistent, playwright
from .conftest import environment, wait_until

browser, open_page = browsers.browser, browsers.open_page
expect = playwright.expect

PAGE = Path(__file__).resolve().parents[2] / "docs" / "phone.md"

pytestmark = pytest.mark.integration


@pytest.fixture
def certificates(tmp_path):
    """The folder in which the page's commands were run, but for the last one, which serves."""
    block = next(each for each in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "openssl" in each)
    script = block.replace("ADDRESS=192.168.1.5", "ADDRESS=127.0.0.1").partition("sparrow serve")[0]
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


@pytest.fixture
def address(certificates):
    """The address of a coordinator with these certificates."""
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
            yield f"https://127.0.0.1:{port}"
        finally:
            server.terminate()


def test_a_page_over_https_is_secure_and_has_threads(address, open_page):
    page = open_page(f"{address}/join/default", ignore_https_errors=True)
    assert page.evaluate("[isSecureContext, crossOriginIsolated]") == [True, True]
    page.get_by_text("Your data", exact=True).wait_for()
    assert page.locator("#insecure").is_hidden()
    # Browsers keep no page whose certificate they do not trust.
    expect(page.locator("#offline")).to_contain_text("needs a network")
    expect(page.locator("#offline")).to_contain_text("SSL certificate error")
    page.troubles.clear()


def test_a_page_with_a_trusted_certificate_can_be_installed(address, browser, certificates, tmp_path):
    key = serialization.load_pem_private_key((certificates / "key.pem").read_bytes(), None).public_key()
    public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    trust = f"--ignore-certificate-errors-spki-list={base64.b64encode(hashlib.sha256(public).digest()).decode()}"
    with persistent(browser, tmp_path / "profile", trust) as context:
        page = context.new_page()
        page.goto(f"{address}/join/default")
        expect(page.locator("#offline")).to_contain_text("opens without a network")
        tools = context.new_cdp_session(page)
        assert tools.send("Page.getInstallabilityErrors")["installabilityErrors"] == []
