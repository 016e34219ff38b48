"""TLS towards a coordinator: trusted authorities, client certificates, and remedies for failed handshakes.

``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name the trusted authorities if ``--ca`` does not.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import certifi

from ..command_line.exits import Exit
from ..protocol.errors import SdkError
from .library import httpx
from .variables import setting

__all__ = ["BadCertificate", "Tls"]


class BadCertificate(SdkError):
    """A certificate or key is not usable; the text says which and why."""

    exit_code = Exit.USAGE


CERTIFICATE = "if it asks for a certificate, give one that it trusts with --client-cert FILE --client-key FILE"
PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Tls:
    """Files in PEM format. ca: the only trusted authorities. certificate and key: the caller's own, for a coordinator
    that asks for one; the certificate's file may include the key."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the argument ``verify`` of a client. Raises BadCertificate if a file is missing or unusable."""
        if self.key is not None and self.certificate is None:
            raise BadCertificate("--client-key needs --client-cert; pass both")
        for option, path in (("--ca", self.ca), ("--client-cert", self.certificate), ("--client-key", self.key)):
            if path is not None and not path.is_file():
                raise BadCertificate(f"{option}: there is no file {path}")
        _check_key_log()
        context = _trusting(*self._authorities())
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (ssl.SSLError, OSError, BadCertificate) as error:
                raise BadCertificate(
                    f"--client-cert {self.certificate} and its key cannot be used ({_reason(error)}); give a "
                    f"certificate and the key that belongs to it, both in PEM format and without a password"
                ) from None
        return context

    def _authorities(self) -> tuple[str, str | None, str | None]:
        """Return the name of the trusted authorities' source for messages, and their file or folder."""
        if self.ca is not None:
            return f"--ca {self.ca}", str(self.ca), None
        advice = "correct or unset it, or give --ca FILE"
        file = setting("SSL_CERT_FILE")
        if file is not None:
            if not Path(file.value).is_file():
                raise BadCertificate(f"{file}: there is no such file; {advice}")
            return str(file), file.value, None
        folder = setting("SSL_CERT_DIR")
        if folder is not None:
            # OpenSSL takes several folders.
            if not any(Path(each).is_dir() for each in folder.value.split(os.pathsep)):
                raise BadCertificate(f"{folder}: there is no such folder; {advice}")
            return str(folder), None, folder.value
        return certifi.where(), certifi.where(), None


def _trusting(source: str, file: str | None, folder: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file, capath=folder)
    except (ssl.SSLError, OSError) as error:
        raise BadCertificate(f"{source} has no certificates in PEM format ({_reason(error)})") from None


def _check_key_log() -> None:
    log = setting("SSLKEYLOGFILE")
    if log is None:
        return
    try:
        with Path(log.value).open("a"):
            pass
    except OSError as error:
        raise BadCertificate(f"{log}: {error.strerror}; correct or unset it") from None


def _no_password() -> str:
    # Without a callback OpenSSL would ask on the terminal, and wait.
    raise BadCertificate("the key has a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


CA_VARIABLE = "SPARROW_CA"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--ca``, ``--client-cert`` and ``--client-key``; ``from_options`` reads them."""
    group = parser.add_argument_group("TLS, for --server https://HOST")
    own = setting(CA_VARIABLE)
    group.add_argument(
        "--ca",
        type=Path,
        default=None if own is None else Path(own.value),
        metavar="FILE",
        help=f"trust only these authorities (default: {CA_VARIABLE}, or public ones)",
    )
    group.add_argument("--client-cert", type=Path, metavar="FILE", help="certificate to present to the server")
    group.add_argument("--client-key", type=Path, metavar="FILE", help="its key, unless it is in the same file")


def from_options(options: argparse.Namespace) -> Tls:
    """Return the TLS settings of the options."""
    return Tls(options.ca, options.client_cert, options.client_key)


# OpenSSL's X509_V_ERR_ codes, from x509_vfy.h, which Python's ssl does not name.
NOT_YET_VALID = 9
EXPIRED = 10
SELF_SIGNED = 18
UNKNOWN_AUTHORITY = (2, 19, 20, 21)
REVOKED = 23
WRONG_NAME = (62, 63, 64)
TOO_WEAK = (66, 67, 68)


def explain(error: BaseException) -> str | None:
    """Return the reason and a remedy if a call failed because of TLS, otherwise None."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _untrusted(cause)
        if isinstance(cause, ssl.SSLError):
            reason = cause.reason or ""
            if "ALERT" in reason:
                return f"it ended the TLS handshake ({reason.lower().replace('_', ' ')}); {_after_alert(reason)}"
            if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
                return "it does not use TLS; use http://, or give it a certificate (sparrow serve --ssl-certfile)"
            if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
                return f"it and this machine support no common version of TLS ({cause.reason}); {NEWER}"
        cause = cause.__cause__ or cause.__context__
    return None


NEWER = "let both support TLS 1.2 or newer"


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    """Return the reason and the remedy for a certificate that was not accepted."""
    code = error.verify_code
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    if code == NOT_YET_VALID:
        return f"its certificate is not yet valid, and this machine's clock says {now}; set the clock"
    if code == EXPIRED:
        return (
            f"its certificate has expired, and this machine's clock says {now}; renew the certificate, or set the "
            f"clock if it is wrong"
        )
    if code in WRONG_NAME:
        return (
            f"its certificate has another name ({error.verify_message.rstrip('.')}); use a host name of the "
            f"certificate in the address, or issue a certificate with this name"
        )
    if code == SELF_SIGNED:
        return "its certificate is self-signed; copy that certificate here, and give it with --ca FILE"
    if code == REVOKED:
        return "its certificate was revoked; give it a new one"
    if code in TOO_WEAK:
        return f"its certificate is too weak ({error.verify_message}); issue one with a longer key and SHA-256"
    if code in UNKNOWN_AUTHORITY:
        return (
            f"its certificate is not trusted ({error.verify_message}); give its authority with --ca FILE, and let it "
            f"send its intermediate certificates"
        )
    return f"its certificate cannot be used ({error.verify_message}); issue another one for a TLS server"


def _after_alert(reason: str) -> str:
    """Return the remedy for an alert that the server sent."""
    if "PROTOCOL_VERSION" in reason:
        return NEWER
    # Caddy reports an unknown name as an internal error.
    if "UNRECOGNIZED_NAME" in reason or "INTERNAL_ERROR" in reason:
        return "it may have no certificate for the host name in the address: use another name, or issue one"
    if "CERTIFICATE_EXPIRED" in reason:
        return "renew the certificate in --client-cert, and check the clocks of both machines"
    return CERTIFICATE


def hint(error: Exception, server: str) -> str:
    """Return the text of a failed call to this address, with a remedy if TLS may be the reason."""
    said = (str(error) or type(error).__name__).rstrip(".")
    cut_off = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    # From TLS 1.3 on, a missing certificate may only show as a closed connection.
    if cut_off and server.startswith("https:"):
        return f"{said}; {CERTIFICATE}"
    if cut_off and speaks_tls(httpx.URL(server)):
        return f"{said}; {USE_HTTPS}"
    return said


USE_HTTPS = "it uses TLS: use https://"


def speaks_tls(url: httpx.URL) -> bool:
    """Return whether the server at this address answers a TLS handshake, with success or an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with closing(socket.create_connection((url.host, url.port or 80), timeout=PROBE_SECONDS)) as plain:
            context.wrap_socket(plain, server_hostname=url.host).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, ValueError):
        return False
    return True
