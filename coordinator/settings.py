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
from sparrow.protocol.errors import BadArgument
from sparrow.protocol.events import EventKind
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.tags import KEY
from sparrow.transport.pinned import Destination

from .fleet.access import KINDS, Kind

PREFIX = "COORDINATOR_"

SHORTEST_TOKEN = 16
FEWEST_CHARACTERS = 6
"""Least number of different characters of a token; 1 in 30,000 random tokens of 16 hexadecimal digits has fewer."""

DATA_DIR = Path("~/.local/state/sparrow-coordinator")
"""Independent of the folder in which the coordinator starts: otherwise each folder would get empty records."""

SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables of Kubernetes and Docker for a service named ``coordinator``, except the address in ``PORT``."""


class Settings(BaseSettings):
    """The settings: data folder, tokens, limits, and the federation of the first start."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    data_dir: Path = Field(
        default=DATA_DIR,
        description="Folder of the database, models and updates; default in `$XDG_STATE_HOME`, if that is set",
    )
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL database, postgresql://USER:PASSWORD@HOST/DATABASE; unset: SQLite in the data folder",
    )
    blobs: str | None = Field(
        default=None,
        description="S3-compatible storage for models and updates, s3://BUCKET/PREFIX; unset: files in the data folder",
    )
    admin_token: SecretStr | None = Field(default=None, description="Token to create and change federations")
    observer_token: SecretStr | None = Field(default=None, description="Token to view federations and metrics")
    enrolment_token: SecretStr | None = Field(default=None, description="Token to enrol a device")
    device_token_rotation_days: float = Field(
        default=7.0, ge=0, description="Age at which a device renews its token, days; 0: never"
    )
    device_token_lifetime_days: float | None = Field(
        default=None, gt=0, description="Age at which a device's token expires, days; unset: never"
    )
    device_calls_per_second: float = Field(
        default=20.0, ge=0, description="Rate limit of one device, with bursts of 10 s' worth; 0: no limit"
    )
    address_calls_per_second: float = Field(
        default=100.0,
        ge=0,
        description="Rate limit of one address for calls without a device's token; 0: no limit",
    )
    address_connections: int = Field(
        default=64,
        ge=0,
        description="Connections from one address (IPv6: one /64) without a device's token; 0: no limit",
    )
    hosts: str = Field(
        default="",
        description="Further host names of this coordinator, separated by commas; `*`: any. Without tokens, admin and "
        "observer calls are answered only under these, IP addresses and this machine's names",
    )
    limit_loopback: bool = Field(default=False, description="Apply these limits to this machine's own calls")
    default_task: str = Field(
        default="digits",
        description="Built-in task of the federation `default`, created at the first start; empty: none",
    )
    default_settings: FederationSettings = Field(
        default=FederationSettings(),
        description="Settings of the federation `default`, as JSON",
    )
    max_wait_seconds: float = Field(default=50.0, ge=0, le=600, description="Longest long poll, s")
    retry_after_seconds: int = Field(default=1, ge=0, le=3600, description="Pause of devices without work, s")
    polls_per_second: float = Field(
        default=200.0,
        gt=0,
        allow_inf_nan=False,
        description="Maximum number of calls for work per second; in a larger fleet, devices without work pause longer",
    )
    max_model_bytes: int = Field(default=2 * 1024**3, gt=0, description="Largest model that can be published, bytes")
    keep_models: int = Field(default=3, ge=1, description="Number of newest global models kept per federation")
    keep_every: int = Field(
        default=10,
        ge=0,
        description="Keep global models whose number is a multiple of this, fewer of them with age; 0: none. The best "
        "model is always kept",
    )
    max_test_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Largest test file for an evaluation of the global model, bytes"
    )
    max_test_seconds: float = Field(
        default=540.0, gt=0, le=86400, description="Time limit of an evaluation of the global model, s"
    )
    body_patience_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Period in which a body must arrive, and an answer be read, at the slowest rate, s",
    )
    body_bytes_per_second: float = Field(
        default=500.0, gt=0, description="Slowest rate at which a body may arrive, and an answer be read, bytes/s"
    )
    download_bytes: int = Field(
        default=256 * 1024**2,
        gt=0,
        description="Memory of all bodies that are downloaded at a time, bytes; further callers must retry",
    )
    tick_seconds: float = Field(default=0.5, gt=0, le=60, description="Interval at which deadlines are checked, s")
    webhook_url: SecretStr | None = Field(
        default=None, description="Address to which events and alerts are posted, https://HOST/PATH; unset: none"
    )
    webhook_secret: SecretStr | None = Field(default=None, description="Key that signs the webhook's calls")
    webhook_events: str = Field(
        default="failed,finished,stopped,rolled_back",
        description="Kinds of events to post, separated by commas; `*`: all. Alerts are always posted",
    )
    webhook_networks: str = Field(
        default="",
        description="Networks that are not public but may receive the webhook's calls, such as `10.1.2.0/24`, with "
        "commas between",
    )
    metric_tags: str = Field(
        default="",
        description="Keys of devices' tags that the metrics count, separated by commas, such as `board`; a label's "
        "values are visible to everyone who reads the metrics",
    )
    min_free_bytes: int = Field(
        default=256 * 1024**2,
        ge=0,
        description="Free disk space of the data folder below which `/readyz` reports an error, bytes",
    )
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["text", "json"] = Field(
        default="text", description="text, with key=value at the end of a line, or json, one object per line"
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
            raise ValueError("this user has no home folder; set the data folder to another place") from None

    @field_validator("admin_token", "observer_token", "enrolment_token", "webhook_secret")
    @classmethod
    def _hard_to_guess(cls, token: SecretStr | None) -> SecretStr | None:
        secret = "" if token is None else token.get_secret_value()
        if token is not None and (len(secret) < SHORTEST_TOKEN or len(set(secret)) < FEWEST_CHARACTERS):
            raise ValueError(
                f"too easy to guess; give at least {SHORTEST_TOKEN} characters, {FEWEST_CHARACTERS} of them different, "
                f"such as the output of openssl rand -hex 24"
            )
        return token

    @field_validator("metric_tags")
    @classmethod
    def _tag_keys(cls, text: str) -> str:
        for key in sorted(_listed(text)):
            if not re.fullmatch(KEY, key):
                raise ValueError(f"{key!r} cannot be a tag's key; use keys such as board,site")
        return text

    @model_validator(mode="after")
    def _tokens_differ(self) -> Settings:
        """Refuse the same token for two kinds, because devices would get the operator's permissions."""
        kinds = {token: kind for kind, token in self.tokens().items()}
        for kind, token in self.tokens().items():
            if kinds[token] != kind:
                names = " and ".join(f"{PREFIX}{each.upper()}_TOKEN" for each in (kind, kinds[token]))
                raise ValueError(f"{names} are the same; choose a different token for each kind")
        return self

    @field_validator("webhook_events")
    @classmethod
    def _kinds(cls, text: str) -> str:
        known = {kind.value for kind in EventKind}
        for kind in _listed(text) - {"*"}:
            if kind not in known:
                raise ValueError(f"{kind} is not an event kind{nearest(kind, known)}; use {', '.join(sorted(known))}")
        return text

    @model_validator(mode="after")
    def _webhook(self) -> Settings:
        if (self.webhook_url is None) != (self.webhook_secret is None):
            raise ValueError("COORDINATOR_WEBHOOK_URL and COORDINATOR_WEBHOOK_SECRET belong together; set both")
        try:
            self.destination()
        except BadArgument as error:
            raise ValueError(f"COORDINATOR_WEBHOOK_URL or _NETWORKS: {error}") from None
        return self

    def destination(self) -> Destination | None:
        """Return the address of the webhook, or None. Raises BadArgument."""
        if self.webhook_url is None:
            return None
        return Destination.parse(self.webhook_url.get_secret_value(), self.webhook_networks)

    def webhook_kinds(self) -> frozenset[str]:
        """Return the kinds of events to post; empty for all."""
        kinds = _listed(self.webhook_events)
        return frozenset() if "*" in kinds else kinds

    @model_validator(mode="after")
    def _no_others(self) -> Settings:
        """Refuse a misspelt setting, which would have no effect."""
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
                "COORDINATOR_DEVICE_TOKEN_LIFETIME_DAYS: tokens would expire before they are renewed; set "
                "COORDINATOR_DEVICE_TOKEN_ROTATION_DAYS to a shorter time above 0"
            )
        return self

    @property
    def metric_keys(self) -> frozenset[str]:
        """The keys of ``metric_tags``."""
        return _listed(self.metric_tags)

    def tokens(self) -> dict[Kind, str]:
        """Return the configured operators' tokens by kind."""
        given: dict[Kind, SecretStr | None] = {kind: getattr(self, f"{kind}_token") for kind in KINDS}
        return {kind: token.get_secret_value() for kind, token in given.items() if token is not None}


def _listed(text: str) -> frozenset[str]:
    return frozenset(each.strip() for each in text.split(",") if each.strip())


def read_settings() -> Settings:
    """Return the settings of the environment. Raises WrongUsage, naming the variable."""
    try:
        return Settings()
    except ValidationError as error:
        raise WrongUsage(
            "; ".join(_describe(*each) for each in faults(error, FederationSettings.model_fields))
        ) from None
    except SettingsError as error:
        # The only setting in JSON is invalid.
        raise WrongUsage(f"COORDINATOR_DEFAULT_SETTINGS: {error.__cause__ or error}; give a JSON object") from None


def _describe(name: str, text: str) -> str:
    """Return a setting's fault after the variable's name."""
    variable, *within = name.split(".")
    return f"{'.'.join((PREFIX + variable.upper(), *within))}: {text}" if name else text
