"""Check that a task's data, model and loss work together.

The first batch of each loader passes through model and loss; errors name the loader. Model, running statistics and
random numbers are restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Manifest
from sparrow.reading.errors import VALUES, DataError

from ..errors import BadArgument
from ..publishing.modes import begin_training, buffers_kept, evaluating
from ..tasks import Task
from ..tasks.intake import Fitted, Taken, random_state_kept, suited, unwrapped
from .local import as_tensor, device_of
from .supported import check_model

SAMPLES = 16
"""Number of samples of a batch that pass through model and loss."""
LOOKED_AT = 2**24
"""Largest number of input values for a check of all samples."""
LIKE_A_SUM = 0.05
"""A loss is a sum if it doubles with its batch, within this tolerance."""
NOT_NOTHING = 1e-6
NAMED_LABELS = 5
PAIR = "(inputs, targets), two arrays or tensors"


def check_task(task: Task, manifest: Manifest | None = None) -> None:
    """Raise BadArgument if the data, model and loss of ``task`` do not work together."""
    if not isinstance(task.model, nn.Module):
        raise BadArgument(f"the task's model is a {type(task.model).__name__}; give a torch.nn.Module")
    if not callable(task.loss):
        raise BadArgument(f"the task's loss is a {type(task.loss).__name__}; give a function of (outputs, targets)")
    check_model(task.model)
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise BadArgument(
            "the task's model has no parameter to train: all are frozen, or it has none; give it layers with "
            "weights, and set requires_grad=True for those that should train"
        )
    with _unnoticed(task):
        for name, loader in (("train", task.train), ("validation", task.validation), ("test", task.test)):
            if loader is not None or name != "test":
                _Check(task, name, loader, manifest).run()


@contextmanager
def _unnoticed(task: Task) -> Iterator[None]:
    """Restore random numbers, running statistics and modules' modes on exit."""
    device = device_of(task.model)
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(task.train, task.validation, task.test))
        stack.enter_context(torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]))
        stack.enter_context(evaluating(task.model))
        stack.enter_context(buffers_kept(task.model))
        if isinstance(task.loss, nn.Module):
            stack.enter_context(buffers_kept(task.loss))
        stack.enter_context(torch.enable_grad())
        yield


def suited_to_model(task: Task) -> Task:
    """Return the task with inputs as float32 if the model does not accept integers."""
    with _unnoticed(task), torch.no_grad():
        try:
            inputs = as_tensor(next(iter(task.train))[0])[:2].to(device_of(task.model))
            if inputs.is_floating_point() or _runs(task.model, inputs) or not _runs(task.model, inputs.float()):
                return task
        # ``check_task`` reports the cause.
        except Exception:
            return task
    return suited(task, Taken(np.dtype(np.float32)))


def _runs(model: nn.Module, inputs: Tensor) -> bool:
    try:
        model(inputs)
    except (RuntimeError, TypeError, IndexError):
        return False
    return True


class _Check:
    """The check of one loader."""

    def __init__(self, task: Task, name: str, loader: Any, manifest: Manifest | None) -> None:
        self.task = task
        self.name = name
        self.loader = loader
        self.manifest = manifest

    def run(self) -> None:
        """Raise BadArgument, naming the loader, the fault and the remedy."""
        inputs, targets = self._first()
        self._check_inputs(inputs)
        every_inputs, every_target = _everything(self.loader) or (inputs, targets)
        for what, values in (("input", every_inputs), ("target", every_target)):
            if not _finite(values):
                text = f"a value of the {what}s is NaN or infinite; replace or leave out such samples"
                raise self._wrong(text, VALUES)
        inputs, targets = (tensor[:SAMPLES].to(device_of(self.task.model)) for tensor in (inputs, targets))
        outputs = self._outputs(inputs)
        self._check_outputs(outputs, inputs)
        if self.task.classification:
            self._check_labels(every_target, outputs, targets)
        self._check_loss(outputs, targets)
        self._check_metrics(outputs, targets)
        if self.name == "train":
            self._check_training(inputs, targets)

    def _wrong(self, text: str, failure: Failure = DataError.failure) -> BadArgument:
        return BadArgument(f"the task's {self.name} data: {text}", failure=failure)

    # --- the loader ----------------------------------------------------------------------------------------------

    def _first(self) -> tuple[Tensor, Tensor]:
        loader = self.loader
        own = unwrapped(loader)
        kind = f"a {type(own).__name__}"
        if isinstance(own, DataLoader):
            kind += f" over a {type(own.dataset).__name__}"
        if not hasattr(loader, "__iter__"):
            raise self._wrong(f"{kind} cannot be iterated over; give a DataLoader, or a list of {PAIR}")
        try:
            length = len(loader)
        except TypeError:
            raise self._wrong(
                f"{kind} has no length; give a DataLoader over a data set that has a __len__ and can be read repeatedly"
            ) from None
        try:
            batch = next(iter(loader), None)
        except Exception as error:
            raise self._wrong(f"its first batch cannot be read: {_said(error)}") from error
        if batch is None or not length:
            dropped = "; drop_last=True drops the only batch" if getattr(loader, "drop_last", False) else ""
            raise self._wrong(f"there is no batch in it; give it at least one sample{dropped}")
        if isinstance(batch, dict):
            keys = ", ".join(map(repr, batch))
            raise self._wrong(
                f"its batches are dictionaries of {keys}; give {PAIR}: make the data set's __getitem__ return "
                f"(sample[...], sample[...]), or give the DataLoader a collate_fn that does"
            )
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            of = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
            raise self._wrong(f"its batches are a {type(batch).__name__}{of}; give {PAIR}")
        for what, value in zip(("inputs", "targets"), batch, strict=True):
            if not isinstance(value, Tensor) and not hasattr(value, "__array__"):
                raise self._wrong(
                    f"the {what} of a batch must be an array or tensor, not a {type(value).__name__}; each batch must "
                    "be a pair (inputs, targets) whose first axis is the batch"
                )
        inputs, targets = map(as_tensor, batch)
        if not inputs.dim() or not targets.dim() or len(inputs) != len(targets) or not len(inputs):
            raise self._wrong(
                f"a batch has inputs {_shape(inputs)} and targets {_shape(targets)}; provide as many targets as inputs"
            )
        return inputs, targets

    def _check_inputs(self, inputs: Tensor) -> None:
        if self.manifest is not None and tuple(inputs.shape[1:]) != tuple(self.manifest.input_shape):
            raise self._wrong(
                f"a sample has shape {list(inputs.shape[1:])}, but the federation's model was published for "
                f"{list(self.manifest.input_shape)}; convert the samples to that shape, or join another federation"
            )

    # --- the model -----------------------------------------------------------------------------------------------

    def _outputs(self, inputs: Tensor) -> Any:
        try:
            return self.task.model(inputs)
        except Exception as error:
            said = _said(error)
            weights = next(self.task.model.parameters()).dtype
            advice = "make model and data fit each other"
            if any(word in said for word in ("dtype", "type", "scalar")) and inputs.dtype != weights:
                advice = f"the weights are {_type(weights)}: give inputs.float(), or .long() for indices"
            elif "more than 1 value per channel" in said:
                advice = "batch norm cannot train on one sample, which the last batch may be: give drop_last=True"
            raise self._wrong(f"the model fails on inputs {_shape(inputs)}: {said}; {advice}") from error

    def _check_outputs(self, outputs: Any, inputs: Tensor) -> None:
        wanted = "its scores [batch, classes]" if self.task.classification else "its outputs, batch first"
        if not isinstance(outputs, Tensor):
            raise self._wrong(f"the model returns a {type(outputs).__name__}; make forward return one tensor, {wanted}")
        if self.task.classification and (outputs.dim() != 2 or outputs.shape[1] < 2):
            raise self._wrong(
                f"for inputs {_shape(inputs)} the model returns {_shape(outputs)}; a classification needs scores "
                f"[batch, classes]: give the model one output per class, and torch.nn.CrossEntropyLoss, or set "
                f"Task(..., classification=False)"
            )
        if not outputs.dim() or len(outputs) != len(inputs):
            raise self._wrong(
                f"for inputs {_shape(inputs)} the model returns {_shape(outputs)}; make it return one row per sample"
            )

    def _check_labels(self, every: Tensor, outputs: Tensor, targets: Tensor) -> None:
        classes = outputs.shape[1]
        if every.dim() == 2 and every.shape[1] == classes and classes > 1:
            raise self._wrong(
                f"targets are rows of {classes} (one-hot?); give class indices instead: targets.argmax(1), or "
                f"Task(..., classification=False)"
            )
        integers = not every.is_floating_point() and not every.is_complex() and every.dtype != torch.bool
        if every.dim() != 1 or not integers:
            raise self._wrong(
                f"targets are {_shape(targets, len(every))}; a classification needs class indices, integers [batch] "
                f"from 0 to {classes - 1}: convert them (.long(), .squeeze(1)), or set Task(..., classification=False)"
            )
        ignored = getattr(self.task.loss, "ignore_index", None)
        outside = [each for each in torch.unique(every[(every < 0) | (every >= classes)]).tolist() if each != ignored]
        if outside:
            named = ", ".join(map(str, outside[:NAMED_LABELS])) + (", ..." if len(outside) > NAMED_LABELS else "")
            advice = "give the model an output for each class"
            if outside == [classes] and int(every.min()) == 1:
                advice = "the labels count from 1: subtract 1"
            elif outside[0] < 0:
                advice = "remove samples without a class"
            raise self._wrong(
                f"label{'s' * (len(outside) > 1)} {named} lie{'s' * (len(outside) == 1)} outside 0 to {classes - 1}, "
                f"because the model has {classes} outputs; {advice}"
            )

    def _check_metrics(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that the metrics can be computed."""
        for name, metric in self.task.measured.items() if self.name != "train" else ():
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    float(metric(outputs.detach().float().cpu().numpy(), targets.cpu().numpy()))
            except Exception as error:
                raise self._wrong(
                    f"the metric {name!r} fails on outputs {_shape(outputs)} and targets {_shape(targets)}: "
                    f"{_said(error)}; make it take arrays of both, and return one number"
                ) from error

    # --- the loss ------------------------------------------------------------------------------------------------

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            with warnings.catch_warnings():
                # A broadcast target is a silent error.
                warnings.filterwarnings("error", message="Using a target size")
                loss = self.task.loss(outputs, targets)
        except Exception as error:
            said = _said(error)
            advice = "make them fit each other"
            if "scalar type" in said or "dtype" in said or "not implemented for" in said:
                advice = "convert the targets: .long() for class indices, .float() for numbers"
            raise self._wrong(
                f"the loss fails on outputs {_shape(outputs)} and targets {_shape(targets)}: {said}; {advice}"
            ) from error
        if not isinstance(loss, Tensor):
            raise self._wrong(f"the loss returns a {type(loss).__name__}; make it return a tensor, without .item()")
        if loss.numel() != 1:
            raise self._wrong(
                f"the loss returns {_shape(loss)}; give the mean over the batch, one number (reduction='mean')"
            )
        return loss

    def _check_loss(self, outputs: Tensor, targets: Tensor) -> None:
        outputs = outputs.detach()
        once = self._loss(outputs, targets).item()
        if not np.isfinite(once):
            raise self._wrong(
                f"the loss of its first batch is {once} before any training; check the model's outputs and the targets"
            )
        twice = self._loss(torch.cat([outputs, outputs]), torch.cat([targets, targets])).item()
        if abs(twice - once) > NOT_NOTHING and abs(twice - 2 * once) < LIKE_A_SUM * abs(twice):
            raise self._wrong(
                f"the loss doubles with the batch ({once:.4g} for {len(targets)} samples, {twice:.4g} for the same "
                f"twice): it is a sum; give the mean over the batch (reduction='mean')"
            )

    def _check_training(self, inputs: Tensor, targets: Tensor) -> None:
        """Check that a step in training mode has a gradient."""
        begin_training(self.task.model)
        loss = self._loss(self._outputs(inputs), targets)
        trainable = [parameter for parameter in self.task.model.parameters() if parameter.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            try:
                gradients = torch.autograd.grad(loss.sum(), trainable, allow_unused=True)
            except Exception as error:
                raise self._wrong(f"the loss has no gradient: {_said(error)}") from error
        known = [gradient for gradient in gradients if gradient is not None]
        if not known:
            raise self._wrong(
                "the loss has no gradient with respect to any of the model's parameters; compute it from the outputs "
                "with torch, without .detach(), .item(), .argmax() or numpy"
            )
        if not all(_finite(gradient) for gradient in known):
            raise self._wrong("a gradient of its first batch is NaN or infinite; look for a log, root or division by 0")
        left = _last_batch(self.loader)
        if left == 1 and len(inputs) > 1:
            self._outputs(inputs[:1])


def _everything(loader: Any) -> tuple[Tensor, Tensor] | None:
    """Return all samples if they are two tensors of moderate size."""
    given = loader
    loader = unwrapped(loader)
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    data: Any = loader.dataset
    chosen: Tensor | None = None
    while isinstance(data, Subset):
        indices = torch.as_tensor(data.indices)
        chosen = indices if chosen is None else indices[chosen]
        data = data.dataset
    if not isinstance(data, TensorDataset) or len(data.tensors) != 2 or data.tensors[0].numel() > LOOKED_AT:
        return None
    inputs, targets = data.tensors
    found = (inputs, targets) if chosen is None else (inputs[chosen], targets[chosen])
    if not isinstance(given, Fitted):
        return found
    converted = given.converted(found)
    return None if converted is None else (as_tensor(converted[0]), as_tensor(converted[1]))


def _last_batch(loader: Any) -> int | None:
    loader = unwrapped(loader)
    size = getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or size is None or loader.drop_last:
        return None
    try:
        return int((len(loader.sampler) - 1) % size + 1)  # type: ignore[arg-type]
    except TypeError:
        return None


def _finite(values: Tensor) -> bool:
    if not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return True
    return bool(torch.isfinite(values).all())


def _shape(values: Tensor, rows: int | None = None) -> str:
    shape = list(values.shape) if rows is None else [rows, *values.shape[1:]]
    return f"{shape} {_type(values.dtype)}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0].strip().rstrip(".;")[:300]
    return f"{first} ({type(error).__name__})" if first else type(error).__name__
