"""The coordinator's own settings: environment variables ``COORDINATOR_*``, read once, listed in docs/settings.md."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from sparrow.command_line.command import WrongUsage
from sparrow.command_line.faults import faults
from sparrow.command_line.nearest import nearest
from sparrow.protocol.settings import FederationSettings

from .fleet.access import KINDS, Kind

PREFIX = "COORDINATOR_"

SHORTEST_TOKEN = 16
FEWEST_CHARACTERS = 6
"""Different ones of a token; of 16 random hexadecimal digits fewer in one of 30,000."""

DATA_DIR = Path("~/.local/state/sparrow-coordinator")
"""The same from whichever folder the coordinator is started: else it would begin anew in each, without a word."""

SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes and Docker set for a service called ``coordinator``, besides an address in ``PORT``."""


class Settings(BaseSettings):
    """The settings: data folder, tokens, limits, and the federation of the first start."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    data_dir: Path = Field(
        default=DATA_DIR,
        description="Folder of the database, models and updates; by default in `$XDG_STATE_HOME`, if that is set",
    )
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL for the records, postgresql://USER:PASSWORD@HOST/DATABASE; unset: SQLite in the folder",
    )
    blobs: str | None = Field(
        default=None,
        description="S3-compatible storage for models and updates, s3://BUCKET/PREFIX; unset: files in the folder",
    )
    admin_token: SecretStr | None = Field(default=None, description="Needed to create and change federations")
    observer_token: SecretStr | None = Field(default=None, description="Needed to look at federations and metrics")
    enrolment_token: SecretStr | None = Field(default=None, description="Needed to enrol a device")
    device_token_rotation_days: float = Field(
        default=7.0, ge=0, description="Age at which a device is asked to take a new token, days; 0: never"
    )
    device_token_lifetime_days: float | None = Field(
        default=None, gt=0, description="Age beyond which a device's token is good for nothing, days; unset: none"
    )
    device_calls_per_second: float = Field(
        default=20.0, ge=0, description="Calls of one device, of which 10 s' worth may come at once; 0: no limit"
    )
    address_calls_per_second: float = Field(
        default=100.0,
        ge=0,
        description="The same for all calls from one address that no device's token came with; 0: no limit",
    )
    address_connections: int = Field(
        default=64,
        ge=0,
        description="Connections from one address (IPv6: one /64) on which no device's token came; 0: no limit",
    )
    hosts: str = Field(
        default="",
        description="Names of this coordinator besides IP addresses and this machine's own names, separated by commas; "
        "`*`: any. Admin and observer calls without a token are answered under these only",
    )
    limit_loopback: bool = Field(default=False, description="Whether these limits hold for this machine's own calls")
    default_task: str = Field(
        default="digits", description="Built-in task of the federation `default` made at first start; empty: none"
    )
    default_settings: FederationSettings = Field(
        default=FederationSettings(),
        description="Settings of that federation, as JSON",
    )
    max_wait_seconds: float = Field(default=50.0, ge=0, le=600, description="Longest long poll, s")
    retry_after_seconds: int = Field(default=1, ge=0, le=3600, description="Pause asked of devices without work, s")
    polls_per_second: float = Field(
        default=200.0,
        gt=0,
        allow_inf_nan=False,
        description="Most calls for work per second; devices without work of a larger fleet are told to pause longer",
    )
    max_model_bytes: int = Field(default=2 * 1024**3, gt=0, description="Largest model that can be published, bytes")
    keep_models: int = Field(default=3, ge=1, description="Newest global models of a federation that are kept")
    keep_every: int = Field(
        default=0, ge=0, description="Global models whose number is a multiple of this are kept for good; 0: none"
    )
    max_test_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Largest test file that the global model is judged on, bytes"
    )
    max_test_seconds: float = Field(
        default=540.0, gt=0, le=86400, description="How long the global model may take for a test file, s"
    )
    body_patience_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long a body that comes too slowly is waited for, and an answer that is not read, s",
    )
    body_bytes_per_second: float = Field(
        default=500.0, gt=0, description="Slowest rate at which a body may come, and an answer be read, bytes/s"
    )
    download_bytes: int = Field(
        default=256 * 1024**2,
        gt=0,
        description="Memory of the different bodies that are downloaded at a time, bytes; further callers wait",
    )
    tick_seconds: float = Field(default=0.5, gt=0, le=60, description="How often deadlines are looked at, s")
    min_free_bytes: int = Field(
        default=256 * 1024**2, ge=0, description="Free space of the data folder below which it is not ready, bytes"
    )
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["text", "json"] = Field(
        default="text", description="text, with key=value at the end of a line, or json, one object a line"
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        state = os.environ.get("XDG_STATE_HOME")
        if folder == DATA_DIR and state:
            return Path(state).absolute() / DATA_DIR.name
        try:
            return folder.expanduser().absolute()
        except RuntimeError:
            raise ValueError("this user has no home folder; set it to another folder") from None

    @field_validator("admin_token", "observer_token", "enrolment_token")
    @classmethod
    def _hard_to_guess(cls, token: SecretStr | None) -> SecretStr | None:
        secret = "" if token is None else token.get_secret_value()
        if token is not None and (len(secret) < SHORTEST_TOKEN or len(set(secret)) < FEWEST_CHARACTERS):
            raise ValueError(
                f"too easy to guess; give at least {SHORTEST_TOKEN} characters, {FEWEST_CHARACTERS} of them different, "
                f"as openssl rand -hex 24 prints them"
            )
        return token

    @model_validator(mode="after")
    def _tokens_differ(self) -> Settings:
        """Refuse one token for two kinds: every device would have the operator's."""
        kinds = {token: kind for kind, token in self.tokens().items()}
        for kind, token in self.tokens().items():
            if kinds[token] != kind:
                names = " and ".join(f"{PREFIX}{each.upper()}_TOKEN" for each in (kind, kinds[token]))
                raise ValueError(f"{names} are the same; give each kind a token of its own")
        return self

    @model_validator(mode="after")
    def _no_others(self) -> Settings:
        """Refuse a variable that is meant as a setting and is none: it would have no effect."""
        known = {PREFIX + name.upper() for name in type(self).model_fields}
        for name, text in os.environ.items():
            upper = name.upper()
            rest = upper.removeprefix(PREFIX)
            if rest == upper or upper in known or SERVICE.fullmatch(rest):
                continue
            if not (rest.endswith("PORT") and "://" in text):
                raise ValueError(f"{name} is not a setting{nearest(upper, known)}; correct or unset it")
        return self

    @model_validator(mode="after")
    def _rotates_in_time(self) -> Settings:
        lifetime = self.device_token_lifetime_days
        if lifetime is not None and not 0 < self.device_token_rotation_days < lifetime:
            raise ValueError(
                "COORDINATOR_DEVICE_TOKEN_LIFETIME_DAYS: tokens would expire before they are renewed; set a shorter "
                "COORDINATOR_DEVICE_TOKEN_ROTATION_DAYS above 0"
            )
        return self

    def tokens(self) -> dict[Kind, str]:
        """Return the operators' tokens that are set, by kind."""
        given: dict[Kind, SecretStr | None] = {kind: getattr(self, f"{kind}_token") for kind in KINDS}
        return {kind: token.get_secret_value() for kind, token in given.items() if token is not None}


def read_settings() -> Settings:
    """Return the settings of the environment. Raises WrongUsage, which names the variable."""
    try:
        return Settings()
    except ValidationError as error:
        raise WrongUsage(
            "; ".join(_describe(*each) for each in faults(error, FederationSettings.model_fields))
        ) from None
    except SettingsError as error:  # a value that is to be JSON is none
        raise WrongUsage(f"COORDINATOR_DEFAULT_SETTINGS: {error.__cause__ or error}; give a JSON object") from None


def _describe(name: str, text: str) -> str:
    """Return a setting's fault after the variable's name; a fault of several settings names them itself."""
    variable, *within = name.split(".")
    return f"{'.'.join((PREFIX + variable.upper(), *within))}: {text}" if name else text
