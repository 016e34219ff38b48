"""Random steps against the predictions of their costs; ``make chaos`` goes on with 19,500 more."""

from __future__ import annotations

import pytest

from ..graph_fuzzing import Row, run


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_of_500_random_steps_none_ends_its_process_or_takes_twice_what_was_predicted():
    rows = list(run(0, 500))
    assert len(rows) == 500
    assert all(isinstance(row, Row) for row in rows), "a signal ended a process"
    assert {row.seed: row.faults for row in rows if row.faults} == {}
    assert sum(not row.error for row in rows) > 400
    assert len({operator for row in rows for operator in row.operators}) > 60
