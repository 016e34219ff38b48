"""Read a device's mask, personal model and gate from its state folder between two steps.

The place of the mask depends on the method:

narrow networks (Hermes, FedMP, PruneFL by neurons, FjORD, HeteroFL)   neurons whose incoming weights in the personal
                    model are not all zero: weights of dropped neurons are zero in whatever is kept
some neurons train (FedSPU)   those drawn for the device's last round, from the coordinator's records
DM-PFL              both masks, which lie beside the personal model
pFedGate            blocks that the mean gates use, without those that are always on
one sparse model (FedSGC, FedDST, PruneFL)   the global mask that the device received last
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from benchmarks.analysis.measures import Layers
from edge_sdk.device.session import load_mask
from edge_sdk.device.state import Progress, Reference, StateFolder
from edge_sdk.methods import load_method
from edge_sdk.methods.dual import Dual
from sparrow.coordinator.draws import neurons_of
from sparrow.coordinator.storage.store import RECORDS_FILE
from sparrow.coordinator.storage.tables import Assignment, Device, Federation
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronDraw, NeuronMask, draw_neurons
from sparrow.protocol.messages import FederationInfo
from sparrow.protocol.neurons import norm_scores

Unit = Literal["neurons", "weights", "blocks"]
PARAMETERS = (".weight", ".bias", "logits")
"""The ends of the names of a gating layer's parameters; its other tensors are running statistics."""


@dataclass(frozen=True)
class Look:
    """The state of one device.

    model: its trainable tensors by name, float32; None without a personal model. mask: its own; kept: layer -> share of
    the layer that this keeps, of values for blocks. shared: the mask of a global sparse model, as this device has it.
    gates: the mean gates of all blocks, [L]; gate: the gating layer's parameters by name.
    """

    model: Tensors | None = None
    unit: Unit | None = None
    mask: Layers | None = None
    kept: dict[str, float] | None = None
    shared: Layers | None = None
    gates: np.ndarray | None = None
    gate: Tensors | None = None


@dataclass(frozen=True)
class StoredState:
    """A state folder as read: the whole personal model, its progress, the method's arrays, and the mask received."""

    personal: Tensors | None
    progress: Progress
    own: Tensors
    received: ElementMask | NeuronMask | None


def read_folder(path: Path, manifest: Manifest, reference: Reference | None) -> StoredState:
    """Read a device's state folder, which must not be in use. Raises StateError."""
    folder = StateFolder(path, durable=False, reference=reference)
    try:
        personal, progress = folder.load(manifest)
        return StoredState(personal, progress, folder.own, load_mask(folder, manifest))
    finally:
        folder.close()


def look(stored: StoredState, manifest: Manifest, info: FederationInfo, device: str, records: Path) -> Look:
    """Return the state of one device. records: the folder of the coordinator's records."""
    method = load_method(info.method)
    personal = stored.personal
    own = stored.own
    names = [spec.name for spec in manifest.kept if spec.trainable]
    model = None if personal is None else {name: personal[name] for name in names}
    if info.method == "dmpfl" and personal is not None:
        dual = Dual.load(manifest, personal, own)
        mask = _elements(dual.mask)
        return Look(model, "weights", mask, _shares(mask), _elements(dual.global_mask))
    if info.method == "pfedgate" and "static" in own:
        table = manifest.block_table
        gates = np.asarray(own["static"], dtype=np.float64)
        on = gates != 0
        layers = manifest.block_groups("layer")
        sizes = table.sizes
        free = {name: on[blocks][~table.forced[blocks]] for name, blocks in layers.items()}
        kept = {name: float(sizes[blocks][on[blocks]].sum() / sizes[blocks].sum()) for name, blocks in layers.items()}
        gate = {name: tensor for name, tensor in own.items() if name.startswith("gate:") and name.endswith(PARAMETERS)}
        return Look(model, "blocks", free, kept, gates=gates, gate=gate)
    neurons: NeuronMask | None = None
    if method.narrow and personal is not None:
        neurons = own_neurons(manifest, personal)
    elif method.forward_stays and stored.progress.last_round:
        neurons = drawn_neurons(records, manifest, device, stored.progress.last_round)
    if neurons is not None:
        mask = _neurons(manifest, neurons)
        return Look(model, "neurons", mask, _shares(mask))
    if isinstance(stored.received, ElementMask):
        return Look(model, shared=_elements(stored.received))
    return Look(model)


def own_neurons(manifest: Manifest, personal: Tensors) -> NeuronMask:
    """Return the neurons of a narrow personal model: those with an incoming weight that is not zero."""
    scores = norm_scores(manifest, personal, 1)
    return NeuronMask({group: np.flatnonzero(each) for group, each in scores.items()})


def drawn_neurons(records: Path, manifest: Manifest, device: str, number: int) -> NeuronMask | None:
    """Return the neurons of a device's assignment in a round, from the coordinator's records; None if it had none."""
    engine = create_engine(f"sqlite:///file:{(records / RECORDS_FILE).resolve()}?mode=ro&uri=true")
    try:
        with Session(engine) as db:
            found = db.execute(
                select(Assignment, Federation.secret)
                .join(Device, Assignment.device_id == Device.id)
                .join(Federation, Assignment.federation_id == Federation.id)
                .where(Device.name == device, Assignment.round == number, Assignment.kind == "train")
            ).one_or_none()
            if found is None:
                return None
            assignment, secret = found
            draw = NeuronDraw(neurons_of(secret, assignment, device), assignment.ratio or 1.0)
            return draw_neurons(manifest, draw)
    finally:
        engine.dispose()


def _neurons(manifest: Manifest, mask: NeuronMask) -> Layers:
    return {group: np.isin(np.arange(size), mask.active[group]) for group, size in manifest.group_sizes.items()}


def _elements(mask: ElementMask) -> Layers:
    return {name: flags.reshape(-1) for name, flags in mask.exists.items()}


def _shares(mask: Layers) -> dict[str, float]:
    return {name: float(flags.mean()) for name, flags in mask.items()}
