"""Evaluate the global model on an operator's test data with ONNX Runtime, without torch.

The published graph is not trusted and runs in a separate process (``sparrow.limited``).
"""

from __future__ import annotations

import json
import threading

import numpy as np

from sparrow.limited import Crashed, Stopped, TookTooLong, TookTooMuchMemory, run_limited
from sparrow.protocol import checkpoint
from sparrow.protocol.errors import BundleError
from sparrow.protocol.fields import bounded
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.preparation import RAW_TYPES

from ..errors import BadContent, Unavailable

CHUNK = 256
"""Maximum number of samples per run."""
MEMORY = 4 * 2**30
"""Address space of an evaluation, bytes, besides ``COPIES`` of the model and the test file."""
COPIES = 8

_TYPES = {"tensor(float)": "float32", **{f"tensor({kind})": kind for kind in RAW_TYPES}}


def evaluate(
    model: bytes, skeleton: bytes, manifest: Manifest, body: bytes, *, seconds: float, stop: threading.Event
) -> Evaluation:
    """Return the mean cross-entropy and accuracy of an ONNX model on a test file.

    body: a safetensors file of ``inputs`` [N, ...], raw if the model includes its preparation, and classes ``targets``
    [N]. Raises BadContent for an invalid file, a model that does not output class scores, or one that exceeds the
    limits; Unavailable if it was stopped.
    """
    if len(manifest.output_shape) != 1:
        raise BadContent(
            f"the model's output for a sample is {manifest.output_shape}; only classifications can be evaluated here"
        )
    parts = {"model": model, "skeleton": skeleton, "manifest": manifest.text.encode(), "test": body}
    request = checkpoint.save({name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    memory = MEMORY + COPIES * (len(model) + len(body))
    try:
        answered = json.loads(run_limited(__name__, request, seconds=seconds, memory=memory, stop=stop))
    except Stopped:
        raise Unavailable("the coordinator is stopping; retry after its restart") from None
    except TookTooLong:
        raise BadContent(
            f"the evaluation takes longer than {seconds:g} s; send fewer samples, or set COORDINATOR_MAX_TEST_SECONDS"
        ) from None
    except TookTooMuchMemory:
        raise BadContent(
            f"the evaluation takes more than {memory:,} bytes of memory; send fewer samples, or publish a smaller model"
        ) from None
    except Crashed as error:
        raise BadContent(f"the model cannot be run: {error}; publish a working model") from None
    if "refused" in answered:
        raise BadContent(answered["refused"])
    return Evaluation.model_validate(answered)


def answer(request: bytes) -> bytes:
    """Return an ``Evaluation`` as JSON, or the reason of a refusal."""
    from sparrow.graphs.bounds import samples_at_once
    from sparrow.graphs.skeleton import check_skeleton

    parts, _ = checkpoint.load(request)
    manifest = Manifest.model_validate_json(parts["manifest"].tobytes())
    try:
        at_once = samples_at_once(check_skeleton(parts["skeleton"].tobytes(), manifest), CHUNK)
        found = _judge(parts["model"].tobytes(), manifest, parts["test"].tobytes(), at_once)
    except BadContent as error:
        return json.dumps({"refused": str(error)}).encode()
    return found.model_dump_json().encode()


def _judge(model: bytes, manifest: Manifest, body: bytes, at_once: int) -> Evaluation:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Errors only: the warnings are about the runtime's optimiser.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    inputs, targets = _read(body, manifest, np.dtype(_TYPES[taken.type]), tuple(taken.shape[1:]))
    loss = 0.0
    right = 0
    for start in range(0, len(inputs), at_once):
        (scores,) = session.run(None, {taken.name: inputs[start : start + at_once]})
        classes = targets[start : start + at_once]
        loss += _loss(scores, classes)
        right += int((scores.argmax(axis=1) == classes).sum())
    if not np.isfinite(loss):
        raise BadContent("inputs: the model's outputs for them are not finite; scale the inputs as in training")
    return Evaluation(num_examples=len(inputs), loss=bounded(loss / len(inputs)), accuracy=right / len(inputs))


def _loss(answer: Array, classes: Array) -> float:
    """Return the sum of the cross-entropies of the scores ``answer`` [N, C] for ``classes`` [N]."""
    scores = np.asarray(answer, dtype=np.float64)
    # Scores may be infinite.
    with np.errstate(invalid="ignore"):
        highest = scores.max(axis=1)
        total = highest + np.log(np.exp(scores - highest[:, None]).sum(axis=1))
        return float((total - scores[np.arange(len(classes)), classes]).sum())


def _read(body: bytes, manifest: Manifest, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[Array, Array]:
    try:
        tensors, _ = checkpoint.load(body)
        inputs = tensors["inputs"]
        targets = tensors["targets"]
    except BundleError as error:
        raise BadContent(str(error)) from None
    except KeyError as missing:
        raise BadContent(f"the test file lacks {missing}; give inputs and targets, one of each per sample") from None
    if inputs.shape[1:] != shape or inputs.dtype != dtype:
        scaled = ", scaled as in training" if manifest.preparation is None or manifest.preparation.own else ", raw"
        raise BadContent(
            f"inputs: {inputs.dtype} {inputs.shape}; the model takes {dtype} (samples, {', '.join(map(str, shape))})"
            f"{scaled}"
        )
    if dtype.kind == "f" and not np.isfinite(inputs).all():
        raise BadContent("inputs: a value is not finite; leave such samples out")
    classes = manifest.output_shape[0]
    if targets.shape != (len(inputs),) or len(inputs) == 0 or targets.dtype.kind not in "iu":
        raise BadContent(f"targets: {targets.dtype} {targets.shape}; give one integer per input")
    labels = targets.astype(np.intp)
    beyond = labels[(labels < 0) | (labels >= classes)]
    if len(beyond):
        named = ", ".join(map(str, np.unique(beyond)[:5]))
        raise BadContent(f"targets: {len(beyond)} of them are not classes from 0 to {classes - 1}, such as {named}")
    return inputs, labels
