"""``python docs/methods.py`` writes the tables of docs/methods.md from what methods declare; a test checks them."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from edge_sdk import methods as device_halves
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import (
    ALL_ALIKE,
    AS_ASSIGNED,
    CoordinatorMethod,
    load_method,
    why_mean_only,
    why_not_buffered,
    why_not_private,
)
from sparrow.protocol.settings import FederationSettings

PAGE = Path(__file__).with_suffix(".md")

BEGIN = "<!-- Made by `python docs/methods.py`; do not edit by hand. -->"
END = "<!-- End of what is made. -->"


def page(text: str) -> str:
    """Return the page with new tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return both tables, of the methods of this repository."""
    names = sorted(
        entry.name
        for entry in entry_points(group="sparrow.coordinator_methods")
        if entry.value.startswith("sparrow.coordinator.methods.")
    )
    trains = [
        "| method | a device trains | smallest budget | personal model | global model | takes |",
        "|---|---|---|---|---|---|",
    ]
    combines = ["| method | `robust` | `noise_multiplier` | `buffer` |", "|---|---|---|---|"]
    for name in names:
        method = load_method(name)
        settings = completed(FederationSettings(method=name))
        cells = (f"`{name}`", _trains(method, settings), _budget(method, settings), _personal(method), _shared(method))
        trains.append(f"| {' | '.join((*cells, _takes(name, method)))} |")
        reasons = (why_mean_only, why_not_private, why_not_buffered)
        combines.append(f"| `{name}` | {' | '.join('no' if why(method, settings) else 'yes' for why in reasons)} |")
    return (
        "\n".join(trains)
        + "\n\nSettings that a method can be combined with, at its default settings:\n\n"
        + "\n".join(combines)
        + "\n"
    )


def _trains(method: CoordinatorMethod, settings: FederationSettings) -> str:
    """Return the part of the model that a device trains in a round."""
    if method.compose is not None:
        return f"a mixture of {settings.method_settings['components']} models"
    if method.payload_parts is not None and method.parts:
        return "which weights of its last layers exist; none moves"
    if method.changes is not None and not method.only_means(settings):
        return "blocks that it chooses for each batch"
    if method.active is not None:
        which = "neurons that it has chosen" if method.active.choice(settings) else "neurons drawn for each round"
        which = "neurons that the server keeps for it" if method.active.pruning(settings) else which
        which = "each layer's first neurons" if method.active.rule else which
        return f"{which}, others {'left out' if method.active.narrow else 'frozen'}"
    if (method.masks is AS_ASSIGNED and not method.parts) or method.only_means(settings):
        return "the whole model"
    which = "weights that one device chose" if method.prepares else "weights that exist"
    return f"{which}; some are replaced in certain rounds" if method.schedule is not ALL_ALIKE else which


def _budget(method: CoordinatorMethod, settings: FederationSettings) -> str:
    smallest = method.smallest_budget(settings)
    named = next(
        (name for name in ("density", "smallest_budget") if settings.method_settings.get(name) == smallest), None
    )
    return "any" if smallest == 0 else f"`{named}`" if named else f"{smallest:g}"


def _personal(method: CoordinatorMethod) -> str:
    if not method.personal_models:
        return "no"
    return "yes, also mixed with the global one" if method.mixes_global else "yes"


def _shared(method: CoordinatorMethod) -> str:
    return "yes" if method.usable_global_model and method.compose is None else "not usable alone"


def _takes(name: str, method: CoordinatorMethod) -> str:
    """Return the models that a method supports."""
    if method.compose is not None:
        return "classifiers"
    half = device_halves.load_method(name)
    if half.takes_any_model:
        return "any model"
    if half.needs_coupling:
        return "models with known coupling" + (" that run with fewer neurons" if half.narrow else "")
    return "models that torch.fx can trace"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
