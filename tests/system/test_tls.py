"""A coordinator behind TLS on a real port: an authority of one's own, certificates for devices, and what goes wrong."""

from __future__ import annotations

import socket
import ssl
import threading
import warnings
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
import trustme
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_sdk import join, publish
from edge_sdk.device.transport import Transport
from edge_sdk.errors import NoCoordinator, TooManyRequests, Unreachable
from sparrow import evaluate
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation import simulate
from sparrow.transport import connect
from sparrow.transport.tls import BadCertificate, Tls

from .conftest import wait_until

TLS_RECORD = b"\x16"


class Certificates:
    """An authority, what it has issued, and one that nobody knows, as files."""

    def __init__(self, folder):
        ours, theirs = trustme.CA(), trustme.CA()
        self.ca, self.unknown_ca = folder / "ca.pem", folder / "unknown.pem"
        ours.cert_pem.write_to_path(self.ca)
        theirs.cert_pem.write_to_path(self.unknown_ca)
        self.server = self._issue(ours, folder / "server", "localhost")
        self.device = self._issue(ours, folder / "device", "pi-1")
        self.unknown = self._issue(theirs, folder / "unknown", "pi-1")
        now = datetime.now(timezone.utc)
        day = timedelta(days=1)
        self.early = self._issue(ours, folder / "early", "localhost", not_before=now + day, not_after=now + 2 * day)
        self.late = self._issue(ours, folder / "late", "localhost", not_before=now - 2 * day, not_after=now - day)
        self.elsewhere = self._issue(ours, folder / "elsewhere", "coordinator.example")
        self.own = _self_signed(folder / "own", now, day)

    @staticmethod
    def _issue(authority, path, name, **validity):
        issued = authority.issue_cert(name, **validity)
        certificate, key = path.with_suffix(".pem"), path.with_suffix(".key")
        certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return certificate, key


def _self_signed(path, now, day):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    path.with_suffix(".pem").write_bytes(pem)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.with_suffix(".key").write_bytes(key.private_bytes(*form))
    return path.with_suffix(".pem"), path.with_suffix(".key")


@contextmanager
def handshaking(certificate, key, newest=None, plain=b""):
    """The address of a server that only shakes hands. plain: its answer to calls without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if newest is not None:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = newest

    def serve():
        while not over.is_set():
            connection, _ = listening.accept()
            with connection, suppress(ssl.SSLError, ConnectionError):
                connection.settimeout(10)
                if plain and connection.recv(1, socket.MSG_PEEK) != TLS_RECORD:
                    connection.recv(65536)
                    connection.sendall(plain)
                else:
                    context.wrap_socket(connection, server_side=True).close()

    over = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://localhost:{listening.getsockname()[1]}"
    finally:
        over.set()
        # Ends the wait for a connection.
        with suppress(OSError), socket.create_connection(listening.getsockname()) as last:
            last.sendall(b"over")
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def serving(folder, limits=None, **tls):
    """The address of a coordinator that uvicorn serves with these ``--ssl-*`` options."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_app(Settings(data_dir=folder, tick_seconds=0.05, **limits or {}))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=5, **tls))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"https://localhost:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    certificate, key = files.server
    with serving(tmp_path_factory.mktemp("machine"), ssl_certfile=certificate, ssl_keyfile=key) as address:
        yield address


@pytest.fixture(scope="module")
def mutual(files, tmp_path_factory):
    """One that asks every caller for a certificate of its authority."""
    options = {"ssl_certfile": files.server[0], "ssl_keyfile": files.server[1], "ssl_ca_certs": str(files.ca)}
    with serving(tmp_path_factory.mktemp("mutual"), **options, ssl_cert_reqs=2) as address:
        yield address


def status(address, trust=None):
    """What the federation ``default`` is said to be, over a transport that is not patient."""
    with connect(address, trust) as client:
        return Transport(client, patience_seconds=5).federation("default").status.value


def why_not(address, trust=None):
    slept = []
    with connect(address, trust) as client, pytest.raises(Unreachable) as refused:
        Transport(client, patience_seconds=5, sleep=slept.append).federation("default")
    assert "\n" not in str(refused.value)
    assert address in str(refused.value)
    return str(refused.value)


def test_an_authority_of_ones_own_is_trusted_where_it_is_given(server, files):
    assert status(server, Tls(files.ca)) == "waiting"


def test_any_other_is_refused_in_one_line_that_says_what_to_do(server, files):
    for trust in (None, Tls(files.unknown_ca)):
        assert "give its authority with --ca FILE" in why_not(server, trust)
    elsewhere = server.replace("localhost", "127.0.0.1")
    assert "use a host name of the certificate" in why_not(elsewhere, Tls(files.ca))


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [("early", "set the clock"), ("late", "has expired"), ("own", "is self-signed"), ("elsewhere", "has another name")],
)
def test_each_fault_of_a_certificate_has_its_remedy(fault, remedy, files, tmp_path):
    certificate, key = getattr(files, fault)
    trust = None if fault == "own" else Tls(files.ca)
    with handshaking(certificate, key) as address:
        assert remedy in why_not(address, trust)


def test_a_self_signed_certificate_can_be_given_as_its_own_authority(files, tmp_path):
    certificate, key = files.own
    with serving(tmp_path, ssl_certfile=certificate, ssl_keyfile=key) as address:
        assert status(address, Tls(certificate)) == "waiting"


def test_a_scheme_that_the_server_does_not_speak_is_named(server, tmp_path):
    assert "use https://" in why_not(server.replace("https", "http"))
    with serving(tmp_path) as plain:
        assert "use http://" in why_not(plain)


def test_an_old_version_of_tls_is_named(files):
    certificate, key = files.server
    with handshaking(certificate, key, newest=ssl.TLSVersion.TLSv1_1) as address:
        assert "TLS 1.2 or newer" in why_not(address, Tls(files.ca))


def test_a_page_about_https_names_the_scheme(files):
    """As nginx answers plain http on a port for TLS."""
    certificate, key = files.server
    page = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n"
    with ExitStack() as stack:
        address = stack.enter_context(handshaking(certificate, key, plain=page)).replace("https", "http")
        transport = Transport(stack.enter_context(connect(address)), patience_seconds=5)
        with pytest.raises(NoCoordinator, match="use https://"):
            transport.federation("default")


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"])
def test_a_variable_with_a_missing_path_is_named(variable, monkeypatch, tmp_path):
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "none" / "there"))
    with pytest.raises(BadCertificate) as refused:
        connect("https://localhost:1")
    assert str(refused.value).startswith(f"{variable}={tmp_path}")
    assert refused.value.exit_code == Exit.USAGE
    connect("http://localhost:1").close()


def test_the_authorities_of_the_environment_are_trusted(server, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    assert status(server) == "waiting"
    monkeypatch.setenv("SSL_CERT_FILE", str(files.unknown_ca))
    assert status(server, Tls(files.ca)) == "waiting", "an option has priority"


def test_connections_count_before_their_handshake(files, tmp_path):
    certificate, key = files.server
    limits = {"limit_loopback": True, "address_connections": 5}
    with serving(tmp_path, limits, ssl_certfile=certificate, ssl_keyfile=key) as address, ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(12)]
        for beyond in silent[5:]:
            assert beyond.recv(1) == b"", "closed at once, or after two seconds"
        for within in silent[:5]:
            within.setblocking(False)
            with pytest.raises(BlockingIOError):
                within.recv(1)
            within.close()

        def is_let_in():
            with suppress(TooManyRequests):
                return status(address, Tls(files.ca)) == "waiting"

        wait_until(is_let_in, "those that have left to count no more")


def test_a_coordinator_may_ask_devices_for_certificates(mutual, files):
    certificate, key = files.device
    assert status(mutual, Tls(files.ca, certificate, key)) == "waiting"
    assert "--client-cert FILE" in why_not(mutual, Tls(files.ca))
    assert "--client-cert FILE" in why_not(mutual, Tls(files.ca, *files.unknown))


def test_files_that_cannot_be_used_are_named(files, tmp_path):
    certificate, key = files.device
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for tls, said in (
        (Tls(ca=tmp_path / "none.pem"), "--ca: there is no file"),
        (Tls(ca=rubbish), "has no certificates in PEM format"),
        (Tls(files.ca, certificate, files.server[1]), "the key that belongs to it"),
        (Tls(files.ca, certificate), "the key that belongs to it"),
        (Tls(files.ca, key=key), "--client-key needs --client-cert"),
    ):
        with pytest.raises(BadCertificate, match=said):
            tls.context()


def test_every_command_takes_the_certificates(mutual, files, tmp_path, capsys, monkeypatch):
    where = ["--server", mutual]
    monkeypatch.setenv("SPARROW_CA", str(files.ca))
    own = ["--client-cert", str(files.device[0]), "--client-key", str(files.device[1])]
    settings = ["rounds=1", "min_devices=2", "local_steps=1", "early_stopping=off"]
    assert publish.main(["night", *where, *own, *settings]) == 0
    many = ["--devices", "2", "--processes", "1", "--memory", "--quiet", "--accelerator", "cpu"]
    assert simulate.main([*where, *own, "--federation", "night", *many]) == 0
    late = ["--device-name", "late", "--data", "index=0,of=2", "--budget", "1", "--policy", "none", "--quiet"]
    late += ["--state-dir", str(tmp_path / "late"), "--threads", "1", "--deterministic"]
    assert join.main([*where, *own, "--federation", "night", *late]) == 0, capsys.readouterr().err
    data = tmp_path / "test.npz"
    np.savez(data, inputs=np.zeros((2, 1, 8, 8), np.float32), targets=np.zeros(2, np.int64))
    judging = ["night", "--data", str(data)]
    assert evaluate.main([*judging, *where, *own]) == 0
    assert evaluate.main([*judging, *where]) == Exit.UNREACHABLE
    assert "--client-cert FILE" in capsys.readouterr().err
