"""TLS towards a coordinator: trusted authorities and client certificates."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

import certifi
import httpx

from ..command_line.exits import Exit
from .errors import SdkError

__all__ = ["BadCertificate", "Tls"]


class BadCertificate(SdkError):
    """A certificate or key is not usable; the text says which and why."""

    exit_code = Exit.USAGE


CERTIFICATE = "if it asks for a certificate, give one that it trusts with --client-cert FILE --client-key FILE"


@dataclass(frozen=True)
class Tls:
    """Files in PEM format. ca: the only trusted authorities. certificate and key: the caller's own, for a coordinator
    that asks for one; the certificate's file may include the key."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the argument ``verify`` of httpx. Raises BadCertificate."""
        if self.key is not None and self.certificate is None:
            raise BadCertificate("--client-key needs --client-cert; give both")
        for option, path in (("--ca", self.ca), ("--client-cert", self.certificate), ("--client-key", self.key)):
            if path is not None and not path.is_file():
                raise BadCertificate(f"{option}: there is no file {path}")
        try:
            context = ssl.create_default_context(cafile=self.ca or certifi.where())
        except (ssl.SSLError, OSError) as error:
            raise BadCertificate(f"--ca {self.ca} holds no certificates in PEM format ({_reason(error)})") from None
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (ssl.SSLError, OSError, BadCertificate) as error:
                raise BadCertificate(
                    f"--client-cert {self.certificate} and its key cannot be used ({_reason(error)}); give a "
                    f"certificate and the key that belongs to it, both in PEM format and without a password"
                ) from None
        return context


def _no_password() -> str:
    # Without a callback OpenSSL would ask on the terminal, and wait.
    raise BadCertificate("the key has a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--ca``, ``--client-cert`` and ``--client-key``; ``from_options`` reads them."""
    group = parser.add_argument_group("TLS, for --server https://HOST")
    group.add_argument("--ca", type=Path, metavar="FILE", help="trust only these authorities (default: public ones)")
    group.add_argument("--client-cert", type=Path, metavar="FILE", help="own certificate, if the server asks for one")
    group.add_argument("--client-key", type=Path, metavar="FILE", help="its key, unless it is in the same file")


def from_options(options: argparse.Namespace) -> Tls:
    """Return the TLS settings of the options."""
    return Tls(options.ca, options.client_cert, options.client_key)


def explain(error: BaseException) -> str | None:
    """Return the reason and a remedy if a call failed because of TLS, otherwise None."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.verify_message}); give its authority with --ca FILE, and use "
                f"a host name of the certificate"
            )
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            return f"it ended the TLS handshake ({(cause.reason or '').lower().replace('_', ' ')}); {CERTIFICATE}"
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "it speaks no TLS; use http://, or give it a certificate (sparrow serve --ssl-certfile)"
        cause = cause.__cause__ or cause.__context__
    return None


def hint(error: Exception, server: str) -> str:
    """Return the text of a failed call. From TLS 1.3 on, a missing certificate may only show as a closed connection."""
    said = str(error) or type(error).__name__
    cut_off = server.startswith("https:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    return f"{said.rstrip('.')}; {CERTIFICATE}" if cut_off else said
