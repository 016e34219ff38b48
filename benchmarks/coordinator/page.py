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
"""Limit of the cost of a device-round with the most enrolled devices, relative to the fewest."""
MILLION = 1_000_000
DAY = 24 * 3600
GROWTH = 0.10
"""Limit of the relative growth of peak memory from the fewest to the most updates."""

ABOUT = """# The coordinator against Flower's servers and NVIDIA FLARE

Made by `python -m benchmarks.coordinator` from `coordinator.jsonl`, which has one line per measurement.
{machine}; {seconds}.{note} `python -m benchmarks.peers.install` installs the other frameworks.

Every client takes part in every round and does not train: it downloads, adds a small number to every value, and
uploads. Each client is a separate process. The engines are measured in turn: {turns}. A measurement starts and stops at
the end of a round, after some warm-up rounds. Flower's deployment and FLARE need seconds per round, so they are
measured over {slow} rounds of each federation. The others are measured over {others} rounds.

- *sparrow, dense*: this project's coordinator with its default storage (SQLite and files; every update is on the disk
  before it is acknowledged) and FedAvg. *density 0.2*: FedSGC's ordinary rounds, with a fifth of the weights up and
  down.
- *Flower, deployment engine*: flwr {flower}, a SuperLink, SuperNodes, `flwr run`, its own FedAvg, over HTTP. The state
  is in memory, the default. SuperLink and SuperNodes start a process for each app of a run, and wait for fixed
  intervals: an idle SuperNode polls every 3 s, and so does the app for its answers.
- *Flower, old gRPC API*: `start_server` and `start_client` of flwr {grpc}, deprecated. All state is in memory.
- *NVIDIA FLARE*: nvflare {flare}, provisioned with `connection_security: clear` and the default scheme, a server, one
  process per site, and a job with its own FedAvg (`NumpyFedAvgRecipe`, the script in the site's job process). Server
  and sites keep a process for the job. Most of a round is waiting, because both sides poll for tasks at intervals, by
  default.

Processor seconds are the user and system time of all processes of a side, including children that have ended, from
`/proc`. Server memory is the peak of the sum of PSS over the server's processes (SuperLink with its ServerApp's,
FLARE's with its job's), sampled four times a second, including start-up. The old API and sparrow have one process.
Bytes are counted on TCP at the server's port, including the headers of HTTP or gRPC. For the SuperLink, which also
serves its ServerApp, only the bytes of the SuperNodes are counted. There is no TLS and no telemetry. Clients and server
share the cores of one machine, so a round lasts as long as the processor time of all of them. CPU per update is
therefore the better figure for planning.

The comparison has these differences:

- Only sparrow writes every update to disk and checks its digest and values. FLARE writes each round's new model.
- FLARE's model is one array with the same number of values, as its NumPy recipe requires. The other models have one
  array per tensor.
- With Flower the server records the end of a round. With sparrow and FLARE the first client does, when the next work
  has arrived.
- Flower and FLARE run each federation as one of several on a server. On a SuperLink the federation of the small model
  runs before that of the large one.
- No framework evaluates here.
"""


SINCE = """## Since these runs

The runs above were made on 25 November 2026, before device calls went through FastAPI's routes. Five later runs
alternated the versions before and after this change, on the same machine beside other work. An update took 6.0 to 6.9
ms of processor time before the change, and 6.1 to 7.2 ms after it. The change also removed other hooks into the server
that gained less than 20 % ([architecture.md](../architecture.md#coordinatorapi-and-calls)). The other frameworks were
not measured again.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    rounds = [row for row in rows if row["kind"] == "rounds"]
    run = next((row for row in rows if row["kind"] == "run"), None)
    parts = [_about(rounds, run), "## Figures\n", "Medians over turns.\n", _figures(rounds)]
    ratio = "Sparrow's figure divided by the other's, within a turn: minimum, **median**, maximum.\n"
    parts += ["## Ratios\n", ratio, _asked(rounds)]
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
        f"Dense updates of {model} parameters. The memory is the kernel's peak of the coordinator process (VmHWM)."
        f"\n\n{table}\n"
        f"The peak with {ordered[-1]['updates']:,} updates is {100 * grown:.1f} % higher than with "
        f"{ordered[0]['updates']:,}. The limit is {100 * GROWTH:.0f} %: {'met' if grown < GROWTH else 'not met'}.\n"
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
        f"Made by `python -m benchmarks.coordinator.growth`, with dense updates of {few['parameters']:,} parameters "
        f"and all calls of a device-round, including the lists of missing devices. One process plays the devices, on "
        f"the same cores.\n\n{table}\n"
        f"A device-round with {many['enrolled']:,} enrolled devices costs {share:.2f} times as much as with "
        f"{few['enrolled']:,}. The limit is {CROWDED:g}: {'met' if share <= CROWDED else 'not met'}.\n\n"
        f"**A million devices a day**: with these coefficients, the enrolment and one device-round of this model each "
        f"would need {seconds / 3600:.1f} hours of one core ({100 * seconds / DAY:.0f} % of a day), at "
        f"{MILLION / DAY:.0f} device-rounds a second. They would need {memory * MILLION / 1e9:.1f} GB more memory, if "
        f"memory grows at the same rate, which was not measured beyond {many['enrolled']:,} devices. Draws from a "
        f"million rows were not measured, nor were the long polls of waiting devices, each of which holds a "
        f"connection.\n"
    )


def _median(rows: Sequence[Row], figure: Callable[[Row], float]) -> float:
    return float(statistics.median(figure(row) for row in rows))
