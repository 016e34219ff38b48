"""Blobs as objects of S3-compatible storage, such as AWS, MinIO, Ceph and Garage.

``COORDINATOR_BLOBS=s3://BUCKET/PREFIX``. Credentials and endpoint come from the usual variables AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL (which may be http://).
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
    """Blobs as objects of one bucket, under a prefix. Raises BadStorage if it is not writable.

    retries: attempts after a temporary failure, within ``RETRY_SECONDS``.
    """

    def __init__(self, address: str, troubles: Troubles | None = None, retries: int = RETRIES) -> None:
        found = re.fullmatch(SCHEME + r"([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*?))?/*", address)
        if found is None:
            raise BadStorage("COORDINATOR_BLOBS: set s3://BUCKET or s3://BUCKET/PREFIX, or unset it")
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
        """Write an object, so that a wrong setting is reported at the start."""
        try:
            self._calls.put(self._store, "ready", b"ready", use_multipart=False)
        except self._errors as error:
            reported = str(error)
            if "NoSuchBucket" in reported:
                advice = f"there is no bucket {self._bucket}: create it, or name another in COORDINATOR_BLOBS"
            elif re.search(r"\b(401|403)\b|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|credential", reported):
                advice = (
                    "its credentials are wrong or lack write access: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
                )
            else:
                advice = "check AWS_ENDPOINT_URL and AWS_REGION, and that it is running"
            raise BadStorage(f"object storage cannot be written; {advice} ({_first_line(error)})") from None

    def write(self, key: str, data: bytes | memoryview, file: Path | None = None) -> None:
        """Store ``data`` durably under ``key``, replacing a former blob."""
        with self._watched(len(data)):
            # An interrupted multipart upload would leave parts behind, which cost money.
            self._calls.put(self._store, key, data, use_multipart=False)

    def settle(self, keys: Iterable[str]) -> None:
        """Do nothing: ``write`` is durable."""

    def _read(self, key: str) -> memoryview:
        with self._watched(missing=True):
            # A view avoids a copy.
            return memoryview(self._calls.get(self._store, key).bytes())

    def _remove(self, key: str) -> None:
        with self._watched(missing=True), suppress(FileNotFoundError):
            self._calls.delete(self._store, key)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes of the blobs in the folder ``prefix``, sorted by key."""
        with self._watched():
            pages = self._calls.list(self._store, prefix.rstrip("/"))
            return dict(sorted((str(each["path"]), int(each["size"])) for page in pages for each in page))

    def clean(self) -> None:
        """Do nothing: there are no partial objects."""

    @contextmanager
    def _watched(self, size: int | None = None, *, missing: bool = False) -> Iterator[None]:
        """Context manager: translate the errors of a call. missing: whether FileNotFoundError is a valid answer."""
        try:
            yield
        except self._errors as error:
            if missing and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                raise FileNotFoundError(_first_line(error)) from None
            cause = RuntimeError(_first_line(error))
            unavailable = Unavailable("the coordinator cannot reach its object storage at the moment; retry later")
            self._troubles.begin(BLOBS, unavailable, size or 0, cause)
            raise unavailable from cause
        if size is not None:
            self._troubles.end(BLOBS, size)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
