"""The training step as pages run it: made fast here, and for as many neurons as a page trains.

A device with the SDK changes the published graph itself; a browser has nothing that could.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import FULL_RATIO, NeuronDraw, draw_neurons
from edge_sdk.protocol.neurons import counts_at

MOST_KEPT = 32


class Steps:
    """Steps that were made, the last ``MOST_KEPT`` of them kept. One is made at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, tuple[int, ...]], bytes] = OrderedDict()

    def make(self, step: bytes, manifest: Manifest, ratio: float) -> bytes:
        """Return a manifest's step for masks of this active ratio, in (0, 1]."""
        from sparrow.export.steps import step_of_neurons  # onnx, which a coordinator without pages does not load

        key = (manifest.files["step"], tuple(counts_at(manifest, ratio).values()))
        with self._lock:
            if key not in self._made:
                some = ratio < FULL_RATIO and bool(manifest.groups)
                mask = draw_neurons(manifest, NeuronDraw("any", ratio)) if some else None
                self._made[key] = step_of_neurons(step, manifest, mask)
                if len(self._made) > MOST_KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]
