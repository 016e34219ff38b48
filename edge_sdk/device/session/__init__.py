"""One device's conversation with its coordinator.

Each module builds on the one before: ``identity`` holds the place in the federation; ``learning`` model, data, engine;
``judging`` the personal model; ``sending`` the outbox; ``work`` the assignments; ``steps`` the conversation.
"""

from .options import Known as Known
from .options import SessionOptions as SessionOptions
from .sending import MASK as MASK
from .sending import load_mask as load_mask
from .steps import FAILURES as FAILURES
from .steps import FIRST_REST as FIRST_REST
from .steps import LONGEST_REST as LONGEST_REST
from .steps import Outcome as Outcome
from .steps import Session as Session
from .steps import Step as Step
