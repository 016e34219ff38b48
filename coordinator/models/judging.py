"""Evaluation of the global model on an operator's test data, by ONNX Runtime, without torch."""

from __future__ import annotations

import numpy as np

from edge_sdk.protocol import checkpoint
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import Array, Manifest
from edge_sdk.protocol.messages import Evaluation, bounded
from edge_sdk.protocol.preparation import RAW_TYPES
from sparrow.coordinator.errors import BadContent

CHUNK = 256
"""Most samples run at a time."""

_TYPES = {"tensor(float)": "float32", **{f"tensor({kind})": kind for kind in RAW_TYPES}}


def judge(model: bytes, manifest: Manifest, body: bytes, at_once: int) -> Evaluation:
    """Return the mean cross-entropy and accuracy of an ONNX ``model`` on a test file, ``at_once`` samples at a time.

    body: a safetensors file of ``inputs`` [N, ...] as the model takes them, raw samples if it has its preparation in
    front, and ``targets`` [N], classes. Raises BadContent if it is not that, and for a model whose outputs are no
    scores of classes.
    """
    if len(manifest.output_shape) != 1:
        raise BadContent(f"the model answers {manifest.output_shape} for a sample; only classes can be judged here")
    import onnxruntime  # 40 MB and a fifth of a second, which a coordinator that judges nothing does without

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: its warnings are about its own optimiser
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    inputs, targets = _read(body, manifest, np.dtype(_TYPES[taken.type]), tuple(taken.shape[1:]))
    loss, right = 0.0, 0
    for start in range(0, len(inputs), at_once):
        (answer,) = session.run(None, {taken.name: inputs[start : start + at_once]})
        scores, classes = np.asarray(answer, dtype=np.float64), targets[start : start + at_once]
        with np.errstate(invalid="ignore"):  # of infinite scores
            highest = scores.max(axis=1)
            total = highest + np.log(np.exp(scores - highest[:, None]).sum(axis=1))
            loss += float((total - scores[np.arange(len(classes)), classes]).sum())
        right += int((scores.argmax(axis=1) == classes).sum())
    if not np.isfinite(loss):
        raise BadContent("inputs: what the model answers to them is not finite; scale them as in training")
    return Evaluation(num_examples=len(inputs), loss=bounded(loss / len(inputs)), accuracy=right / len(inputs))


def _read(body: bytes, manifest: Manifest, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[Array, Array]:
    try:
        tensors, _ = checkpoint.load(body)
        inputs, targets = tensors["inputs"], tensors["targets"]
    except BundleError as error:
        raise BadContent(str(error)) from None
    except KeyError as missing:
        raise BadContent(f"the test file lacks {missing}; it holds inputs and targets, one of each a sample") from None
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
        raise BadContent(f"targets: {targets.dtype} {targets.shape}; give one whole number for each of the inputs")
    labels = targets.astype(np.intp)
    beyond = labels[(labels < 0) | (labels >= classes)]
    if len(beyond):
        named = ", ".join(map(str, np.unique(beyond)[:5]))
        raise BadContent(f"targets: {len(beyond)} of them are no class from 0 to {classes - 1}, such as {named}")
    return inputs, labels
