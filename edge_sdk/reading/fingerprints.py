"""Fingerprints of files: the same names, sizes and time stamps give the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from .errors import DataError


def fingerprint(what: str, paths: Iterable[Path], *more: object) -> str:
    """Return SHA-256 over the files and ``more``, in hexadecimal. Raises DataError if one is gone."""
    digest = hashlib.sha256(repr((what, more)).encode())
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
        # of whole paths: files of several devices may share names, sizes and the time stamps of an archive
        digest.update(f"|{os.path.abspath(path)}|{stat.st_size}|{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()
