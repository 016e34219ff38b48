"""Calls to a configured address: where they may go, and that nothing leads them elsewhere."""

from __future__ import annotations

import pytest
import trustme

from sparrow.protocol.errors import BadArgument
from sparrow.transport.pinned import Destination, NotDelivered

from ...coordinator.receiver import receiving

HOOK = "https://hook.example/path"


@pytest.mark.parametrize(
    ("url", "networks"),
    [
        ("http://hook.example/", ""),
        ("http://10.1.2.3/", "10.0.0.0/8"),
        ("ftp://hook.example/", ""),
        ("hook.example", ""),
        ("https://", ""),
        ("https://me:secret@hook.example/", ""),
        ("https://hook.example/#secret", ""),
        ("https://hook.example:99999/", ""),
        (HOOK, "10.0.0.1/8"),
        (HOOK, "lab"),
    ],
)
def test_addresses_and_networks_that_cannot_be_are_refused_without_repeating_a_secret(url, networks):
    with pytest.raises(BadArgument) as refused:
        Destination.parse(url, networks)
    assert "secret" not in str(refused.value)


NOT_PUBLIC = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.5", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "240.0.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1"),
    *("::ffff:10.1.2.3", "::ffff:127.0.0.1", "64:ff9b::10.1.2.3", "2002:a01:203::1", "2001:db8::1"),
)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_refused(address):
    for found in ([address], ["93.184.215.14", address]):
        with pytest.raises(NotDelivered, match="not public"):
            Destination.parse(HOOK).addresses(lambda host, port, found=found: found)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::8.8.8.8"])
def test_a_public_address_is_called(address):
    assert Destination.parse(HOOK).addresses(lambda host, port: [address]) == [address]


def test_only_the_listed_networks_are_allowed_besides():
    ours = Destination.parse(HOOK, "10.1.2.0/24, fd00::/64")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::7"):
        assert ours.addresses(lambda host, port, found=address: [found]) == [address]
    for address in ("10.1.3.3", "fd01::7", "127.0.0.1"):
        with pytest.raises(NotDelivered):
            ours.addresses(lambda host, port, found=address: [found])


def test_http_goes_to_this_machine_even_if_the_name_means_another():
    local = Destination.parse("http://localhost:8080/")
    assert local.addresses(lambda host, port: ["127.0.0.1", "::1"]) == ["127.0.0.1", "::1"]
    with pytest.raises(NotDelivered):
        Destination.parse("http://hook.localhost/", "10.0.0.0/8").addresses(lambda host, port: ["10.1.2.3"])


def test_a_name_that_cannot_be_resolved_is_said():
    def fails(host, port):
        raise OSError("no such name")

    for found in (fails, lambda host, port: []):
        with pytest.raises(NotDelivered, match=r"hook\.example"):
            Destination.parse(HOOK).addresses(found)


# --- real calls -------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path, monkeypatch):
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


class Names:
    """Resolves each name to this machine once, and to another address afterwards."""

    def __init__(self):
        self.asked = []

    def __call__(self, host, port):
        self.asked.append((host, port))
        return ["127.0.0.1"] if len(self.asked) == 1 else ["198.51.100.7"]


def test_the_name_is_resolved_once_and_the_certificate_checked_against_it(authority, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with receiving(certificate=authority.issue_cert("hook.example")) as receiver:
        ours = Destination.parse(f"https://hook.example:{receiver.port}/path?a=b", "127.0.0.0/8")
        names = Names()
        ours.post(b"{}", {"X-Own": "1"}, names)
        assert names.asked == [("hook.example", receiver.port)]
    ((headers, body),) = receiver.got
    assert (headers["Host"], headers["X-Own"], body) == (f"hook.example:{receiver.port}", "1", b"{}")


def test_a_certificate_of_another_name_or_authority_is_refused(authority):
    for certificate in (authority.issue_cert("127.0.0.1"), authority.issue_cert("other.example"), None):
        issued = certificate or trustme.CA().issue_cert("hook.example")
        with receiving(certificate=issued) as receiver:
            ours = Destination.parse(f"https://hook.example:{receiver.port}/", "127.0.0.0/8")
            with pytest.raises(NotDelivered):
                ours.post(b"{}", {}, Names())
        assert receiver.got == []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status):
    with receiving() as elsewhere, receiving() as receiver:
        receiver.status = status
        receiver.location = f"http://127.0.0.1:{elsewhere.port}/"
        with pytest.raises(NotDelivered, match="redirects"):
            Destination.parse(f"http://127.0.0.1:{receiver.port}/").post(b"{}", {})
    assert (len(receiver.got), elsewhere.got) == (1, [])


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_another_answer_than_success_is_a_failure(status):
    with receiving() as receiver:
        receiver.status = status
        with pytest.raises(NotDelivered, match=str(status)):
            Destination.parse(f"http://localhost:{receiver.port}/").post(b"{}", {})


def test_who_does_not_answer_is_said():
    with receiving() as receiver:
        port = receiver.port
    with pytest.raises(NotDelivered, match="does not answer"):
        Destination.parse(f"http://127.0.0.1:{port}/").post(b"{}", {})
