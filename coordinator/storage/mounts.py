"""Detect network file systems: they may grant a lock twice and acknowledge an fsync early, and SQLite's WAL needs
shared memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import BadStorage

MOUNTS = Path("/proc/self/mountinfo")

NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "smb2", "smb3", "smbfs"}
)
NETWORK_FUSE = re.compile(
    r"fuse\.(.*s3.*|sshfs|rclone|glusterfs|ceph.*|gcsfuse|blobfuse.*|davfs.*|juicefs|mfs.*|smb.*)"
)


def network_type(folder: Path, mounts: str) -> str | None:
    """Return the type of the file system of ``folder`` if it is a network's, otherwise None.

    mounts: the text of /proc/self/mountinfo.
    """
    found = ""
    longest = -1
    folder = folder.resolve()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        kinds = after.split(" ")
        if len(fields) < 5 or not kinds[0]:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[4]))
        if folder.is_relative_to(point) and len(point.parts) >= longest:
            found = kinds[0]
            longest = len(point.parts)
    return found if found in NETWORK or NETWORK_FUSE.fullmatch(found) else None


def check_local(folder: Path) -> None:
    """Raise BadStorage for a folder on a network file system, if the system lists its mounts."""
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:
        return
    kind = network_type(folder, mounts)
    if kind is not None:
        raise BadStorage(
            f"{folder} lies on a network file system ({kind}), which may lose or damage the coordinator's files; set "
            f"COORDINATOR_DATA_DIR to a folder on a local disk, or keep records in PostgreSQL "
            f"(COORDINATOR_DATABASE_URL) and blobs in object storage (COORDINATOR_BLOBS)"
        )
