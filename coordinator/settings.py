"""The coordinator's own settings: environment variables ``COORDINATOR_*``, read once, listed in docs/settings.md."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from edge_sdk.protocol.messages import FederationSettings


class Settings(BaseSettings):
    """Where the coordinator keeps its data, who may call it, and what it serves at first start."""

    model_config = SettingsConfigDict(env_prefix="COORDINATOR_", frozen=True, extra="ignore")

    data_dir: Path = Field(default=Path("sparrow-data"), description="Folder of the database, models and updates")
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL for the records, postgresql://USER:PASSWORD@HOST/DATABASE; unset: SQLite in the folder",
    )
    admin_token: SecretStr | None = Field(default=None, description="Needed to create and change federations")
    observer_token: SecretStr | None = Field(default=None, description="Needed to look at federations and metrics")
    enrolment_token: SecretStr | None = Field(default=None, description="Needed to enrol a device")
    default_task: str = Field(
        default="digits", description="Built-in task of the federation `default` made at first start; empty: none"
    )
    default_settings: FederationSettings = Field(
        # Patience 2, not the paper's 1: over five seeds it costs rounds and gains accuracy (docs/results/demo.md).
        default=FederationSettings(patience=2),
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
    max_test_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Largest test file that the global model is judged on, bytes"
    )
    tick_seconds: float = Field(default=0.5, gt=0, le=60, description="How often deadlines are looked at, s")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
