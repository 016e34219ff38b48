"""Settings of federations that are to be created."""

from __future__ import annotations

from fastapi import APIRouter

from sparrow.protocol.settings import FederationSettings

from ..fleet.checks import completed
from .access import AdminOnly
from .packing import PackedRoute

router = APIRouter(prefix="/v1/settings", tags=["federations"], route_class=PackedRoute)


@router.post("", dependencies=[AdminOnly])
def complete_settings(settings: FederationSettings) -> FederationSettings:
    """Return settings with all of the method's own ones, as a federation that is created with them has them."""
    return completed(settings)
