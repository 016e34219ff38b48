"""``make chaos``: federations of several methods on bad machines, bad networks, bad disks and bad databases.

    .venv/bin/python -m tests.system.chaos --faults 1000 --minutes 45 --rows benchmarks/rows/chaos.jsonl

Each federation is real coordinators (``sparrow serve``) and real devices (``edge_sdk.join``), each a process, with a
proxy between every device and them. ``faults`` says what befalls them; it is drawn from the seed. The federation must
end all the same, and then

- every update that was acknowledged is in the records, once, and nothing else is;
- every global model is the one that ``recompute`` makes of the bodies that went by, of the devices that its record
  names, without those that it leaves out;
- where no deadline passed and nothing was damaged, models, records, masks, exported models and the files of the
  coordinator are those of the same federation undisturbed;
- no program has written a traceback, and every device has ended well.

A row of JSON is appended per federation; ``--resume`` goes on where rows end. Federations alternate between SQLite
and PostgreSQL. PostgreSQL runs with ``fsync=off``: processes are killed here, machines are not; what a power cut takes
is tested with a layer that loses what was not flushed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Receipt, UpdateReport
from sparrow.protocol.settings import FederationSettings

from ..coordinator.postgresql import Server, serving
from ..disks import mounted
from .conftest import OF_COORDINATORS, OF_DEVICES, Device, Devices, Forked, Nursery
from .faults import BY_NAME, FAMILIES, NETWORK, Chaos, draw_strikes
from .proxy import Exchange, Proxy
from .recompute import Differs, Model, Sent, brought_forward, check_model, read_update

MOVES = "this process now moves rounds"
RESUMED = 30_000
"""Bytes from which updates go on where a connection broke: those of the largest budgets are longer, others are not."""


@dataclass(frozen=True)
class Scenario:
    """A federation. budgets: of its devices. processes: coordinators on one PostgreSQL database. deadlines_pass: it
    loses devices to deadlines. stores: on which it runs. fleet: its devices are hosted by two processes."""

    name: str
    settings: dict[str, Any]
    budgets: tuple[float, ...]
    processes: int = 1
    deadlines_pass: bool = False
    stores: tuple[str, ...] = ("sqlite", "postgresql")
    fleet: bool = False

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def same_each_time(self) -> bool:
        """Whether faults change nothing of how it ends."""
        return not self.deadlines_pass and self.settings.get("buffer") is None


def _scenario(name: str, method: str, budgets: Sequence[float], **more: Any) -> Scenario:
    of_itself = {key: more.pop(key) for key in ("processes", "deadlines_pass", "stores", "fleet") if key in more}
    settings = {
        "method": method,
        "rounds": 8,
        "cohort": 4,
        "min_devices": len(budgets),
        "deadline_seconds": 3600.0,
        # Devices that are killed and wait for their next try may be silent for longer than a minute.
        "silence_seconds": 3600.0,
        "local_epochs": 1,
        "evaluation_interval": 3,
        "early_stopping": "off",
        # A second opinion on sums: an update that counts shortened would differ from its body.
        "relative_clip": 0.0,
        "seed": 11,
    }
    if "draws" in FederationSettings.model_fields:
        settings["draws"] = "seed"
    return Scenario(name, {**settings, **more}, tuple(budgets), **of_itself)


SCENARIOS = {
    each.name: each
    for each in (
        _scenario("fedspu", "fedspu", (0.3, 0.5, 0.6, 1.0, 1.0), global_evaluation_interval=4),
        _scenario(
            "fedsgc",
            "fedsgc",
            (1.0,) * 5,
            precision="int8",
            method_settings={"density": 0.3, "adjust_interval": 2, "device_interval": 2, "direction_memory": True},
        ),
        _scenario(
            "dmpfl",
            "dmpfl",
            (1.0,) * 5,
            precision="int8",
            method_settings={"density": 0.4, "iterations": 2, "replaced": 0.2, "adjust_interval": 1},
        ),
        _scenario(
            "pfedgate",
            "pfedgate",
            (0.4, 0.4, 0.6, 0.6, 0.6),
            precision="int8",
            method_settings={"blocks": 10, "touched_limit": 0.6, "gate_learning_rate": 0.5},
        ),
        _scenario("buffered", "fedavg", (1.0,) * 6, precision="int8", buffer=3, rounds=10, local_steps=1),
        _scenario(
            "quorum", "fedavg", (1.0,) * 5, precision="fp16", quorum=0.75, deadline_seconds=2.5, deadlines_pass=True
        ),
        _scenario("three", "fedspu", (0.4, 0.6, 1.0, 1.0), processes=3, stores=("postgresql",)),
        _scenario("fleet", "fedspu", (0.3, 0.6, 1.0) * 8, cohort=12, rounds=3, fleet=True),
    )
}


class World:
    """A federation's machines: coordinators over one folder, their database if it is not a file, devices, proxies."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        nurseries: tuple[Nursery, Nursery],
        server: Server | None,
        *,
        own_disk: bool = False,
    ) -> None:
        self.scenario, self.folder, self.server, self.own_disk = scenario, folder, server, own_disk
        self.name = scenario.name
        self.database = None if server is None else server.new_database()
        settings = {"COORDINATOR_KEEP_MODELS": "1000", "COORDINATOR_MIN_FREE_BYTES": "0"}
        settings["COORDINATOR_DEVICE_TOKEN_ROTATION_DAYS"] = "0.0003"  # tokens are renewed every half minute
        if self.database is not None:
            settings["COORDINATOR_DATABASE_URL"] = self.database
        of_coordinators, of_devices = nurseries
        self.coordinators = [
            Forked(of_coordinators, folder / f"coordinator{number}", data=folder / "data", **settings)
            for number in range(scenario.processes)
        ]
        self.devices = Devices(lambda: of_devices, folder / "devices")
        self.running: dict[str, Device] = {}
        self._proxies: dict[str, Proxy] = {}

    @property
    def models(self) -> Path:
        return self.coordinators[0].data / "blobs" / "1" / "models"

    def model_files(self) -> frozenset[str]:
        """The names of all that is among the models' files now."""
        return frozenset(os.listdir(self.models) if self.models.is_dir() else ())

    def mover(self) -> Forked:
        """Who has said last that it moves rounds."""
        if len(self.coordinators) == 1:
            return self.coordinators[0]
        said: list[tuple[str, int]] = []
        for number, each in enumerate(self.coordinators):
            said += [(line, number) for line in each.logged(rf"(?m)^(\S+ \S+).*{MOVES}")]
        return self.coordinators[max(said, default=("", 0))[1]]

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection to the records on PostgreSQL, not the coordinator's."""
        import psycopg

        assert self.database is not None
        with closing(psycopg.connect(self.database)) as connection:
            yield connection

    def start(self, chaos: Chaos) -> None:
        for each in self.coordinators:
            each.start()
        body = {"name": self.name, "task": "digits", "settings": self.scenario.settings}
        self.coordinators[0].http.post("/v1/federations", json=body).raise_for_status()
        names = ["fleet"] if self.scenario.fleet else [f"device{n}" for n in range(len(self.scenario.budgets))]
        for name in names:
            self._proxies[name] = Proxy(
                chaos.port, keeps=True, trouble=chaos.of(name), plain=len(self._proxies) % 2 == 0
            )
        for name in names:
            self.start_device(name)

    def start_device(self, name: str) -> None:
        url, count = self._proxies[name].url, len(self.scenario.budgets)
        if self.scenario.fleet:
            budgets = ",".join(map(str, self.scenario.budgets))
            more = ("--devices", str(count), "--data", "partition=shards", "--budgets", budgets, "--processes", "2")
            self.running[name] = self.devices.fleet(url, self.name, *more, resumed=RESUMED)
            return
        number = int(name.removeprefix("device"))
        more = ("--data", f"index={number},of={count},alpha=1", "--budget", str(self.scenario.budgets[number]))
        self.running[name] = self.devices(url, self.name, name, *more, "--quiet", resumed=RESUMED)

    def kill_device(self, name: str) -> None:
        self.running[name].kill()

    def exchanges(self) -> list[Exchange]:
        return [exchange for proxy in self._proxies.values() for exchange in proxy.exchanges]

    def chunked(self) -> list[str]:
        return [each for proxy in self._proxies.values() for each in proxy.chunked]

    def end_calls(self) -> None:
        for proxy in self._proxies.values():
            proxy.wait_until_over()

    def get(self, path: str) -> Any:
        return self.coordinators[-1].get(f"/v1/federations/{self.name}{path}").json()

    def close(self) -> None:
        self.devices.close()
        for each in self._proxies.values():
            each.close()
        for coordinator in self.coordinators:
            coordinator.close()


# --- how it ended ------------------------------------------------------------------------------------------------

COUNTED = (
    "round",
    "cohort",
    "updates",
    "handed_back",
    "expired",
    "num_examples",
    "evaluated_devices",
    "counts",
    "notes",
)
COUNTED += ("parts_up", "parts_down", "model_sha256", "base_version", "model_version", "accuracy_personal")
COUNTED += ("accuracy_global", "train_loss")


@dataclass(frozen=True)
class Ending:
    """What became of a federation, but for what depends on clocks and on how often something was sent."""

    status: tuple[str, str, int]
    rounds: list[dict[str, Any]]
    reports: list[list[tuple[str, str, dict[str, Any]]]]
    models: list[tuple[int, str]]
    files: list[str]
    of_devices: dict[str, bytes]

    def check_equal(self, peace: Ending) -> bool:
        """Raise Differs, which names the first difference, unless this is how it ended undisturbed."""
        for mine, theirs in zip(self.rounds, peace.rounds, strict=True):
            for key, value in mine.items():
                if value != theirs[key] and key != "parts_down":  # who lost its state is sent everything again
                    raise Differs(f"round {mine['round']}: {key} is {value}, undisturbed {theirs[key]}")
        for name in ("status", "reports", "models", "files", "of_devices"):
            if getattr(self, name) != getattr(peace, name):
                raise Differs(f"{name}: not as undisturbed")
        return True


def ending(world: World) -> Ending:
    info, records, data = world.get(""), world.get("/rounds"), world.coordinators[0].data
    reports = [world.get(f"/rounds/{record['round']}/reports") for record in records]
    kept = [*world.devices.folder.glob("*/mask.bits"), *world.devices.folder.glob("*.onnx")]
    return Ending(
        (info["status"], info["reason"], info["round"]),
        [{key: _without_header(record[key]) for key in COUNTED} for record in records],
        [[(each["device"], each["kind"], _of_report(each["report"])) for each in of_round] for of_round in reports],
        [(model["version"], model["model_sha256"]) for model in world.get("/models")],
        sorted(str(path.relative_to(data)) for folder in ("blobs", "uploads") for path in (data / folder).rglob("*.*")),
        {str(path.relative_to(world.devices.folder)): path.read_bytes() for path in kept},
    )


def _without_header(value: Any) -> Any:
    """Bytes by part, but for the header: a report's seconds are in it."""
    return {key: count for key, count in value.items() if key != "header"} if isinstance(value, dict) else value


def _of_report(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("num_examples", "steps", "personal", "global_model") if key in report}


@dataclass
class Found:
    """What was counted at the end."""

    rounds: int = 0
    models: int = 0
    acknowledged: int = 0
    last_bits: int = 0
    compared: bool = False
    # Warnings in the coordinators' logs, which explain a federation that ended differently.
    warnings: tuple[str, ...] = ()


class Lost(AssertionError):
    """Something acknowledged is not in the records as often as it should be."""


def check_records(world: World, chaos: Chaos) -> tuple[list[dict[str, Any]], dict[int, list[str]]]:
    """Every acknowledged update is in the records once, as it was sent. Returns the rounds' records, and for each
    round the paths of its training updates, in the order in which they count."""
    records = world.get("/rounds")
    waiting: dict[tuple[str, str, str], list[str]] = {}
    for path, body in chaos.bodies.items():
        _, device, kind = chaos.told[path]
        waiting.setdefault((device, kind, _report(body, path in chaos.trained)), []).append(path)
    counted: dict[int, list[str]] = {}
    for record in records:
        paths: list[tuple[str, str]] = []
        for each in world.get(f"/rounds/{record['round']}/reports"):
            trained = each["kind"] in ("train", "prepare", "personalise")
            model = UpdateReport if trained else Receipt
            key = (each["device"], each["kind"], model.model_validate(each["report"]).model_dump_json())
            if not waiting.get(key):
                raise Lost(f"round {record['round']}: {key[:2]} was never acknowledged, or is recorded twice")
            path = waiting[key].pop(0)
            if each["kind"] == "train" and each["device"] not in record["left_out"]:
                paths.append((each["device"], path))
        if world.scenario.settings.get("buffer") is not None:
            paths.sort(key=lambda each: list(chaos.bodies).index(each[1]))
        else:
            paths.sort(key=lambda each: record["cohort"].index(each[0]))
        counted[record["round"]] = [path for _, path in paths]
    lost = [(chaos.told[path], path) for paths in waiting.values() for path in paths if path not in chaos.damaged]
    if lost:
        raise Lost(f"acknowledged, and in no record: {lost}")
    for path, codes in chaos.acknowledged.items():
        if codes.count(201) > 1 and path not in chaos.damaged:
            raise Lost(f"{path}: new more than once: {codes}")
    return records, counted


def _report(body: bytes, in_bundle: bool) -> str:
    if not in_bundle:
        try:
            return UpdateReport.model_validate_json(body).model_dump_json()
        except ValueError:
            return Receipt.model_validate_json(body).model_dump_json()
    length = int.from_bytes(body[:8], "little")
    return UpdateReport.model_validate_json(
        json.loads(body[8 : 8 + length])["__metadata__"]["report"]
    ).model_dump_json()


def check_models(world: World, chaos: Chaos, records: list[dict[str, Any]], counted: dict[int, list[str]]) -> Found:
    """Every model is the one that the bodies which its record names make."""
    found = Found(rounds=len(records), acknowledged=len(chaos.bodies))
    manifest = Manifest.model_validate(world.get("/manifest"))
    info = world.get("")
    settings = dict(info["settings"])
    http, known = world.coordinators[-1].http, dict[int, Model]()
    digests = {model["version"]: model["model_sha256"] for model in world.get("/models")}

    def model(version: int) -> Model:
        if version not in known:
            of_version = sorted(world.models.glob(f"{version:09d}.*safetensors"))
            if info["global_model_usable"]:
                values = http.get(f"/v1/federations/{world.name}/model?version={version}").raise_for_status().content
            else:  # it is of no use without what devices have, and not given out
                bodies = [each.read_bytes() for each in of_version if ".state." not in each.name]
                values = next(each for each in bodies if digests[version] in (None, hashlib.sha256(each).hexdigest()))
            digest = hashlib.sha256(values).hexdigest()
            if digests[version] not in (None, digest):
                raise Lost(f"model {version} has not the digest that its record names")
            states = [each for each in of_version if ".state." in each.name]
            if len(states) > 1:  # one is of a process that died
                names = f"{digest} {checkpoint.read_note(values)}"
                states = [each for each in states if any(part in names for part in each.name.split(".")[1:-1])]
            known[version] = Model.read(manifest, values, states[0].read_bytes() if states else None)
        return known[version]

    if settings["method"] == "dmpfl":
        first = model(0).mask
        assert first is not None
        settings["method_settings"] = {**settings["method_settings"], "counts": first.counts}
    began = {record["round"]: record["base_version"] for record in records}
    for record in records:
        base, updates = record["base_version"], list[Sent]()
        for path in counted[record["round"]]:
            then = began[chaos.told[path][0]]
            update = read_update(manifest, chaos.bodies[path], model(then))
            if chaos.told[path][1] in record.get("capped", {}):
                update = replace(update, examples=record["capped"][chaos.told[path][1]])
            if settings["buffer"] is not None and then != base:
                exponent = settings["staleness_exponent"]
                update = brought_forward(update, model(then), model(base), base - then, exponent)
            updates.append(update)
        if not updates:
            if record["model_version"] != base:
                raise Lost(f"round {record['round']}: a new model of no updates")
            continue
        made = model(record["model_version"])
        try:
            found.last_bits += check_model(settings["method"], settings, manifest, model(base), updates, made)
        except Differs as error:
            raise Differs(f"round {record['round']} of {len(updates)} updates: {error}") from error
        found.models += 1
    return found


# --- one federation ----------------------------------------------------------------------------------------------


@dataclass
class Machines:
    """What federations share: processes to fork from, a PostgreSQL server, and how each scenario ends in peace."""

    nurseries: tuple[Nursery, Nursery]
    server: Callable[[], Server]
    folder: Path
    in_peace: dict[str, Ending] = field(default_factory=dict)

    def peace(self, scenario: Scenario) -> Ending:
        if scenario.name not in self.in_peace:
            alone = Scenario(scenario.name, scenario.settings, scenario.budgets, fleet=scenario.fleet)
            _, self.in_peace[scenario.name], _ = play(self, alone, "sqlite", seed=0, strikes=0, families=())
        return self.in_peace[scenario.name]


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """In ``folder``. PostgreSQL is started when it is first asked for."""
    with ExitStack() as stack:
        pair = Nursery(*OF_COORDINATORS), Nursery(*OF_DEVICES)
        for each in pair:
            stack.callback(each.close)
        started: list[Server] = []

        def server() -> Server:
            if not started:
                started.append(stack.enter_context(serving()))
            return started[0]

        yield Machines(pair, server, folder)


def play(
    machines: Machines, scenario: Scenario, store: str, *, seed: int, strikes: int, families: Sequence[str]
) -> tuple[Chaos, Ending, Found]:
    """Run a federation to its end under faults, and check all but its equality with an undisturbed one."""
    folder = Path(tempfile.mkdtemp(prefix=f"{scenario.name}-{store}-{seed}-", dir=machines.folder))
    with ExitStack() as stack:
        (folder / "data").mkdir()
        own_disk = "disk" in families and stack.enter_context(mounted(folder / "data", 24))
        server = machines.server() if store == "postgresql" else None
        world = World(scenario, folder, machines.nurseries, server, own_disk=own_disk)
        stack.callback(world.close)
        drawn = draw_strikes(seed, strikes, world, families)
        chaos = Chaos(world, drawn, seed, network="network" in families)
        try:
            world.start(chaos)
            until = time.monotonic() + 120 + 12 * strikes
            while not chaos.all_ended():
                if chaos.errors:
                    raise chaos.errors[0]
                if time.monotonic() > until:
                    raise TimeoutError(f"it stands still: {world.get('')}")
                time.sleep(0.02)
            chaos.finish()
            if chaos.errors:
                raise chaos.errors[0]
            world.end_calls()
            for each in world.coordinators:
                each.clock_step = 0.0
                each.stop()
            for each in world.coordinators:
                each.start()
            found = _check(world, chaos)
            end = ending(world)
        except BaseException:
            chaos.finish()
            kept = machines.folder / f"failed-{folder.name}"
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
            print(f"kept in {kept}", file=sys.stderr)
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return chaos, end, found


def _check(world: World, chaos: Chaos) -> Found:
    info = world.get("")
    rounds = world.scenario.settings["rounds"]
    assert (info["status"], info["reason"], info["round"]) == ("finished", "max_rounds", rounds), info
    for name, device in world.running.items():
        assert device.wait() == 0, f"{name} ended with {device.wait()}: {device.output[-2000:]}"
        assert "Traceback" not in device.output, f"{name}: {device.output[-2000:]}"
    assert world.chunked() == []
    if not world.scenario.deadlines_pass:
        for path in set(chaos.unheard) - chaos.damaged:
            assert 200 in chaos.acknowledged[path], f"{path}: sent again, it is the same again (200)"
    for each in world.coordinators:
        assert each.logged(r"/v1/\S+ HTTP/1.1\" 20"), "each was asked to do something"
        traces = each.logged(r"(?ms)^Traceback.*?^\w[^\n]*")
        assert not traces, traces[0]
    records, counted = check_records(world, chaos)
    found = check_models(world, chaos, records, counted)
    found.warnings = tuple(line for each in world.coordinators for line in each.logged(r"(?m)^.* WARNING .*$"))
    return found


def run(
    machines: Machines, scenario: Scenario, store: str, *, seed: int, strikes: int, families: Sequence[str]
) -> dict[str, Any]:
    """Run a federation and check everything; returns its row."""
    began = time.monotonic()
    row: dict[str, Any] = {"scenario": scenario.name, "method": scenario.method, "store": store, "seed": seed}
    row["processes"] = scenario.processes
    try:
        peace = machines.peace(scenario) if scenario.same_each_time else None
        chaos, end, found = play(machines, scenario, store, seed=seed, strikes=strikes, families=families)
        if peace is not None and not chaos.damaged:
            row["warnings"] = found.warnings
            found.compared = end.check_equal(peace)
            del row["warnings"]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:1000]
    else:
        row |= {"kills": chaos.kills, "faults": dict(sorted(chaos.befell.items()))}
        row |= {"rounds": found.rounds, "models": found.models, "acknowledged": found.acknowledged}
        row |= {"last_bits": found.last_bits, "as_undisturbed": found.compared, "failed": None}
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


# --- make chaos --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--faults", type=int, default=1000, help="kills and faults after which it ends, the network's not counted"
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="begin no federation after so many")
    parser.add_argument("--seed", type=int, default=1, help="of the first federation; each one more has the next")
    parser.add_argument("--strikes", type=int, default=18, help="drawn for each federation, beside the network's")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of faults (default: %(default)s)")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="federations (default: %(default)s)")
    parser.add_argument("--stores", default="sqlite,postgresql", help="where records are (default: %(default)s)")
    parser.add_argument("--rows", type=Path, default=Path("runs/chaos.jsonl"), help="where rows are appended")
    parser.add_argument("--resume", action="store_true", help="go on after the rows that are there")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a background job inherits the first one ignored
        signal.signal(number, signal.default_int_handler)
    families = [each for each in options.families.split(",") if each]
    for each in families:
        if each not in FAMILIES:
            parser.error(f"--families: there is no {each}; there are {', '.join(FAMILIES)}")
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if options.resume and options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
        rows = [row for row in rows if "summary" not in row]
    with options.rows.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    began, until = time.monotonic(), time.monotonic() + 60 * options.minutes
    folder = Path("runs").resolve() / "chaos"
    folder.mkdir(parents=True, exist_ok=True)
    stores = options.stores.split(",")
    turns = {
        store: [name for name in options.scenarios.split(",") if store in SCENARIOS[name].stores] for store in stores
    }
    with machines(folder) as shared:
        try:
            while time.monotonic() < until:
                left = {store: options.faults / len(stores) - _faults(rows, store) for store in stores}
                if max(left.values()) <= 0:
                    break
                store = max(stores, key=lambda name: left[name])
                played = sum(row["store"] == store for row in rows)
                scenario = SCENARIOS[turns[store][played % len(turns[store])]]
                seed = options.seed + len(rows)
                # Where an update is damaged and made again, models are others: half of all remain comparable.
                these = [each for each in families if each != "damage" or played // len(turns[store]) % 2 == 0]
                row = run(shared, scenario, store, seed=seed, strikes=options.strikes, families=these)
                rows.append(row)
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                minutes, said = (time.monotonic() - began) / 60, row["failed"] or "as it should be"
                count = sum(_faults(rows, each) for each in stores)
                line = (
                    f"{minutes:5.1f} min  {count:5} faults  {scenario.name} on {store}, seed {seed}, {row['seconds']} s"
                )
                print(f"{line}: {said}", flush=True)
        except KeyboardInterrupt:
            print("stopped; --resume goes on", flush=True)
    summary = summarise(rows, time.monotonic() - began, options)
    with options.rows.open("a") as file:
        file.write(json.dumps({"summary": summary}) + "\n")
    print(table(rows, summary))
    return 0 if rows and not summary["failed"] else 1


def _faults(rows: Sequence[dict[str, Any]], store: str) -> int:
    """Kills, and what else struck, but for the network; a strike that kills two counts as two."""
    mine = [row for row in rows if row["store"] == store and not row["failed"]]
    return sum(
        count * max(1, BY_NAME[kind].kills) for row in mine for kind, count in row["faults"].items() if kind in BY_NAME
    )


def summarise(rows: Sequence[dict[str, Any]], seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Totals of the rows."""
    good = [row for row in rows if not row["failed"]]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    stores = sorted({row["store"] for row in rows})
    return {
        "command": f"python -m tests.system.chaos {' '.join(sys.argv[1:])}",
        "commit": commit,
        "cores": os.cpu_count(),
        "seeds": [row["seed"] for row in rows],
        "federations": len(rows),
        "methods": sorted({row["method"] for row in good}),
        "faults": {store: _faults(rows, store) for store in stores},
        "kills": {store: sum(row["kills"] for row in good if row["store"] == store) for store in stores},
        "network_faults": sum(row["faults"].get(kind, 0) for row in good for kind in NETWORK),
        "rounds": sum(row["rounds"] for row in good),
        "models_recomputed": sum(row["models"] for row in good),
        "values_off_by_a_last_bit": sum(row["last_bits"] for row in good),
        "as_undisturbed": sum(row["as_undisturbed"] for row in good),
        "acknowledged": sum(row["acknowledged"] for row in good),
        "failed": len(rows) - len(good),
        "seconds": round(sum(row["seconds"] for row in rows)),
        "seconds_of_this_run": round(seconds),
    }


def table(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    """The summary as text: faults by kind and store, then the totals."""
    stores = list(summary["faults"])
    counts = {store: Counter[str]() for store in stores}
    for row in rows:
        counts[row["store"]].update(row.get("faults", {}))
    lines = [f"{'kind':60}" + "".join(f"{store:>12}" for store in stores)]
    for kind in [*NETWORK, *BY_NAME]:
        if any(counts[store][kind] for store in stores):
            lines.append(f"{kind:60}" + "".join(f"{counts[store][kind]:12}" for store in stores))
    lines.append(f"{'kills and faults':60}" + "".join(f"{summary['faults'][store]:12}" for store in stores))
    lines.append(f"{'of which kill -9':60}" + "".join(f"{summary['kills'][store]:12}" for store in stores))
    lines += [f"{key}: {value}" for key, value in summary.items() if key not in ("faults", "kills")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
