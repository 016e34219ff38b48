"""The failures that a device can report to a coordinator instead of error messages.

An error's text may contain file names or data, so it stays in the device's log. The device sends a failure from this
list, ``TYPE`` or ``TYPE/CODE``. Two types take more codes: program-error any builtin exception (of Python, or of
JavaScript on a page), nothing-trained the device's last failure with a hyphen for the slash.
``coordinator/web/static/failures.js`` has the same list; a test compares them.
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
    "missing or large clip (set clip=1), and other units in the data of another device"
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
        "check whether the global model gives a finite loss: if not, roll back or publish the model again; if it does, "
        "lower the learning rate",
    ),
    "training-diverged/values": Explanation(
        "a value of its update is not finite or does not fit the precision",
        "lower the learning rate, set a clip, or choose precision=fp32",
    ),
    "unsound-model": Explanation(
        "before any training, the model received has no finite loss on its held-out data",
        "check that its data are scaled as the task expects; if they are, roll back to an older model and bound the "
        "updates (update_clip)",
    ),
    "bad-payload": Explanation("it received a payload that it cannot use", SAME_VERSION),
    "bad-payload/damaged": Explanation(
        "a download never matched its digest", "look for a proxy that changes content, or for a failing disk or memory"
    ),
    "bad-payload/size": Explanation("the announced payload is larger than any payload of its model", SAME_VERSION),
    "bad-work": Explanation("it received work that it cannot use", SAME_VERSION),
    "bad-work/manifest": Explanation(
        "the model's description does not fit the model on the device",
        "publish and train the same model; if the device has its own model code, update it",
    ),
    "bad-work/graph": Explanation(
        "a graph of the model is refused, or is not the published one", "publish the model again with this version"
    ),
    "bad-work/cost": Explanation(
        "a graph of the model needs more time or memory than the device has",
        "lower batch_size, or have the author publish a smaller model; its own log names the node",
    ),
    "bad-work/unmasked": Explanation(
        "it was asked for an unmasked update and sends only masked ones (--require-secure)",
        "create the federation with secure=true",
    ),
    "bad-work/terms": Explanation(
        "its work is outside the ranges that the publisher of the model signed or its owner allows",
        "change the setting back, or have the author publish the model again; its own log names the setting",
    ),
    "bad-work/implausible": Explanation(
        "the gradients of the training step do not match its loss",
        "ask the author of the model; its own log names the parameters",
    ),
    "unknown-work": Explanation("its method has no such work on the device", SAME_VERSION),
    "unknown-work/settings": Explanation("it cannot read the settings of its method", SAME_VERSION),
    "unknown-work/torch": Explanation("its method needs PyTorch for this work", "start it with --engine torch"),
    "unknown-work/curvature": Explanation(
        "its method needs second derivatives, which this model or engine does not support",
        "start it with --engine torch, or choose another method or model",
    ),
    "budget-too-small": Explanation(
        "its budget is too small for the method", "give it a larger one (sparrow join --budget)"
    ),
    "secure-refused": Explanation(
        "it refused a step of a secure round, because the coordinator's messages contradict each other",
        "read its log; check whether the coordinator was restored from a backup",
    ),
    "secure-refused/state": Explanation(
        "it has no keys for this secure round", "do nothing if it lost its state: it takes part in the next round"
    ),
    "secure-refused/demands": Explanation(
        "a secure round does not meet its demands (--require-secure, --known-devices)",
        "raise secure_colluders or change the device's demands; its log names them",
    ),
    "secure-refused/model": Explanation(
        "the model, settings or plan of a secure round differ from those that its devices signed",
        "check whether the coordinator was restored from a backup or its settings were changed during the round",
    ),
    "secure-refused/parts": Explanation(
        "a secure round asked it for more than sums of values", "choose a method that needs only sums"
    ),
    "secure-refused/keys": Explanation(
        "another device of a secure round has a different identity key than in earlier rounds",
        "read the name in its log; if that device lost its state, give it a new name",
    ),
    "secure-refused/weight": Explanation(
        "the weight of its update in a secure round is not its number of samples",
        "restart the device, so that it reports the number",
    ),
    "secure-refused/rounding": Explanation(
        "rounding makes its update longer than update_clip", "create the federation with secure_bits=32"
    ),
    "model-replaced": Explanation(
        "the model has a new version, but the device trains the previous one",
        "restart it; if it trains with PyTorch, update its model code first",
    ),
    "no-memory": Explanation(
        "there is not enough memory to train",
        "give it a smaller budget (sparrow join --budget) or smaller batches (batch_size)",
    ),
    "no-space": Explanation("its disk is full", "free some space on it"),
    "data-unusable": Explanation("its data cannot be used", "read the reason in its log"),
    "data-unusable/values": Explanation(
        "its data have values that are NaN or infinite", "replace or leave out such samples on the device"
    ),
    "state-copied": Explanation(
        "its state folder was copied or restored from a backup, and more than one copy has started",
        "start the copy to keep with --take-over, and give each other one its own --device-name and --state-dir",
    ),
    "cannot-train": Explanation(
        "a package that it needs to train is missing or does not load", "read the name of the package in its log"
    ),
    "update-refused": Explanation("the coordinator refused its update", "read the reason in its log"),
    "coordinator-fault": Explanation(
        "the coordinator refused one of its calls", "read the call and the reason in its log"
    ),
    "interrupted": Explanation("it was interrupted", ""),
    "interrupted/user": Explanation("its user stopped it", "run the same command to continue"),
    "interrupted/program": Explanation("it was stopped by its program", ""),
    "interrupted/paused": Explanation("its user paused it", ""),
    "interrupted/hidden": Explanation(
        "its page is in the background", "ask its user to keep the page in the foreground"
    ),
    "interrupted/left": Explanation("its user left the federation", ""),
    "nothing-trained": Explanation("it left because none of its rounds succeeded", "read the reason in its log"),
    "program-error": Explanation("its program failed", "read the traceback in its output"),
    "program-error/other": Explanation("its program failed", "read the traceback in its output"),
    "other": Explanation("it failed", "read the reason in its log"),
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
            raise ValueError(
                "a device reports only failures of sparrow/protocol/failures.py; choose one, or add it there"
            )
        return super().__new__(cls, text)


def program_error(name: str) -> Failure:
    """Return the failure of an exception in a program, from its class name."""
    return Failure(f"program-error/{name}" if is_builtin_exception(name) else "program-error/other")


def nothing_trained(last: Failure | None) -> Failure:
    """Return the failure of a device that leaves without a successful round. last: its last failure."""
    code = "" if last is None else last.replace("/", "-")
    return Failure(f"nothing-trained/{code}" if code in LAST else "nothing-trained")


def is_builtin_exception(name: str) -> bool:
    """Return whether a name is one of Python's builtin exceptions."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def explain(reason: str) -> Explanation | None:
    """Return the explanation of a failure; None if the text is not a failure. An unknown code gets the explanation of
    its type.
    """
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
    """Return a readable reason: the explanation of a failure, or other text unchanged."""
    explanation = explain(reason)
    return reason if explanation is None else str(explanation)
