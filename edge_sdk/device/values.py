"""The values of a federation's model that no payload holds: downloaded once, and shared on this device's disk.

Of what nobody trains, a device keeps the file in its state folder, and so has all that an export takes. It is a second
link to the one in the user's folder ``sparrow/frozen`` (XDG state), where federations with the same frozen values find
it by its SHA-256, of this coordinator or another; across file systems, a copy. That folder may be emptied at any time.
A download that was broken off goes on where it was, even in another process.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from edge_sdk.device.state import PARTIAL, make_folder, state_home
from edge_sdk.device.transport import Transport
from edge_sdk.errors import Damaged, StateError
from edge_sdk.protocol import personal, values
from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest, Tensors, Values

log = logging.getLogger(__name__)

TRIES = 3

SPARE = 100_000_000
"""Bytes of the disk that a download leaves free."""


def load_values(
    which: Values, manifest: Manifest, federation: str, transport: Transport, folder: Path, *, share: bool = False
) -> Tensors:
    """Return the tensors of a file by name, read-only and read from the disk as they are needed; {} without a file.

    folder: where this device keeps its state. share: look for them in the user's folder, and leave them there. Raises
    StateError where the disk has no room, Damaged for a download that never is what the manifest names.
    """
    if which not in manifest.files:
        return {}
    mine, shared = folder / personal.values_file(which), shared_folder() / manifest.files[which]
    try:
        found = _open(which, manifest, mine)
        if found is None and share and (found := _open(which, manifest, shared)) is not None:
            size = values.size(manifest, which)
            log.info("%d bytes that nobody trains are here already, from another federation", size)
            _link(shared, mine)
        if found is None:
            _check_room(folder, values.size(manifest, which))
            found = _download(which, manifest, federation, transport, mine)
            if share:
                with suppress(OSError):  # then they are not shared
                    make_folder(shared.parent, durable=False)
                    _link(mine, shared)
    except OSError as error:
        raise StateError(
            f"{mine} cannot be written ({error.strerror}): {values.size(manifest, which):,} bytes of the model are "
            "kept on the disk; make room, or give another --state-dir"
        ) from error
    return found


def _check_room(folder: Path, size: int) -> None:
    """Raise StateError where a download would fill the disk, before it does."""
    free = shutil.disk_usage(folder).free
    if size + SPARE > free:
        raise StateError(
            f"the federation's model has {size:,} bytes that are kept on the disk, and {free:,} are free at {folder}; "
            f"make room for them and {SPARE:,} more, or give another --state-dir"
        )


def shared_folder() -> Path:
    """Return the folder of frozen values that this user's devices share."""
    return state_home() / "frozen"


def _open(which: Values, manifest: Manifest, path: Path) -> Tensors | None:
    """Return a file's tensors where it is the one that the manifest names; None elsewhere."""
    if not path.is_file() or path.stat().st_size != values.size(manifest, which):
        return None
    with suppress(ManifestError):
        return values.unpack(manifest, which, np.memmap(path, np.uint8, mode="r"))
    return None


def _download(which: Values, manifest: Manifest, federation: str, transport: Transport, path: Path) -> Tensors:
    partial = path.with_name(path.name + PARTIAL)
    for _ in range(TRIES):
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            transport.values(federation, manifest, which, file)
        if (found := _open(which, manifest, partial)) is not None:
            partial.replace(path)
            return found
        partial.unlink()
    raise Damaged(
        f"the {which} values were downloaded {TRIES} times and never matched their digest; look at proxies "
        "between this device and the coordinator"
    )


def _link(file: Path, path: Path) -> None:
    """Give a file another name; where that is not possible, as across file systems, a copy has it."""
    new = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    new.unlink(missing_ok=True)
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)
        new.chmod(0o600)
    new.replace(path)
