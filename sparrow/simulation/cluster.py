"""A fleet on a Ray cluster: each worker hosts a slice of the devices.

A slice is a fleet of one process (``fleet.run_fleet``) in a Ray actor with one core. Slice k has the devices k, k + N,
k + 2N and so on. Models travel only between devices and coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from edge_sdk.device.connection import token_of
from edge_sdk.device.state import default_root
from edge_sdk.device.transport import Transport
from edge_sdk.engines import EngineChoice
from edge_sdk.errors import BadArgument, NameTaken, SdkError, StateError

from ..protocol.errors import MissingPart
from ..transport import connect
from .fleet import USUAL, Access, run_fleet
from .host import Plan
from .result import Result

LOCAL = "local"
LOOK_SECONDS = 1.0
"""Interval for updating the progress bar; the end of a slice is noticed at once."""

END_SECONDS = 30.0
"""Seconds until slices that do not end are killed; their state survives."""

STORE_BYTES = 100_000_000
"""Size in bytes of Ray's object store, if it is started here; it stores only small objects."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # otherwise every actor without a GPU prints a deprecation warning
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class _Slice:
    """The Ray actor of a part of a fleet, with a thread each for ``run`` and ``stop``."""

    def __init__(
        self, server: str, plan: Plan, number: int, of: int, root: Path | None, options: dict[str, Any]
    ) -> None:
        self._server = server
        self._plan = plan
        self._number = number
        self._of = of
        self._root = root or default_root(server, plan.federation) / "fleet"
        self._options = options
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End ``run`` after the current step of its device."""
        self._stopped.set()

    def run(self) -> Result | None:
        """Run the slice; return None if it was stopped. Raises only SdkError itself, since not all errors pickle."""
        own = self._root / f"slice-{self._number}-of-{self._of}"
        in_memory = self._options["in_memory"]
        try:
            if not in_memory:
                _check_layout(self._root, self._of)
            return run_fleet(
                self._server,
                replace(self._plan, indices=range(self._number, self._plan.total, self._of)),
                processes=1,
                state_dir=own,
                quiet=True,
                interrupted=self._stopped.is_set,
                **self._options,
            )
        except KeyboardInterrupt:
            return None
        except SdkError as error:
            hint = ""
            if isinstance(error, NameTaken) and not in_memory:
                hint = f"; its devices' state is expected in {own}, on the node of the earlier run"
            raise SdkError(f"slice {self._number} of {self._of} on {platform.node()}: {error}{hint}") from None


def run_on_ray(
    server: str,
    plan: Plan,
    *,
    address: str,
    workers: int | None = None,
    engine: EngineChoice = "auto",
    state_dir: Path | None = None,
    in_memory: bool = False,
    access: Access = USUAL,
    quiet: bool = False,
) -> Result:
    """Run the devices of ``plan`` on a Ray cluster until their federation ends, and return the results.

    server: the coordinator's address for the nodes. address: "auto", HOST:PORT, or "local" to start a cluster.
    workers: number of slices, by default one per core. state_dir: folder on every node; to continue, use the same
    number of workers on the same nodes, or a shared folder. Other arguments are those of ``run_fleet``.

    Raises SdkError; MissingPart without Ray; KeyboardInterrupt after every device has finished its step.
    """
    if workers is not None and workers < 1:
        raise BadArgument(f"--workers {workers}: give at least 1")
    with connect(server, access.trust) as client:
        transport = Transport(client, patience_seconds=access.patience_seconds)
        # read here, since the nodes have other environments
        enrolment_token = access.enrolment_token or token_of("enrolment")
        observer_token = access.observer_token or token_of("observer")
        transport.token = observer_token or enrolment_token
        # raises for an unknown federation, before a cluster is started
        transport.federation(plan.federation)
        options = {
            "engine": engine,
            "in_memory": in_memory,
            "access": replace(access, enrolment_token=enrolment_token, observer_token=observer_token),
        }
        root = state_dir and state_dir.absolute()
        ray = _connect(address, workers)
        slices: list[Any] = []
        runs: list[Any] = []
        try:
            cores = _cores(ray)
            if len(cores) < (workers or 1):
                raise BadArgument(f"--workers {workers or 1}: the cluster has {len(cores)} cores; give at most as many")
            number = min(workers or len(cores), plan.total)
            for k, node in enumerate(cores[:number]):
                there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(num_cpus=1, max_concurrency=2, scheduling_strategy=there)(_Slice)
                slices.append(actor.remote(server, plan, k, number, root, options))
                runs.append(slices[-1].run.remote())
            return _sum(_watch(ray, runs, transport, plan.federation, quiet))
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SdkError) else error) from None
        except ray.exceptions.RayError as error:
            raise SdkError(f"a worker of the cluster died ({error}); repeat the command to continue") from None
        finally:
            # no slice may keep running, and state in memory is deleted
            for each in slices:
                each.stop.remote()
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=END_SECONDS)
            ray.shutdown()


def _connect(address: str, workers: int | None) -> Any:
    """Return the module ray, connected.

    Raises BadArgument if the cluster cannot be reached, MissingPart without ray.
    """
    # ray reads them when it is imported
    for key, text in SETTINGS.items():
        os.environ.setdefault(key, text)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingPart("a cluster needs Ray: pip install 'sparrow-fl[scale]'") from None
    own = {"num_cpus": workers, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(address, logging_level=logging.ERROR, **(own if address == LOCAL else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadArgument(f"Ray at {address}: {error}") from None
    return ray


def _cores(ray: Any) -> list[str]:
    """Return the node of each core, alternating between nodes."""
    # Nodes are sorted by address, so that a slice finds its state on the same node the next time.
    slots = [
        (slot, node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
        for slot in range(int(node["Resources"].get("CPU", 0)))
    ]
    return [node for _, _, node in sorted(slots)]


def _watch(ray: Any, runs: list[Any], transport: Transport, federation: str, quiet: bool) -> list[Result]:
    """Wait for the slices and return their results; raise the first error at once."""
    # the progress bar does not wait for the coordinator
    transport.patience_seconds = 0.0
    results: list[Result] = []
    with tqdm(unit=" round", disable=quiet or None, dynamic_ncols=True, file=sys.stderr) as bar:
        while runs:
            ended, runs = ray.wait(runs, timeout=LOOK_SECONDS)
            results += ray.get(ended)
            if quiet:
                continue
            with contextlib.suppress(SdkError):
                info = transport.federation(federation)
                bar.total = info.rounds
                bar.n = info.round
                bar.set_description(info.status.value)
    return results


def _sum(results: list[Result]) -> Result:
    firsts = [each.seconds_to_first for each in results if each.seconds_to_first is not None]
    counts = ("hosted", "device_rounds", "evaluations", "adapted", "failed")
    return replace(
        results[0],
        **{name: sum(getattr(each, name) for each in results) for name in counts},
        seconds=max(each.seconds for each in results),
        seconds_to_first=min(firsts, default=None),
        rounds=(),
        devices=(),
    )


def _check_layout(root: Path, of: int) -> None:
    """Raise StateError if the folder is of another number of slices, because devices would not find their state."""
    others = {path.name.rpartition("-")[2] for path in root.glob("slice-*-of-*")} - {str(of)}
    if others:
        raise StateError(
            f"{root} has the devices of {min(others)} slices, not of {of}; give --workers {min(others)} to continue, "
            f"or another --state-dir"
        )
