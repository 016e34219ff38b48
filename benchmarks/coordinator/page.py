"""The rows as the page docs/results/speed.md: medians over turns, ratios within a turn, and the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.coordinator.contest import Row
from benchmarks.markdown import markdown_table

ENGINES = {
    "sparrow": "sparrow, dense",
    "sparrow 0.2": "sparrow, density 0.2",
    "flower": "Flower, deployment engine",
    "grpc": "Flower, old gRPC API",
    "flare": "NVIDIA FLARE",
}
SLOW = ("flower", "flare")
"""Engines whose rounds take seconds, so that few are measured."""
MB = 1e6


def _memory(row: Row) -> float:
    return float(row["server_memory"]["pss"])


def _figure(key: str) -> Callable[[Row], float]:
    return lambda row: float(row[key])


@dataclass(frozen=True)
class Asked:
    """A bound on a figure: our ``figure`` divided by theirs is at most ``most``; ``model`` None means every model.

    most: None only reports the ratio. upside_down: the report says how many times smaller ours is.
    """

    what: str
    ours: str
    theirs: str
    model: str | None
    figure: Callable[[Row], float]
    most: float | None
    upside_down: bool = False

    def ratio(self, ours: Row, theirs: Row) -> float:
        """Return our figure divided by theirs; infinity if theirs is too small to be measured."""
        divisor = self.figure(theirs)
        return self.figure(ours) / divisor if divisor else float("inf")

    def show(self, ratio: float) -> str:
        """Return the ratio as text."""
        return f"{1 / ratio:.1f} times" if self.upside_down else f"{ratio:.3g}"

    @property
    def bound(self) -> str:
        """Return the bound as text."""
        if self.most is None:
            return "-"
        return f"at least {1 / self.most:.0f} times" if self.upside_down else f"at most {self.most:g}"

    def met(self, ratio: float) -> str:
        """Return whether this ratio is within the bound, as text."""
        if self.most is None:
            return "-"
        return "yes" if ratio <= self.most else "no"


ASKED = (
    Asked("a round is shorter", "sparrow", "flower", "small", _figure("seconds_per_round"), 1 / 100, True),
    Asked("a round is shorter", "sparrow", "flower", "large", _figure("seconds_per_round"), 1 / 25, True),
    Asked("server CPU per update", "sparrow", "flower", "small", _figure("server_seconds_per_update"), 0.06),
    Asked("server CPU per update", "sparrow", "flower", "large", _figure("server_seconds_per_update"), None),
    Asked("client CPU per round", "sparrow", "flower", None, _figure("client_seconds_per_round"), 0.05),
    Asked("server memory", "sparrow", "flower", "small", _memory, None),
    Asked("server memory", "sparrow", "flower", "large", _memory, 0.25),
    Asked("server CPU per update", "sparrow", "grpc", "large", _figure("server_seconds_per_update"), 1.0),
    Asked("server CPU per update", "sparrow 0.2", "grpc", "large", _figure("server_seconds_per_update"), 0.5),
    Asked("server CPU per update", "sparrow", "grpc", "small", _figure("server_seconds_per_update"), None),
    Asked("server memory", "sparrow", "grpc", "large", _memory, None),
    Asked("a round is shorter", "sparrow", "flare", None, _figure("seconds_per_round"), None, True),
    Asked("server CPU per update", "sparrow", "flare", None, _figure("server_seconds_per_update"), None),
    Asked("client CPU per round", "sparrow", "flare", None, _figure("client_seconds_per_round"), None),
    Asked("server memory", "sparrow", "flare", None, _memory, None),
    Asked("server CPU per update", "sparrow 0.2", "flare", "large", _figure("server_seconds_per_update"), None),
)
CROWD = ["server CPU, ms/device-round", "device-rounds/s", "server CPU, ms/enrolment", "peak RSS, MB"]
CROWDED = 1.3
"""How much more a device-round may cost with the most devices enrolled."""
MILLION = 1_000_000
DAY = 24 * 3600
GROWTH = 0.10
"""By how much peak memory with the most updates may exceed that with the fewest."""

ABOUT = """# The coordinator against Flower's servers and NVIDIA FLARE

Made by `python -m benchmarks.coordinator` (its peers apart, by `python -m benchmarks.peers.install`) from
`coordinator.jsonl`, a line for each measurement. {machine}; {seconds}.{note}

Every client takes part in every round and trains nothing: it downloads, adds a small number to every value, and
uploads. Each is a process of its own. The engines are measured in turn: {turns}. A measurement lies between two ends of
rounds, after rounds that start things up; Flower's deployment and FLARE are measured over {slow} rounds of each
federation, since one takes seconds, the others over {others}.

- *sparrow, dense*: this project's coordinator as an operator starts it - SQLite and files, every update on the disk
  before it is acknowledged - with FedAvg. *density 0.2*: FedSGC's ordinary rounds, a fifth of the weights up and down.
- *Flower, deployment engine*: flwr {flower}, a SuperLink, SuperNodes, `flwr run`, its own FedAvg, by HTTP.
  State in memory, the default. SuperLink and SuperNodes start a process for every app's run, and wait in fixed steps:
  an idle SuperNode asks every 3 s, and so does the app for its answers.
- *Flower, old gRPC API*: `start_server` and `start_client` of flwr {grpc}, deprecated. All in memory.
- *NVIDIA FLARE*: nvflare {flare}, provisioned with `connection_security: clear` and the default scheme, a server, a
  process per site, and a job of its own FedAvg (`NumpyFedAvgRecipe`, the script in the site's job process). Server and
  sites keep a process for the job. A round is mostly waiting: both sides look for tasks at intervals, by default.

Processor seconds are user and system time of a side's processes, children that ended included, from `/proc`. Server
memory is the peak of the sum of PSS over the server's processes (SuperLink with its ServerApp's, FLARE's with its
job's), sampled four times a second, start-up included; the old API and sparrow have one process. Bytes are what TCP
carried at the server's port, headers of HTTP or gRPC included; of the SuperLink's, which serves its ServerApp too,
those of the SuperNodes. No TLS, no telemetry, one machine: clients and server share its cores, so that a round lasts as
long as all its processor time takes on them; CPU per update is the better figure to plan with.

What is not alike: sparrow and only sparrow writes every update to disk and checks its digest and values, and FLARE
writes each round's new model; the model of FLARE is one array of as many values, as its NumPy recipe has it, that of
the others an array per tensor; the end of a round is noted by the server with Flower, and with sparrow and FLARE by the
first client, when the next work has arrived. Federations of Flower and FLARE are one of several that a server can run.
None evaluates here. On one SuperLink the small model's federation runs before the large one's.
"""


SINCE = """## Since these runs

They were made on 25 November 2026, before device calls went through FastAPI's routes. In five later runs by turns, on
the same machine under other work, an update took 6.0 to 6.9 ms of processor time before that change, and 6.1 to 7.2 ms
after it; other hooks into the server that gained less than 20 % were removed with it
([architecture.md](../architecture.md#coordinatorapi-and-calls)). The peers were not measured again.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    rounds = [row for row in rows if row["kind"] == "rounds"]
    run = next((row for row in rows if row["kind"] == "run"), None)
    parts = [_about(rounds, run), "## Figures\n", "Medians over turns.\n", _figures(rounds)]
    parts += ["## Ratios\n", "Ours over theirs within a turn: least, **median**, greatest.\n", _asked(rounds)]
    memory = [row for row in rows if row["kind"] == "memory"]
    if memory:
        parts += ["## Memory by updates in a round\n", _growth(memory)]
    crowds = [row for row in rows if row["kind"] == "growth"]
    if crowds:
        parts += ["## Many devices\n", _crowds(crowds)]
    return "\n".join([*parts, SINCE])


def ratios(rows: Sequence[Row], asked: Asked) -> dict[tuple[str, int], list[float]]:
    """Return our figure divided by theirs, by model and number of clients, one per turn that has both."""
    found: dict[tuple[str, int], list[float]] = {}
    by = {(row["engine"], row["model"], row["clients"], row["turn"]): row for row in rows}
    for (engine, model, clients, turn), ours in by.items():
        theirs = by.get((asked.theirs, model, clients, turn))
        if engine == asked.ours and theirs is not None and asked.model in (None, model):
            found.setdefault((model, clients), []).append(asked.ratio(ours, theirs))
    return found


def growth(rows: Sequence[Row]) -> float:
    """Return the share by which peak memory with the most updates exceeds that with the fewest."""
    fewest, most = (find(rows, key=lambda row: row["updates"]) for find in (min, max))
    return float(most["server_peak_rss"] / fewest["server_peak_rss"] - 1)


def _about(rounds: Sequence[Row], run: Row | None) -> str:
    turns = [
        f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'} with {clients} clients"
        for clients in sorted({row["clients"] for row in rounds})
        if (turns := {row["turn"] for row in rounds if row["clients"] == clients})
    ]
    counts = {slow: sorted({r["rounds"] for r in rounds if (r["engine"] in SLOW) is slow}) for slow in (True, False)}
    return ABOUT.format(
        machine=rounds[0]["machine"],
        seconds=f"{run['seconds'] / 60:.0f} minutes" if run else "time not noted",
        note=f" **{run['note']}**" if run and run["note"] else "",
        turns=", ".join(turns),
        slow=" or ".join(str(count) for count in counts[True]),
        others=" or ".join(str(count) for count in counts[False]),
        **{engine: _version(rounds, engine) for engine in ("flower", "grpc", "flare")},
    )


def _version(rows: Sequence[Row], engine: str) -> str:
    """Return the releases of a peer that were measured; rows of earlier days do not say."""
    found = {row.get("version", "(release not noted)") for row in rows if row["engine"] == engine}
    return " and ".join(sorted(found)) or "(not measured)"


def _figures(rows: Sequence[Row]) -> str:
    head = ["model", "clients", "", "round, s", "updates/s", "server CPU, ms/update", "client CPU, s/round"]
    head += ["server memory, MB", "down, kB/update", "up, kB/update"]
    lines = []
    for model, clients in sorted(
        {(row["model"], row["clients"]) for row in rows}, key=lambda cell: (cell[0] != "small", cell)
    ):
        for engine, name in ENGINES.items():
            mine = [r for r in rows if (r["engine"], r["model"], r["clients"]) == (engine, model, clients)]
            if mine:
                figures = [
                    f"{_median(mine, _figure('seconds_per_round')):.3g}",
                    f"{_median(mine, _figure('updates_per_second')):.3g}",
                    f"{1000 * _median(mine, _figure('server_seconds_per_update')):.3g}",
                    f"{_median(mine, _figure('client_seconds_per_round')):.3g}",
                    f"{_median(mine, _memory) / MB:.0f}",
                    f"{_median(mine, _figure('bytes_down_per_update')) / 1000:.0f}",
                    f"{_median(mine, _figure('bytes_up_per_update')) / 1000:.0f}",
                ]
                lines.append([f"{mine[0]['parameters']:,}", str(clients), name, *figures])
    return markdown_table(head, lines)


def _asked(rows: Sequence[Row]) -> str:
    lines = []
    for asked in ASKED:
        for (model, clients), found in sorted(
            ratios(rows, asked).items(), key=lambda item: (item[0][0] != "small", item[0])
        ):
            middle = statistics.median(found)
            ends = sorted(found, reverse=asked.upside_down)
            least = asked.show(ends[0])
            greatest = asked.show(ends[-1])
            shown = f"{least}, **{asked.show(middle)}**, {greatest}" if len(found) > 1 else f"**{asked.show(middle)}**"
            against = f"{ENGINES[asked.ours]} against {ENGINES[asked.theirs]}"
            row = [against, asked.what, f"{model}, {clients} clients", shown, asked.bound, asked.met(middle)]
            lines.append(row)
    return markdown_table(["", "", "", "found", "asked", "met"], lines)


def _growth(rows: Sequence[Row]) -> str:
    model = f"{rows[0]['parameters']:,}"
    ordered = sorted(rows, key=lambda row: row["updates"])
    table = markdown_table(
        ["updates in a round", "peak RSS of the coordinator, MB", "seconds"],
        [[f"{row['updates']:,}", f"{row['server_peak_rss'] / MB:.0f}", f"{row['seconds']:.0f}"] for row in ordered],
    )
    grown = growth(rows)
    return (
        f"Dense updates of {model} parameters, by the kernel's count of the coordinator process (VmHWM).\n\n{table}\n"
        f"With {ordered[-1]['updates']:,} updates it is {100 * grown:.1f} % more than with {ordered[0]['updates']:,}; "
        f"less than {100 * GROWTH:.0f} % is asked: {'met' if grown < GROWTH else 'not met'}.\n"
    )


def _crowds(rows: Sequence[Row]) -> str:
    """Return the cost of device-rounds with many enrolled devices, and of a million per day."""
    table = markdown_table(
        ["enrolled", "drawn", "rounds", "records", "processes", *CROWD],
        [
            [
                f"{row['enrolled']:,}",
                str(row["cohort"]),
                str(row["rounds"]),
                row["records"],
                str(row["processes"]),
                f"{1000 * row['server_seconds_per_update']:.2f}",
                f"{row['updates_per_second']:.0f}",
                f"{1000 * row['server_seconds_per_enrolment']:.2f}",
                f"{row['server_peak_rss'] / MB:.0f}",
            ]
            for row in rows
        ],
    )
    alone = [row for row in rows if row["records"] == "SQLite"]
    few = min(alone, key=lambda row: row["enrolled"])
    many = max(alone, key=lambda row: row["enrolled"])
    share = many["server_seconds_per_update"] / few["server_seconds_per_update"]
    seconds = MILLION * (many["server_seconds_per_update"] + many["server_seconds_per_enrolment"])
    memory = (many["server_peak_rss"] - few["server_peak_rss"]) / (many["enrolled"] - few["enrolled"])
    return (
        f"Made by `python -m benchmarks.coordinator.growth`: dense updates of {few['parameters']:,} parameters; all "
        f"calls of a device-round, the lists of who is waited for included. One process plays the devices, on the "
        f"same cores.\n\n{table}\n"
        f"With {many['enrolled']:,} enrolled a device-round costs {share:.2f} of it with {few['enrolled']:,}; "
        f"at most {CROWDED:g} is asked: {'met' if share <= CROWDED else 'not met'}.\n\n"
        f"**A million devices a day**, each enrolled and doing one device-round of this model, would take "
        f"{seconds / 3600:.1f} hours of one core by these coefficients, {100 * seconds / DAY:.0f} % of it, at "
        f"{MILLION / DAY:.0f} device-rounds a second, and {memory * MILLION / 1e9:.1f} GB more memory, if it grew "
        f"alike, which was not measured beyond {many['enrolled']:,}. Not measured: draws among a million rows, and the "
        f"long polls of devices that wait, each of which holds a connection.\n"
    )


def _median(rows: Sequence[Row], figure: Callable[[Row], float]) -> float:
    return float(statistics.median(figure(row) for row in rows))
