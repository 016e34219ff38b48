"""Check a federation's settings in combination, with the method and with the model."""

from __future__ import annotations

import math
from importlib.util import find_spec

from pydantic import ValidationError

from sparrow.command_line.faults import faults
from sparrow.command_line.table import percent
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.secure.groups import choose_sharing, least_cell, smallest_cohort
from sparrow.protocol.secure.numbers import Scale
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.tags import BadSelection, Selection

from ..errors import BadContent, NoSuchMethod, UnknownMethod
from ..methods import AS_ASSIGNED, CoordinatorMethod, load_method, why_mean_only, why_not_buffered, why_not_private
from ..rounds.intake import clips_relatively
from ..rounds.privacy import epsilon
from ..sums.robust import ACCIDENT, fewest


def selection_of(text: str, settings: FederationSettings) -> Selection:
    """Return a selection of a federation's devices. Raises BadContent for tags that the federation does not list."""
    try:
        selection = Selection.parse(text)
        selection.check(settings.tags)
    except BadSelection as error:
        raise BadContent(f"where: {error}") from None
    return selection


def completed(settings: FederationSettings) -> FederationSettings:
    """Return the settings completed with the method's defaults, and with the least ``min_devices`` and ``cohort`` of a
    secure federation.

    Raises BadContent for an unknown method and for invalid settings of the method.
    """
    try:
        settings_type = load_method(settings.method).settings_type
    except UnknownMethod as error:
        raise NoSuchMethod(str(error)) from None
    try:
        own = settings_type.model_validate(settings.method_settings)
    except ValidationError as error:
        known = ", ".join(settings_type.model_fields) or "no settings of its own"
        # A misspelt setting of the federation arrives among the method's own.
        names = (*settings_type.model_fields, *FederationSettings.model_fields)
        wrong = "; ".join(f"method_settings.{name}: {text}" for name, text in faults(error, names))
        raise BadContent(f"{wrong}; {settings.method} takes {known}") from None
    return settings.model_copy(update={"method_settings": own.model_dump(mode="json"), **_least_for_sums(settings)})


def _least_for_sums(settings: FederationSettings) -> dict[str, int]:
    """Return ``min_devices`` and ``cohort`` if a secure sum needs more than their defaults."""
    if not settings.secure:
        return {}
    least = {
        "min_devices": least_cell(settings.secure_colluders),
        "cohort": smallest_cohort(settings.secure_colluders, settings.secure_dropouts, settings.cohort) or 0,
    }
    given = settings.model_fields_set
    return {name: count for name, count in least.items() if name not in given and count > getattr(settings, name)}


def check_settings(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent for settings that cannot work together."""
    check_secure(method, manifest, settings)
    check_robust(method, settings)
    check_privacy(method, manifest, settings)
    check_buffer(method, settings)
    check_adjustment(method, manifest, settings)


def check_begin(settings: FederationSettings) -> None:
    """Raise BadContent if a new federation would begin with too few devices for a secure sum."""
    least = least_cell(settings.secure_colluders)
    if settings.secure and settings.min_devices < least:
        raise BadContent(
            f"min_devices: a secure sum of {settings.min_devices} devices hides none of them from a coordinator with "
            f"{settings.secure_colluders} colluders; set min_devices to at least {least}, or leave it out"
        )


def check_secure(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent if the federation cannot be secure."""
    if not settings.secure:
        return
    if find_spec("cryptography") is None:
        raise BadContent("secure: install cryptography on the coordinator: pip install 'sparrow-fl[secure]'")
    reason = method.why_not_secure(settings)
    if reason is not None:
        raise BadContent(f"secure: {settings.method} does not support it: {reason}; leave secure out")
    single = {
        "robust": settings.robust,
        "update_norm_limit": settings.update_norm_limit,
        "outlier_mads": settings.outlier_mads,
        "buffer": settings.buffer,
    }
    asked = next((name for name, value in single.items() if value is not None), None)
    if asked is not None:
        waits = "a secure round has one cohort, whose devices wait for one another"
        why = waits if asked == "buffer" else "it needs single updates, which secure aggregation hides"
        raise BadContent(f"{asked}: not in a secure federation: {why}; leave {asked} or secure out")
    if settings.over_selection or settings.extensions:
        raise BadContent(
            "secure: over_selection and extensions would add devices after the keys were exchanged; leave them out"
        )
    colluders = settings.secure_colluders
    dropouts = settings.secure_dropouts
    if choose_sharing(settings.cohort, colluders, dropouts) is None:
        smallest = smallest_cohort(colluders, dropouts, settings.cohort)
        raise BadContent(
            f"cohort: {settings.cohort} devices cannot hide updates from a coordinator with {colluders} colluders if "
            f"{percent(dropouts, 0)} of the devices drop out; "
            + ("lower secure_dropouts or secure_colluders" if smallest is None else f"set cohort to {smallest}")
        )
    if settings.noise_multiplier is not None and settings.update_clip is not None:
        scale = Scale(settings.secure_bits, settings.cohort, settings.secure_range, 1.0)
        rounded = scale.most_rounded(manifest.shared_values)
        if rounded > settings.update_clip / 2:
            raise BadContent(
                f"secure_bits: rounding to {settings.secure_bits} bits can lengthen an update by {rounded:.3g}, which "
                f"is more than half of update_clip; set secure_bits to 32, or lower secure_range"
            )


def check_robust(method: CoordinatorMethod, settings: FederationSettings) -> None:
    """Raise BadContent if the robust rule cannot work."""
    rule = settings.robust
    if rule is None:
        return
    reason = why_mean_only(method, settings)
    parts = (method.active or method.masks is not AS_ASSIGNED) and not method.only_means(settings)
    if reason is None and rule == "krum" and parts:
        reason = "its devices train different parts of the model, but krum compares whole updates"
        raise BadContent(f"robust: {settings.method} does not support krum: {reason}; choose trimmed_mean or median")
    if reason:
        raise BadContent(f"robust: {settings.method} does not support {rule}: {reason}; leave robust out")
    if settings.buffer is not None:
        raise BadContent(
            "buffer: a round takes the first updates, and malicious devices can be the fastest, so that they exceed "
            "robust_share; leave buffer or robust out"
        )
    if settings.cohort_policy != "uniform":
        raise BadContent(
            f"cohort_policy: under {settings.cohort_policy} a device can raise its chance to be drawn, by its budget "
            f"or name, so that malicious devices exceed robust_share; set it to uniform"
        )
    drawn = math.ceil(settings.cohort * (1 + settings.over_selection) - ACCIDENT)
    updates = math.ceil(settings.quorum * settings.cohort - ACCIDENT)
    least = fewest(rule, settings.robust_share, drawn)
    if updates < least:
        raise BadContent(
            f"cohort: a round closes with {updates} updates of {drawn} devices, too few for {rule}, which needs "
            f"{least}: raise cohort or quorum, or lower robust_share"
        )


_AGAINST_PRIVACY = {
    "update_clip": "noise hides one device's contribution only if its norm is limited; set update_clip",
    "early_stopping": "a device's data decides when it stops, and so affects later draws; set it to off",
    "joules_per_device": "a device's number of samples decides when its energy is spent; leave it out",
    "quorum": "the speed of others, which depends on their data, cuts off late devices; set it to 1",
    "over_selection": "the speed of others, which depends on their data, cuts off late devices; leave it out",
    "min_updates": "a skipped round would reveal how many devices answered; leave it out",
    "buffer": "a device's data affects when it finishes, and so in which round it counts; leave it out",
    "privacy_delta": "a delta of one over the number of devices permits revealing one device; set a much smaller one",
    "robust": "these rules select by single updates, which noise on a sum does not hide; leave it out",
    "outlier_mads": "one device's update affects which others are left out; leave it out; update_clip limits every "
    "device",
    "cohort_policy": "the draw would depend on earlier rounds or budgets; set it to uniform",
}
"""Reasons why settings contradict ``noise_multiplier``."""


def check_privacy(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent if the federation could not keep its differential privacy."""
    if settings.noise_multiplier is None:
        return
    broken = {
        "update_clip": settings.update_clip is None,
        "early_stopping": settings.early_stopping != "off",
        "joules_per_device": settings.joules_per_device is not None,
        "quorum": settings.quorum < 1,
        "over_selection": settings.over_selection > 0,
        "min_updates": settings.min_updates > 1 or settings.extensions > 0,
        "buffer": settings.buffer is not None,
        "privacy_delta": settings.privacy_delta * max(settings.cohort, settings.min_devices) >= 1,
        "robust": settings.robust is not None,
        "outlier_mads": settings.outlier_mads is not None,
        "cohort_policy": settings.cohort_policy != "uniform",
    }
    reasons = {name: text for name, text in _AGAINST_PRIVACY.items() if broken[name]}
    for setting, reason in [*reasons.items(), ("method", why_not_private(method, settings))]:
        if reason:
            raise BadContent(f"{setting}: noise_multiplier promises differential privacy, but {reason}")
    buffers = next((spec.name for spec in manifest.shared if not spec.trainable), None)
    if buffers is not None:
        raise BadContent(
            f"{buffers}: noise would make running variances negative; use a model without batch norm, or, with a "
            f"method that keeps personal models, publish with --running-statistics personal"
        )
    epsilon(settings, 1)


def check_buffer(method: CoordinatorMethod, settings: FederationSettings) -> None:
    """Raise BadContent if the method cannot use updates of older models."""
    if settings.buffer is None:
        return
    reason = why_not_buffered(method, settings)
    if reason:
        raise BadContent(f"buffer: {settings.method} cannot use updates of older models: {reason}; leave it out")


def check_adjustment(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent if method or model do not support logit adjustment."""
    if not settings.logit_adjustment:
        return
    if not method.adjusts_logits:
        raise BadContent(
            f"logit_adjustment: {settings.method} has no model with the same outputs on all devices; leave it out, or "
            f"choose fedavg, fedprox, fedspu, fjord, hermes, ditto or apfl"
        )
    if manifest.output_bias is None:
        raise BadContent(
            "logit_adjustment: the model's last layer has no trained bias with a value per class; leave it out, or "
            "publish a model that has one"
        )


def why_no_pages(settings: FederationSettings, method: CoordinatorMethod, manifest: Manifest) -> str | None:
    """Return the reason why pages cannot take part in a federation, or None."""
    if settings.secure:
        return "it uses secure aggregation, which needs devices with the SDK"
    if not method.pages:
        can = "pages take part in fedavg, fedper, fedprox, fedspu and local"
        return f"{settings.method} needs devices with the SDK; {can}"
    if settings.method_settings.get("start") == "initial":
        return "devices begin with the initial model, which only the SDK can draw"
    if "step" not in manifest.graphs:
        return "the model was published without a training step, which pages need"
    if manifest.preparation is not None and manifest.preparation.own:
        return "each device standardises by its own statistics, which needs the SDK"
    if len(manifest.output_shape) != 1 or (manifest.targets is not None and manifest.targets.kind == "numbers"):
        return "pages evaluate only models that classify whole samples"
    return None


def why_predictable(settings: FederationSettings) -> str | None:
    """Return a warning if malicious devices could exploit predictable draws against ``robust``, or None."""
    if settings.draws != "seed" or settings.robust is None:
        return None
    return (
        f"draws: with seed every device can compute all draws and choose its name accordingly, so that a round may "
        f"have more malicious devices than {settings.robust} tolerates; outside of simulations set draws to secret"
    )


def why_unbounded(settings: FederationSettings) -> str | None:
    """Return a notice if no setting limits how far one device can move the global model, or None."""
    if settings.robust or clips_relatively(settings):
        return None
    if any((settings.update_clip, settings.update_norm_limit, settings.outlier_mads)):
        return None
    return "no setting limits how far one device can move the global model: unless you trust every device, set " + (
        "update_clip" if settings.secure else "relative_clip, update_clip or robust"
    )
