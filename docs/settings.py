"""``python docs/settings.py`` writes docs/settings.md from the settings themselves; a test holds the page to them."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from edge_sdk.device.policy import Policy
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.methods import load_method
from sparrow.coordinator.settings import Settings

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Settings

Made by `python docs/settings.py`; do not edit by hand.

## The coordinator's

Environment variables, read at start. A variable that begins with `COORDINATOR_` and is not in the table is refused, for
it would have no effect; what Kubernetes and Docker set for a service called `coordinator` is left aside.

"""

TOKENS = """
Where no token of a kind is set or was made, its calls are open: fine on one machine, and the coordinator says so
loudly when it is reached from beyond it. Where all three are there, a caller without one learns nothing but `/healthz`
and `/readyz`. Callers send `Authorization: Bearer <token>`; the SDK reads `SPARROW_ENROLMENT_TOKEN` (join, fleet),
`SPARROW_ADMIN_TOKEN` (publish, delete, evaluate) and `SPARROW_OBSERVER_TOKEN` (fleet, status, track), its Python
functions too, where they are given none. Tokens limited in number and time are
made by `sparrow token`; [operating.md](operating.md) has that, TLS, rate limits, logs and metrics.

## A federation's

Given when it is created: as options of `sparrow publish` (`--local-epochs 3`), as arguments of
`publish(...)`, or as `settings` of `POST /v1/federations`. `rounds`, `cohort`, `deadline_seconds` and `silence_seconds`
can be changed later by `PATCH /v1/federations/{name}`.

"""

STOPPING = """
### Early stopping and the personal model

After each round that it takes part in, a device measures the loss of its model on its validation data.

- `early_stopping=validation` (the default): the loss is smoothed, half of it the newest and half the smoothed loss of
  before. If it has not fallen by `min_improvement` of its lowest value for `patience` participations in a row (10), and
  the device has taken part at least `min_participations` times, it stops. A device whose loss has not yet fallen by a
  tenth of its first value has not begun to learn, and goes on.
- `early_stopping=paper`: the rule of FedSPU's paper. `L = stop_weight * training loss + (1 - stop_weight) * validation
  loss`; `patience` rises in a row (1), each against the device's last participation, stop it. It saves more, and costs
  accuracy ([fedspu.md](results/fedspu.md)).
- `early_stopping=off`: every device trains to the last round.

A device that stops sends this round's update, says so, and trains no more. It goes on answering evaluations. When all
devices have stopped the federation is finished.

Stopped or not, a device keeps the personal model of the round in which its validation data spoke best for it: more
right answers or, where as many are right, a lower loss. That one is judged, exported and printed
(`personal_model=best`); training goes on from the last one. `pfedgate` and `dmpfl` keep the last one, as their gate and
masks belong to the newest global model.

### Who judges what

A device judges its personal model on data of its own every `evaluation_interval` rounds, which moves a few hundred
bytes. To judge the global model it must download it: up to `global_evaluation_devices` devices do that at the end, and
every `global_evaluation_interval` rounds where that is set. For methods without personal models, such as FedAvg, these
devices judge the global model every `evaluation_interval` rounds. An operator with test data needs no device for it:
`sparrow evaluate`.

With `fedspu`, `ditto` and `apfl` every device is sent the finished global model once, at the end: a mixture of it and
the personal model (0.25, 0.5, 0.75 or all of it) takes the personal model's place where it is better on the device's
validation data. It helps small budgets most, whose devices have never trained some of their weights.

### When a round closes, and who is waited for

A round closes when `quorum` of its cohort have sent their updates, when everybody has sent one or handed back, or at
its deadline. Later updates are refused, with the reason. A device that misses a deadline is not drawn again until it
asks for work.

- **Dead devices**: a device at work is heard of every third of `silence_seconds`, however long its training, a pause or
  a transfer takes. One that is silent for that long while somebody waits for it (in a round, a buffer or an evaluation;
  not when it adapts a finished model) has missed its deadline at once: the round goes on without it. To that time comes
  the pause that devices without work are told to make (a second in fleets of up to 200), and 15 seconds where several
  coordinator processes share a database. After a restart, a pause, or a time in which the coordinator heard nobody, it
  counts anew. Simulated devices are exempt: they wait for their turn.

- **Slow devices**: `over_selection` draws so many more (0.3: 13 for a `cohort` of 10), and the round closes when
  `cohort` of them have answered; the others are told that they are too late, and drawn again like all others.
- **Too few updates**: a round that has fewer than `min_updates` at its deadline, or when nobody is left to answer,
  gets another `deadline_seconds` and as many further devices as updates are missing, up to `extensions` times. Then
  it is skipped: its record says whose updates were left out, the model stays, and the next round opens.
- **Nobody waits** (`buffer`; FedBuff, arXiv:2106.06639): `cohort` devices train at a time, a round closes when
  `buffer` updates have come, and those that still train count in a later one. An update that is t models old moves
  today's model by (1 + t)^-`staleness_exponent` of what it moved its own. Records say how many were stale
  (`notes.stale_updates`), and by how many models at most. For methods whose rounds are a mean of updates: FedSPU,
  FedAvg, FedProx, the dropout family, FedPer, FedRep, LG-FedAvg, Ditto and APFL; others refuse it, and so does
  differential privacy. Which updates meet in a round depends on who is quick, so that two runs differ; the same
  arrivals give the same model.
"""

METHODS = """
## One method's own

Given as `method_settings`, an object of these names: `{"proximal_weight": 0.1}`; on a command line as
`--method-set proximal_weight=0.1`. What is left out is filled in when the federation is created, and what the method
does not know is refused. What they do is in [methods.md](methods.md).

"""


POLICIES = """
## A device's policy

Lines of a TOML file, or `--limit KEY=VALUE` of `python -m edge_sdk.join`; each may be left out. What they do, and what
each kind of device has by default, is in [budget.md](budget.md).

"""


def page() -> str:
    """The whole page."""
    coordinators, federations = _table(Settings, "COORDINATOR_{}", upper=True), _table(FederationSettings, "{}")
    methods, policies = METHODS + _methods(), POLICIES + _table(Policy, "{}")
    return HEAD + coordinators + TOKENS + federations + STOPPING + methods + policies


def _methods() -> str:
    """A row per setting of each method of this repository; a method from outside describes its own."""
    lines = ["| method | setting | default | meaning |", "|---|---|---|---|"]
    for entry in sorted(entry_points(group="sparrow.coordinator_methods"), key=lambda entry: entry.name):
        if entry.value.startswith("sparrow.coordinator.methods."):
            for field, about in load_method(entry.name).settings_type.model_fields.items():
                lines.append(f"| {entry.name} | `{field}` | {_default(about)} | {about.description} |")
    return "\n".join(lines) + "\n"


def _table(model: type[BaseModel], name: str, *, upper: bool = False) -> str:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for field, about in model.model_fields.items():
        key = name.format(field.upper() if upper else field)
        lines.append(f"| `{key}` | {_default(about)} | {about.description} |")
    return "\n".join(lines) + "\n"


def _default(about: FieldInfo) -> str:
    value = about.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return f"`{value.model_dump_json(exclude_defaults=True)}`"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else f"`{value}`" if str(value) else "empty"


if __name__ == "__main__":
    PAGE.write_text(page())
