"""One device's communication with its coordinator.

Each module builds on the previous one: ``identity``, ``learning``, ``judging``, ``sending``, ``work``, ``steps``.
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
