"""Checks of a federation's settings: that together they can keep what they promise.

Each setting is checked by itself by ``FederationSettings``; here they are checked with one another, with the method and
with the model, when a federation is created and whenever its settings change.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

from pydantic import ValidationError

from sparrow.command_line.faults import faults
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.secure.groups import choose_sharing, least_cell
from sparrow.protocol.secure.numbers import Scale
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent, NoSuchMethod, UnknownMethod
from ..methods import AS_ASSIGNED, CoordinatorMethod, load_method, why_mean_only, why_not_buffered, why_not_private
from ..rounds.intake import clips_relatively
from ..rounds.privacy import epsilon
from ..sums.robust import ACCIDENT, fewest


def completed(settings: FederationSettings) -> FederationSettings:
    """Return the settings with every one of the method's own, so that devices need not know their defaults.

    Raises BadContent for a method that is not installed, and for settings that are not the method's.
    """
    try:
        settings_type = load_method(settings.method).settings_type
    except UnknownMethod as error:
        raise NoSuchMethod(str(error)) from None
    try:
        own = settings_type.model_validate(settings.method_settings)
    except ValidationError as error:
        known = ", ".join(settings_type.model_fields) or "no settings of its own"
        wrong = "; ".join(f"method_settings.{name}: {text}" for name, text in faults(error, settings_type.model_fields))
        raise BadContent(f"{wrong}; {settings.method} takes {known}") from None
    return settings.model_copy(update={"method_settings": own.model_dump(mode="json")})


def check_settings(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent for settings that together cannot keep what they promise: at creation and at every change."""
    check_secure(method, manifest, settings)
    check_robust(method, settings)
    check_privacy(method, manifest, settings)
    check_buffer(method, settings)
    check_adjustment(method, manifest, settings)


def check_secure(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent for a federation that cannot be secure."""
    if not settings.secure:
        return
    if find_spec("cryptography") is None:
        raise BadContent("secure: cryptography is not installed here: pip install 'sparrow-fl[secure]'")
    reason = method.why_not_secure(settings)
    if reason is not None:
        raise BadContent(f"secure: {settings.method} cannot do with it: {reason}; leave secure out")
    single = {
        "robust": settings.robust,
        "update_norm_limit": settings.update_norm_limit,
        "outlier_mads": settings.outlier_mads,
        "buffer": settings.buffer,
    }
    asked = next((name for name, value in single.items() if value is not None), None)
    if asked is not None:
        waits = "a secure round is of one cohort, whose devices wait for one another"
        why = waits if asked == "buffer" else "it looks at single updates, which nobody sees"
        raise BadContent(f"{asked}: not in a secure federation: {why}; leave {asked} or secure out")
    if settings.over_selection or settings.extensions:
        raise BadContent("secure: over_selection and extensions would bring devices in after the keys; leave them out")
    least = least_cell(settings.secure_colluders)
    if settings.cohort < least or choose_sharing(settings.cohort, settings.secure_colluders, 0.0) is None:
        raise BadContent(
            f"cohort: {settings.cohort} devices do not hide one another from a coordinator and "
            f"{settings.secure_colluders} colluders; at least {least + 1} do"
        )
    if choose_sharing(settings.cohort, settings.secure_colluders, settings.secure_dropouts) is None:
        raise BadContent(
            f"secure_dropouts: of a cohort of {settings.cohort} no shares bear that {settings.secure_dropouts:.0%} "
            f"vanish and {settings.secure_colluders} collude; lower one of them, or raise the cohort"
        )
    if settings.noise_multiplier is not None and settings.update_clip is not None:
        scale = Scale(settings.secure_bits, settings.cohort, settings.secure_range, 1.0)
        rounded = scale.most_rounded(manifest.shared_values)
        if rounded > settings.update_clip / 2:
            raise BadContent(
                f"secure_bits: rounding to {settings.secure_bits} bits can lengthen an update by {rounded:.3g}, which "
                f"is taken off update_clip before it; set secure_bits to 32, or lower secure_range"
            )


def check_robust(method: CoordinatorMethod, settings: FederationSettings) -> None:
    """Raise BadContent for a federation whose rule could not work."""
    rule = settings.robust
    if rule is None:
        return
    reason = why_mean_only(method, settings)
    parts = (method.active or method.masks is not AS_ASSIGNED) and not method.only_means(settings)
    if reason is None and rule == "krum" and parts:
        reason = "its devices train different parts of the model, and krum compares updates of the same"
        raise BadContent(f"robust: {settings.method} cannot do with krum: {reason}; take trimmed_mean or median")
    if reason:
        raise BadContent(f"robust: {settings.method} cannot do with {rule}: {reason}; leave robust out")
    if settings.buffer is not None:
        raise BadContent(
            "buffer: a round takes the updates that come first, and malicious devices can be the quickest, more of it "
            "than robust_share; leave buffer or robust out"
        )
    if settings.cohort_policy != "uniform":
        raise BadContent(
            f"cohort_policy: under {settings.cohort_policy} a device raises its own chance to be drawn, with a budget "
            f"or a name that it chooses, and more of a round than robust_share may be malicious; leave it uniform"
        )
    drawn = math.ceil(settings.cohort * (1 + settings.over_selection) - ACCIDENT)
    updates, least = math.ceil(settings.quorum * settings.cohort - ACCIDENT), fewest(rule, settings.robust_share, drawn)
    if updates < least:
        raise BadContent(
            f"cohort: a round closes with {updates} updates of {drawn} devices, of which {rule} cannot tell who lies; "
            f"it takes {least}: raise cohort or quorum, or lower robust_share"
        )


_AGAINST_PRIVACY = {
    "update_clip": "without a largest norm no noise hides one device's contribution; set update_clip",
    "early_stopping": "when a device stops depends on its data, and decides later draws; set it to off",
    "joules_per_device": "when a device has spent them depends on how many samples it has; leave it out",
    "quorum": "late devices are cut off by the speed of others, which depends on their data; set it to 1",
    "over_selection": "as with a quorum, a late device is cut off by the speed of others; leave it out",
    "min_updates": "whether a round is skipped would tell how many answered; leave it out",
    "buffer": "when a device is done decides in which round it counts, and depends on its data; leave it out",
    "privacy_delta": "at one over the number of devices it would allow to show one of them whole; give far less",
    "robust": "these rules choose by the updates themselves, which the noise on a sum does not hide; leave it out",
    "outlier_mads": "the others' updates decide which are left out, so one device moves more than its own; "
    "leave it out; update_clip bounds everybody",
    "cohort_policy": "the draw would depend on which devices took part, or could afford to; set it to uniform",
}
"""Why a setting would break the promise of ``noise_multiplier``."""


def check_privacy(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent for a federation that would claim more than it keeps."""
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
            f"{buffers}: running statistics would get noise, and variances fall below 0; take a model without batch "
            f"norm, or, with a method that keeps personal models, publish with --running-statistics personal"
        )
    epsilon(settings, 1)


def check_buffer(method: CoordinatorMethod, settings: FederationSettings) -> None:
    """Raise BadContent for a federation whose method cannot take updates of older models."""
    if settings.buffer is None:
        return
    reason = why_not_buffered(method, settings)
    if reason:
        raise BadContent(f"buffer: {settings.method} cannot take in updates of older models: {reason}; leave it out")


def check_adjustment(method: CoordinatorMethod, manifest: Manifest, settings: FederationSettings) -> None:
    """Raise BadContent for class frequencies that are to be added to outputs where method or model have no place."""
    if not settings.logit_adjustment:
        return
    if not method.adjusts_logits:
        raise BadContent(
            f"logit_adjustment: {settings.method} has no one model that outputs alike on all devices; leave it out, or "
            f"choose fedavg, fedprox, fedspu, fjord, hermes, ditto or apfl"
        )
    if manifest.output_bias is None:
        raise BadContent(
            "logit_adjustment: the model's last layer has no trained bias with a value for each class, which it is "
            "added to; leave it out, or publish a model that has one"
        )


def why_no_pages(settings: FederationSettings, method: CoordinatorMethod, manifest: Manifest) -> str | None:
    """Return why no page can take part in a federation of these settings and this model; None where pages can."""
    if settings.secure:
        return "it has secure aggregation, for which a device needs the SDK"
    if not method.pages:
        can = "pages take part in fedavg, fedper, fedprox, fedspu and local"
        return f"{settings.method} runs on devices with the SDK alone; {can}"
    if settings.method_settings.get("start") == "initial":
        return "devices begin with the first model of all, which the SDK alone draws"
    if "step" not in manifest.graphs:
        return "the model was published without a training step, which pages train with"
    if manifest.preparation is not None and manifest.preparation.own:
        return "each device standardises by its own statistics, for which it needs the SDK"
    if len(manifest.output_shape) != 1 or (manifest.targets is not None and manifest.targets.kind == "numbers"):
        return "pages judge classifications of whole samples, and this model answers something else"
    return None


def why_predictable(settings: FederationSettings) -> str | None:
    """Return why malicious devices have an advantage that ``robust`` does not count with, or None."""
    if settings.draws != "seed" or settings.robust is None:
        return None
    return (
        f"draws: seed lets every device compute whom each round draws and what they train, and choose its name by it, "
        f"so that more of a round may be malicious than {settings.robust} bears; outside of simulations leave draws at "
        f"secret"
    )


def why_unbounded(settings: FederationSettings) -> str | None:
    """Return a notice where nothing bounds how far one device's update moves the global model; None elsewhere."""
    if settings.robust or clips_relatively(settings):
        return None
    if any((settings.update_clip, settings.update_norm_limit, settings.outlier_mads)):
        return None
    return "nothing bounds how far one device can move the global model: where you do not trust every device, set " + (
        "update_clip" if settings.secure else "relative_clip, update_clip or robust"
    )
