"""The failures that a device reports: the only information about an error that a coordinator gets.

An error's text may contain file names or data, so it stays in the device's log. The device sends a failure from this
list, ``TYPE`` or ``TYPE/CODE``, with different codes for different remedies. Two types take more codes: program-error
any builtin exception (of Python, or of JavaScript on a page), nothing-trained the device's last failure with a hyphen
for the slash. ``coordinator/web/static/failures.js`` has the same list; a test compares them.
"""

from __future__ import annotations

import builtins
import re
from typing import NamedTuple

PATTERN = r"[a-z][a-z-]{0,39}(/[A-Za-z0-9-]{1,40})?"
"""The form of a failure on the wire, also of types and codes from other versions."""


class Explanation(NamedTuple):
    """A failure's cause, as a sentence about the device, and advice or ""."""

    cause: str
    advice: str

    def __str__(self) -> str:
        return "; ".join(filter(None, self))


DIVERGED = (
    "likely causes, in order: the scale of its inputs (its own log has their spread), the learning rate (lower it), a "
    "missing or large clip (set clip=1), and another device whose data are in other units"
)
SAME_VERSION = "use the same version of Sparrow on the coordinator and on the device"

FAILURES = {
    "training-diverged": Explanation("training diverged", DIVERGED),
    "training-diverged/loss": Explanation("training diverged: the loss of a step is not finite", DIVERGED),
    "training-diverged/weights": Explanation("training diverged: a weight is not finite after training", DIVERGED),
    "training-diverged/held-out": Explanation("the loss on its held-out data is not finite", DIVERGED),
    "training-diverged/inputs": Explanation(
        "the inputs of a training step are NaN or infinite", "replace or leave out such samples on the device"
    ),
    "training-diverged/gradients": Explanation(
        "a gradient or score that its method computes is not finite",
        "see whether the global model is sound: go back to an older one, or publish a sound one; otherwise lower the "
        "learning rate",
    ),
    "training-diverged/values": Explanation(
        "a value of its update is not finite or does not fit the precision",
        "lower the learning rate, set a clip, or choose precision=fp32",
    ),
    "unsound-model": Explanation(
        "the model received gives no finite loss on its held-out data, before any training",
        "see whether its data are scaled as the task expects; if they are, go back to an older model, and bound what "
        "one device moves (update_clip)",
    ),
    "bad-payload": Explanation("it received a payload that it cannot use", SAME_VERSION),
    "bad-payload/damaged": Explanation(
        "a download never matched its digest", "look for a proxy that changes content, or for a failing disk or memory"
    ),
    "bad-payload/size": Explanation("a payload was announced that is larger than its model can have", SAME_VERSION),
    "bad-work": Explanation("it was given work that it cannot use", SAME_VERSION),
    "bad-work/manifest": Explanation(
        "the model's description does not fit the model on the device",
        "publish and train the same model; where the device has code of its own, update that code",
    ),
    "bad-work/graph": Explanation(
        "a graph of the model is refused, or is not the published one", "publish the model again with this version"
    ),
    "bad-work/cost": Explanation(
        "a graph of the model takes more time or memory than it has",
        "lower batch_size, or have the author publish a smaller model; its own log names the node",
    ),
    "bad-work/unmasked": Explanation(
        "it was asked for an update without masks, and it sends none (--require-secure)",
        "create the federation with secure=true",
    ),
    "bad-work/terms": Explanation(
        "it was given work outside of the ranges that the publisher of the model has signed, or its owner allows",
        "change the setting back, or have the author publish the model again; its own log names the setting",
    ),
    "bad-work/implausible": Explanation(
        "the gradients of the training step are not those of its loss",
        "ask the author of the model; its own log names the parameters",
    ),
    "unknown-work": Explanation("its method has no work of this kind on the device", SAME_VERSION),
    "unknown-work/settings": Explanation("it cannot read the settings of its method", SAME_VERSION),
    "unknown-work/torch": Explanation("its method needs PyTorch for this work", "start it with --engine torch"),
    "unknown-work/curvature": Explanation(
        "its method differentiates the loss twice, and this model or engine cannot",
        "start it with --engine torch, or choose another method or model",
    ),
    "budget-too-small": Explanation(
        "its budget is too small for the method", "give it a larger one (sparrow join --budget)"
    ),
    "secure-refused": Explanation(
        "it refused a step of a secure round, because the coordinator's messages do not agree",
        "its own log says which; see whether the coordinator was restored from a backup",
    ),
    "secure-refused/state": Explanation(
        "it has no keys of this secure round", "no action if it has lost its state: it takes part in the next round"
    ),
    "secure-refused/demands": Explanation(
        "a secure round is not as it demands (--require-secure, --known-devices)",
        "raise secure_colluders, or change what the device demands; its own log says which",
    ),
    "secure-refused/model": Explanation(
        "the model, settings or plan of a secure round are not those that its devices have signed",
        "see whether the coordinator was restored from a backup, or its settings were changed during the round",
    ),
    "secure-refused/parts": Explanation(
        "it was asked for more than sums of values in a secure round", "choose a method that needs only sums"
    ),
    "secure-refused/keys": Explanation(
        "another device of a secure round has another identity key than in earlier rounds",
        "its own log names it; if that device has lost its state, give it a new name",
    ),
    "secure-refused/weight": Explanation(
        "the weight of its update in a secure round is not its number of samples",
        "start the device again, so that it reports the number",
    ),
    "secure-refused/rounding": Explanation(
        "rounding makes its update longer than update_clip", "create the federation with secure_bits=32"
    ),
    "model-replaced": Explanation(
        "the model has a new version, and the device trains the one before",
        "start it again, with the new code where PyTorch trains",
    ),
    "no-memory": Explanation(
        "there is not enough memory to train",
        "give it a smaller budget (sparrow join --budget) or smaller batches (batch_size)",
    ),
    "no-space": Explanation("its disk is full", "make room on it"),
    "data-unusable": Explanation("its data cannot be used", "its own log says why"),
    "update-refused": Explanation(
        "the coordinator refused its update", "the coordinator's log and the device's own say why"
    ),
    "coordinator-fault": Explanation("the coordinator refused one of its calls", "its own log says which and why"),
    "interrupted": Explanation("it was interrupted", ""),
    "interrupted/user": Explanation("its user has stopped it", "the same command continues"),
    "interrupted/program": Explanation("it was stopped by its program", ""),
    "interrupted/paused": Explanation("its user has paused it", ""),
    "interrupted/hidden": Explanation("its page is not in front", "have its user keep the page open and in front"),
    "interrupted/left": Explanation("its user has left", ""),
    "nothing-trained": Explanation("it has left, because none of its rounds succeeded", "its own log says why"),
    "program-error": Explanation("its program failed", "the traceback in its own output says where"),
    "program-error/other": Explanation("its program failed", "the traceback in its own output says where"),
    "other": Explanation("it failed", "its own log says why"),
}


LAST = {failure.replace("/", "-"): failure for failure in FAILURES}
"""Code of nothing-trained -> its failure."""


class Failure(str):
    """A failure to report. Raises ValueError for text outside this list."""

    def __new__(cls, text: str) -> Failure:
        """Check the text against the list."""
        kind, _, code = text.partition("/")
        exception = kind == "program-error" and is_builtin_exception(code)
        last = kind == "nothing-trained" and code in LAST
        if text not in FAILURES and not exception and not last:
            raise ValueError("a device reports failures of sparrow/protocol/failures.py only; choose one, or add it")
        return super().__new__(cls, text)


def program_error(name: str) -> Failure:
    """Return the failure of an exception in a program, from its class name."""
    return Failure(f"program-error/{name}" if is_builtin_exception(name) else "program-error/other")


def nothing_trained(last: Failure | None) -> Failure:
    """Return the failure of a device that leaves without any success. last: its last failure."""
    code = "" if last is None else last.replace("/", "-")
    return Failure(f"nothing-trained/{code}" if code in LAST else "nothing-trained")


def is_builtin_exception(name: str) -> bool:
    """Return whether a name is one of Python's builtin exceptions."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def explain(reason: str) -> Explanation | None:
    """Return the explanation of a failure, None for another reason. An unknown code gets its type's."""
    if reason in FAILURES:
        return FAILURES[reason]
    kind, _, code = reason.partition("/")
    if kind not in FAILURES or not re.fullmatch(PATTERN, reason):
        return None
    cause, advice = FAILURES[kind]
    if kind == "program-error":
        return Explanation(f"{cause} ({code})", advice)
    if kind == "nothing-trained" and code in LAST:
        last = FAILURES[LAST[code]]
        return Explanation(f"{cause}; the last failure: {last.cause}", last.advice)
    return FAILURES[kind]


def in_words(reason: str) -> str:
    """Return a reason for people: a failure's explanation, or other text unchanged."""
    explanation = explain(reason)
    return reason if explanation is None else str(explanation)
