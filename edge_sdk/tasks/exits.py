"""Exit codes of what can go wrong where a command has a task, its data, a budget, and perhaps a coordinator."""

from __future__ import annotations

from edge_sdk.budget.preparation import DoesNotFit
from edge_sdk.exits import EXITS as CALLS
from edge_sdk.methods import BudgetTooSmall, UnknownMethod
from edge_sdk.tasks import UnknownTask
from edge_sdk.tasks.loading import BadOption, DataError, NoData
from sparrow.command_line.command import Exits
from sparrow.command_line.exits import Exit

EXITS: Exits = {
    **CALLS,
    UnknownMethod: Exit.NOT_FOUND,
    UnknownTask: Exit.NOT_FOUND,
    DataError: Exit.FAILED,
    BadOption: Exit.USAGE,
    NoData: Exit.NOT_FOUND,
    DoesNotFit: Exit.CANNOT,
    BudgetTooSmall: Exit.CANNOT,
}
