"""NVIDIA FLARE as deployed: a provisioned project, a server, a process per site, and an operator's job.

``nvflare provision`` makes a startup kit for the server, each site and the operator, each started by its kit's
``sub_start.sh``. The processes are the same as on separate machines; it is neither the simulator nor ``nvflare poc``.
The server and every site start a process for the job. The scheme is the default, ``http``; no TLS, as on our side
(``connection_security: clear``). FLARE is installed in ``.venv-flare`` (``python -m benchmarks.peers.install``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.coordinator.contest import Contest, Marks, Row, measure
from benchmarks.coordinator.processes import Side, Wire
from benchmarks.peers.install import PEERS, ROOT
from sparrow.bench.server import free_port

PEER = PEERS["flare"]
OPERATOR = "admin@contest.org"
PROVISION_SECONDS = 120.0
PARTS = (
    "workspace.WorkspaceBuilder",
    "static_file.StaticFileBuilder",
    "cert.CertBuilder",
    "signature.SignatureBuilder",
)
SETTINGS = {"workspace": {"template_file": ["master_template.yml"]}, "static_file": {"config_folder": "config"}}
"""What ``nvflare provision`` builds its kits with, from its own sample project."""


class Sites(Side):
    """The sites, whose check also says why the operator's job ended."""

    def __init__(self, folder: Path, environment: Mapping[str, str], operator: Side) -> None:
        super().__init__(folder, environment)
        self._operator = operator

    def check(self) -> None:
        super().check()
        self._operator.check()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of FLARE's processes: its own Python first in the path, its home in ``folder``."""
    path = f"{PEER.python.parent}{os.pathsep}{os.environ['PATH']}"
    return {"OMP_NUM_THREADS": "1", "HOME": str(folder), "PATH": path}


def run(contest: Contest, folder: Path) -> Row:
    """Return one measurement."""
    PEER.check()
    port = free_port()
    kits = _provision(contest.clients, port, folder)
    marks = Marks(folder / "marks")
    mine = environment(folder)
    with Side(folder, mine) as server, Side(folder, mine) as operator, Sites(folder, mine, operator) as sites:
        server.start("server", _start(kits / "server"))
        try:
            with server.watch() as memory:
                for number in range(contest.clients):
                    sites.start(f"site-{number + 1}", _start(kits / f"site-{number + 1}"))
                command = [str(PEER.python), "-m", "benchmarks.coordinator.flare_job", str(kits / OPERATOR)]
                # One round more than is measured: what follows the last one is another matter.
                numbers = (contest.clients, contest.all_rounds + 1, _values(contest))
                command += [str(folder), *map(str, numbers), str(marks.path)]
                operator.start("operator", command, cwd=ROOT)
                row = measure(contest, server, sites, Wire(port), marks, memory)
        except SystemExit as failed:
            raise SystemExit("\n".join([str(failed), *_complaints(kits)])) from None
    return {"engine": "flare", "version": PEER.version("nvflare"), **row}


def _values(contest: Contest) -> int:
    return sum(math.prod(shape) for shape in contest.model.shapes)


def _start(kit: Path) -> list[str]:
    return ["bash", str(kit / "startup" / "sub_start.sh"), "--once"]


def _provision(clients: int, port: int, folder: Path) -> Path:
    """Make the kits; return the folder with one of each participant."""
    roles = [{"name": "server", "type": "server", "fed_learn_port": port, "default_host": "localhost"}]
    roles += [{"name": f"site-{number + 1}", "type": "client"} for number in range(clients)]
    roles += [{"name": OPERATOR, "type": "admin", "role": "project_admin"}]
    project = {
        "api_version": 3,
        "name": "contest",
        "participants": [{**role, "org": "contest", "connection_security": "clear"} for role in roles],
        "builders": [
            {"path": f"nvflare.lighter.impl.{part}", "args": SETTINGS.get(part.partition(".")[0], {})} for part in PARTS
        ],
    }
    file = folder / "project.yml"
    # JSON is valid YAML.
    file.write_text(json.dumps(project))
    command = ["nvflare", "provision", "-p", str(file), "-w", str(folder / "kits"), "--force"]
    PEER.call(command, environment(folder), PROVISION_SECONDS)
    kits = folder / "kits" / "contest" / "prod_00"
    local = kits / "server" / "local"
    resources = (local / "resources.json.default").read_text()
    # Its stores of jobs and snapshots, which are in /tmp/nvflare for everybody.
    (local / "resources.json").write_text(resources.replace("/tmp/nvflare", str(folder / "stores")))
    return kits


def _complaints(kits: Path) -> Iterator[str]:
    """Yield the first errors in the logs of the server and the sites, those of their jobs included."""
    for log in sorted(kits.glob("*/**/log.txt")):
        _, error, rest = log.read_text(errors="replace").partition(" - ERROR - ")
        if error:
            yield f"{log.relative_to(kits)}:\n{rest[:2000]}"
