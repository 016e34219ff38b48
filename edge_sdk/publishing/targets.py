"""Labels that a loss ignores."""

from __future__ import annotations

import sys


def ignored_label(loss: object) -> int | None:
    """Return the label that a loss ignores, or None.

    This is the attribute ``ignore_index`` of the loss; for PyTorch's functions cross_entropy and nll_loss, their
    default.
    """
    found = getattr(loss, "ignore_index", None)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    torch = sys.modules.get("torch")
    if torch is not None and loss in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
        return -100
    return None
