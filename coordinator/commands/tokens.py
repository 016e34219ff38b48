"""The records of tokens, for ``sparrow token --records``: found by COORDINATOR_* settings, without a coordinator.

A running coordinator follows within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session

from sparrow.protocol.messages import CreateToken, MadeToken, TokenInfo

from ..clock import SteadyClock
from ..errors import NoRecords
from ..fleet import issuing
from ..fleet.devices import revoke as revoke_device
from ..settings import Settings, read_settings
from ..storage.database import WRITING, open_database
from ..storage.failing import database_errors
from ..storage.tables import Device


class TokenRecords:
    """Tokens in this coordinator's records; each call is a transaction. Raises NoRecords, BadStorage, WrongUsage."""

    def __init__(self) -> None:
        self._settings = read_settings()
        self._now = SteadyClock(self._settings.data_dir)()

    def create(self, wanted: CreateToken) -> MadeToken:
        """Create a token. Raises NotFound for its federation."""
        with self._writing() as db:
            return issuing.create(db, wanted, self._now)

    def list(self) -> list[TokenInfo]:
        """Return all tokens, newest first."""
        with self._writing() as db:
            return issuing.listed(db, self._now)

    def revoke(self, wanted: str, *, made: bool) -> tuple[str, ...]:
        """Revoke the token or device with this id; return the revoked ids. Raises NotFound."""
        with self._writing() as db:
            device = db.get(Device, wanted)
            if device is None:
                return issuing.revoke(db, wanted, self._now, made=made)
            revoke_device(db, device)
            return (wanted,)

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        with database_errors(self._settings.data_dir), _records(self._settings) as db:
            yield db


@contextmanager
def _records(settings: Settings) -> Iterator[Session]:
    """Context manager: a transaction on the coordinator's records. Raises NoRecords, BadStorage."""
    if settings.database_url is not None:
        engine = open_database(settings.database_url.get_secret_value())
    else:
        path = settings.data_dir / "coordinator.sqlite3"
        if not path.exists():
            raise NoRecords(f"{path} does not exist; start the coordinator once, or set its COORDINATOR_DATA_DIR")
        engine = open_database(path)
    try:
        with Session(engine.execution_options(**WRITING)) as db, db.begin():
            yield db
    finally:
        engine.dispose()
