"""The device page without a network: its service worker, and the manifest with which browsers install it."""

from __future__ import annotations

import hashlib
from functools import cache

from . import OWN, File, load
from .runtime import TRAINING

WORKER = "service-worker.js"
MANIFEST = "app.webmanifest"
SCOPE = {"Service-Worker-Allowed": "../"}
"""Lets the service worker answer for ``/join/``; relative, because a proxy may serve the coordinator below a path."""


@cache
def service_worker() -> File:
    """Return the service worker, with the names and a version of the page's files."""
    names = sorted(path.name for path in OWN.iterdir() if path.name not in (WORKER, MANIFEST))
    digest = hashlib.sha256()
    for name in (WORKER, *names):
        digest.update(load(name).packed)
    return load(WORKER).filled(version=digest.hexdigest()[:16], files=" ".join(names), runtime=TRAINING.slug)


def manifest(federation: str) -> File:
    """Return the web app manifest of a federation's page."""
    return load(MANIFEST).filled(federation=federation)
