"""A fleet on a Ray cluster: each Ray worker hosts a slice of the devices, and all of them ask the same coordinator.

A slice is a fleet of one process (``fleet.run_fleet``) in a Ray actor that takes one core. Slice k has devices k,
k + N, k + 2N and so on. Ray carries the plan out and the counts back; models travel between devices and coordinator
alone.
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

from edge_sdk.device.connection import connect, token_of
from edge_sdk.device.state import default_root
from edge_sdk.device.transport import Transport
from edge_sdk.engines import EngineChoice
from edge_sdk.errors import BadArgument, NameTaken, SdkError, StateError

from ..protocol.errors import MissingPart
from .fleet import USUAL, Access, run_fleet
from .host import Plan
from .result import Result

LOCAL = "local"
LOOK_SECONDS = 1.0
"""How often the bar is moved on; a slice that ends is noticed at once."""

END_SECONDS = 30.0
"""How long the slices have to end, before they are killed; their state bears that, too."""

STORE_BYTES = 100_000_000
"""Memory of the object store of a Ray that is started here: nothing large goes through it."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or every actor that takes no GPU warns of what will change there
}


class _Slice:
    """Part of a fleet; the Ray actor. ``run`` has one of its threads, ``stop`` the other."""

    def __init__(
        self, server: str, plan: Plan, number: int, of: int, root: Path | None, options: dict[str, Any]
    ) -> None:
        self._server, self._plan, self._number, self._of = server, plan, number, of
        self._root = root or default_root(server, plan.federation) / "fleet"
        self._options = options
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End ``run`` once its device has finished the step that it is in."""
        self._stopped.set()

    def run(self) -> Result | None:
        """Run the slice; None where it was stopped. Raises SdkError for what was foreseen: not all can be pickled."""
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
                hint = f"; the state of its devices is looked for in {own}, and there if it ran on this node before"
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
    """Run the devices of ``plan`` on a Ray cluster until their federation has ended, and return what was done.

    server: the coordinator's address, as the cluster's nodes reach it. address: "auto" or HOST:PORT of the cluster, or
    "local" for one that is started here and ended. workers: how many slices, one per core by default. state_dir: on
    every node, where its slices keep their devices' state, each in a folder of its own: it is found again by the same
    number of workers on the same nodes, or, where the nodes share the folder, on any. The rest is as for ``run_fleet``.

    Raises SdkError; MissingPart without Ray; KeyboardInterrupt once every device has finished the step it was in, which
    an idle slice takes up to ``fleet.LOOK_SECONDS`` to notice.
    """
    if workers is not None and workers < 1:
        raise BadArgument(f"{workers} workers; give at least 1")
    with connect(server, access.trust) as client:
        transport = Transport(client, patience_seconds=access.patience_seconds)
        enrolment_token = access.enrolment_token or token_of("enrolment")  # here: the nodes have other environments
        observer_token = access.observer_token or token_of("observer")
        transport.token = observer_token or enrolment_token
        transport.federation(plan.federation)  # its errors, before a cluster is started
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
                raise BadArgument(f"{workers or 1} workers, but the cluster has {len(cores)} cores")
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
            raise SdkError(f"a worker of the cluster died ({error}); the same command goes on") from None
        finally:
            # Whatever happened, no slice is left to go on alone; and what was in memory goes with it.
            for each in slices:
                each.stop.remote()
            if runs:
                ray.wait(runs, num_returns=len(runs), timeout=END_SECONDS)
            ray.shutdown()


def _connect(address: str, workers: int | None) -> Any:
    """Ray, connected. Raises BadArgument, MissingPart."""
    for key, text in SETTINGS.items():
        os.environ.setdefault(key, text)  # read when ray is imported
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingPart("a fleet on a cluster needs Ray: pip install 'sparrow-fl[scale]'") from None
    own = {"num_cpus": workers, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(address, logging_level=logging.ERROR, **(own if address == LOCAL else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadArgument(f"Ray at {address}: {error}") from None
    return ray


def _cores(ray: Any) -> list[str]:
    """Return the node of each core of the cluster: a first one of every node, a second one, and so on.

    Nodes are in the order of their addresses, so that a slice comes to the same node, and to its state, another time.
    """
    slots = [
        (slot, node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
        for slot in range(int(node["Resources"].get("CPU", 0)))
    ]
    return [node for _, _, node in sorted(slots)]


def _watch(ray: Any, runs: list[Any], transport: Transport, federation: str, quiet: bool) -> list[Result]:
    """Return the results of the slices once all have ended; raise the first error at once."""
    transport.patience_seconds = 0.0  # a bar that stands still is no reason to end
    results: list[Result] = []
    with tqdm(unit=" round", disable=quiet or None, dynamic_ncols=True, file=sys.stderr) as bar:
        while runs:
            ended, runs = ray.wait(runs, timeout=LOOK_SECONDS)
            results += ray.get(ended)
            if quiet:
                continue
            with contextlib.suppress(SdkError):
                info = transport.federation(federation)
                bar.total, bar.n = info.rounds, info.round
                bar.set_description(info.status.value)
    return results


def _sum(results: list[Result]) -> Result:
    """Return the sum of the slices' results."""
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
    """Devices that were dealt to another number of slices would not find their state. Raises StateError."""
    others = {path.name.rpartition("-")[2] for path in root.glob("slice-*-of-*")} - {str(of)}
    if others:
        raise StateError(
            f"{root} holds the devices of {min(others)} slices, not of {of}; give --workers {min(others)} to go on, or "
            f"another --state-dir"
        )
