"""Check a decoded update against its assignment: form, mask, parts and values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sparrow.protocol.bundle import Bundle
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import Mask, NeuronMask, same_mask
from sparrow.protocol.messages import Kind
from sparrow.protocol.parts import Expected
from sparrow.protocol.secure.fine import words_of_extras
from sparrow.protocol.secure.numbers import WORDS
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from ..methods import CoordinatorMethod, GlobalModel, Situation, load_method
from ..storage.tables import Assignment
from ..sums.averages import difference
from .intake import fault_of_update


def check_form(decoded: Bundle, kind: Kind, situation: Situation) -> None:
    """Raise BadContent unless values have the federation's precision, or are masked in secure rounds, and an update
    that prepares a model has its mask.
    """
    settings = situation.settings
    if settings.secure and kind is Kind.train:
        fault = _masked_fault(situation.manifest, settings, decoded)
        if fault is not None:
            raise BadContent(f"values: {fault}")
        return
    if decoded.masked is not None:
        raise BadContent("values: send masked values only to secure federations")
    precision = settings.precision_of("up", kind)
    if decoded.precision != precision:
        raise BadContent(f"values: sent as {decoded.precision}, but the federation's precision is {precision}")
    if kind is Kind.prepare and decoded.mask is None:
        raise BadContent("mask: send an update that prepares the model with its mask")


def _masked_fault(manifest: Manifest, settings: FederationSettings, decoded: Bundle) -> str | None:
    if decoded.masked is None:
        return "an update of a secure round must be masked; update this SDK"
    if decoded.masked.dtype != WORDS[settings.secure_bits]:
        return f"masked values have {settings.secure_bits} bits here"
    wanted = words_of_extras(manifest, decoded.mask, metrics=settings.masks_metrics)
    if decoded.extras is None or len(decoded.extras) != wanted:
        return f"{wanted} words must follow the masked values, of running statistics and metrics; update this SDK"
    return None


def check_mask(
    decoded: Bundle, assignment: Assignment, mask: Mask | None, model: GlobalModel, situation: Situation, *, device: str
) -> NeuronMask | None:
    """Return the neurons that a device chose, if its method lets it choose, otherwise None.

    mask: the assignment's. Raises BadContent if the method does not permit the update's mask.
    """
    method = load_method(situation.settings.method)
    choice = method.active.choice(situation.settings) if method.active else None
    if choice is not None and assignment.ratio is not None:
        held = mask if isinstance(mask, NeuronMask) else None
        fault = choice.fault(held, decoded.mask, assignment.ratio, situation)
        if fault is not None:
            raise BadContent(f"mask: {fault}; fetch the assignment again")
    elif not _fits_assignment(method, decoded.mask, mask):
        if not isinstance(decoded.mask, method.masks.type):
            raise BadContent(
                f"mask: it differs from the mask of {device} in round {assignment.round}; fetch the assignment again"
            )
        method.masks.check(model, decoded.mask, situation)
    return decoded.mask if choice is not None and isinstance(decoded.mask, NeuronMask) else None


def _fits_assignment(method: CoordinatorMethod, mask: Mask | None, assigned: Mask | None) -> bool:
    """Return whether an update's mask equals its assignment's, except for neurons that devices may omit."""
    optional = method.active.optional if method.active else None
    if optional and isinstance(mask, NeuronMask) and isinstance(assigned, NeuronMask) and optional in assigned.active:
        mask = NeuronMask({**mask.active, optional: assigned.active[optional]})
    return same_mask(mask, assigned)


def check_parts(decoded: Bundle, parts: Mapping[str, Expected]) -> None:
    """Raise BadContent unless an update has exactly these parts, with the right sizes."""
    wanted = {name: part.most for name, part in parts.items()}
    if {name: len(numbers) for name, numbers in decoded.parts.items()} != wanted:
        brings = " and ".join(f"{count} {name}" for name, count in wanted.items())
        raise BadContent(f"an update of this round must have {brings} besides its values; update this SDK")


def check_values(decoded: Bundle, model: GlobalModel, situation: Situation) -> None:
    """Raise BadContent for invalid values, and for changes beyond ``update_norm_limit``."""
    manifest = situation.manifest
    limit = situation.settings.update_norm_limit
    fault = fault_of_update(manifest, decoded, model.tensors)
    if fault is not None:
        raise BadContent(f"{fault}; return the assignment, or train with a lower learning rate or a clip")
    if limit is None:
        return
    if decoded.precision == "int8":
        # int8 updates are differences.
        change = decoded.values.astype(np.float64)
    else:
        change = difference(manifest, model.tensors, decoded.values, decoded.mask)
    norm = float(np.linalg.norm(change))
    if norm > limit:
        raise BadContent(
            f"values: they moved by {norm:.3g} from the payload (2-norm), but the federation allows {limit:g}; "
            f"return the assignment, or train with a lower learning rate or a clip"
        )
