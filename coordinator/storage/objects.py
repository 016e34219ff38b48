"""Blobs as objects of S3-compatible storage: AWS, MinIO, Ceph, Garage and kin.

``COORDINATOR_BLOBS=s3://BUCKET/PREFIX``; who may, and where, is in the variables that other programs read, too:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL (http:// is taken as given).
An object that the storage has acknowledged is durable, and replaces the old one as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from ..errors import BadStorage, Unavailable
from .blobs import Blobs
from .failing import BLOBS, Troubles

SCHEME = "s3://"
RETRIES = 3
RETRY_SECONDS = 10.0
TIMEOUT_SECONDS = 30.0


class ObjectBlobs(Blobs):
    """Blobs as objects of one bucket, under a prefix. Raises BadStorage where it cannot be written.

    retries: how often a call that failed for a reason that may pass is tried again, within ``RETRY_SECONDS``.
    """

    def __init__(self, address: str, troubles: Troubles | None = None, retries: int = RETRIES) -> None:
        found = re.fullmatch(SCHEME + r"([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*?))?/*", address)
        if found is None:
            raise BadStorage("COORDINATOR_BLOBS: write s3://BUCKET or s3://BUCKET/PREFIX, or leave it out")
        try:
            import obstore
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise BadStorage("blobs in object storage need obstore: pip install 'sparrow-fl[s3]'") from error
        super().__init__(troubles)
        self._calls = obstore
        self._errors = (obstore.exceptions.BaseError, OSError)
        self._bucket = found[1]
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        self._store = S3Store(
            found[1],
            prefix=found[2] or None,
            client_options={"allow_http": plain, "timeout": timedelta(seconds=TIMEOUT_SECONDS)},
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
        self._check()

    def _check(self) -> None:
        """Write once, so that a wrong setting is reported at the start."""
        try:
            self._calls.put(self._store, "ready", b"ready", use_multipart=False)
        except self._errors as error:
            said = str(error)
            if "NoSuchBucket" in said:
                advice = f"there is no bucket {self._bucket}: create it, or name another in COORDINATOR_BLOBS"
            elif re.search(r"\b(401|403)\b|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|credential", said):
                advice = "its credentials are wrong, or may not write: look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
            else:
                advice = "look at AWS_ENDPOINT_URL and AWS_REGION, and that it runs"
            raise BadStorage(f"object storage cannot be written; {advice} ({_first_line(error)})") from None

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` durably under ``key``, replacing the former blob."""
        with self._watched(len(data)):
            # In one request: an upload in parts that is cut off leaves parts behind, which are kept, and cost.
            self._calls.put(self._store, key, data, use_multipart=False)

    def settle(self, keys: Iterable[str]) -> None:
        """Do nothing: ``write`` is durable."""

    def _read(self, key: str) -> memoryview:
        with self._watched(missing=True):
            return memoryview(self._calls.get(self._store, key).bytes())  # in the memory in which they were received

    def _remove(self, key: str) -> None:
        with self._watched(missing=True), suppress(FileNotFoundError):
            self._calls.delete(self._store, key)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys in the folder ``prefix``, sorted, and the bytes of each."""
        with self._watched():
            pages = self._calls.list(self._store, prefix.rstrip("/"))
            return dict(sorted((str(each["path"]), int(each["size"])) for page in pages for each in page))

    def clean(self) -> None:
        """Do nothing: there are no partial objects."""

    @contextmanager
    def _watched(self, size: int | None = None, *, missing: bool = False) -> Iterator[None]:
        """Translate the errors of a call. ``missing``: a missing object is an answer, not an error."""
        try:
            yield
        except self._errors as error:
            if missing and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                raise FileNotFoundError(_first_line(error)) from None
            cause = RuntimeError(_first_line(error))
            unavailable = Unavailable("the coordinator cannot reach its object storage just now; try again in a while")
            self._troubles.begin(BLOBS, unavailable, size or 0, cause)
            raise unavailable from cause
        if size is not None:
            self._troubles.end(BLOBS, size)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
