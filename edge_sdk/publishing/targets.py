"""Labels that a loss leaves out."""

from __future__ import annotations

import sys


def ignored_label(loss: object) -> int | None:
    """Return the label that a loss leaves out, None if it takes all.

    It is the attribute ``ignore_index`` of CrossEntropyLoss, NLLLoss or an object or function of the user's; for
    PyTorch's own functions cross_entropy and nll_loss, their default.
    """
    found = getattr(loss, "ignore_index", None)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    torch = sys.modules.get("torch")
    if torch is not None and loss in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
        return -100
    return None
