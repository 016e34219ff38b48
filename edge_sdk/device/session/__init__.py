"""One device's conversation with its coordinator.

Each module adds a job to the one before: ``identity`` the place in the federation, ``learning`` model, data and engine,
``judging`` the personal model, ``sending`` the outbox, ``work`` the assignments, ``steps`` the conversation.
"""

from .options import Known, SessionOptions
from .sending import MASK, load_mask
from .steps import FAILURES, FIRST_REST, LONGEST_REST, Outcome, Session, Step

__all__ = [
    "FAILURES",
    "FIRST_REST",
    "LONGEST_REST",
    "MASK",
    "Known",
    "Outcome",
    "Session",
    "SessionOptions",
    "Step",
    "load_mask",
]
