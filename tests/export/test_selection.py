"""The knapsack as a graph, against the one that chooses blocks while training."""

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
from onnx import TensorProto

from sparrow.export.selection import decisions, exact, greedy
from sparrow.graphs.building import Building
from sparrow.protocol.blocks import knapsack


def choose(costs, values, capacity, rule, opset=17):
    """bool [N, n] by a graph of the oldest operators that are admitted."""
    to = Building("s/")
    if rule == "exact":
        taken = exact(to, "values", decisions(costs, capacity), costs)
    else:
        taken = greedy(to, "values", costs, capacity)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [*to.nodes, onnx.helper.make_node("Identity", [taken], ["taken"])],
        "choice",
        [info("values", TensorProto.DOUBLE, ["N", len(costs)])],
        [info("taken", TensorProto.FLOAT, ["N", len(costs)])],
        to.initializers,
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {"values": values})[0] > 0


def problem(seed):
    chance = np.random.default_rng(seed)
    count = int(chance.integers(2, 60))
    costs = chance.choice(chance.integers(0, 300, size=8), size=count).astype(np.int64)
    costs[0] += 1
    capacity = int(chance.integers(0, costs.sum()))
    values = chance.random((100, count)) - (0.3 if seed % 2 else 0)
    values[:10] = values[:10].round(1)  # ties
    return costs, values - 1e-9 * np.arange(count), capacity


@pytest.mark.parametrize("rule", ["exact", "greedy"])
@pytest.mark.parametrize("seed", range(12))
def test_it_takes_what_the_knapsack_takes(seed, rule):
    costs, values, capacity = problem(seed)
    wanted, found = knapsack(costs, values, capacity, rule), choose(costs, values, capacity, rule)
    np.testing.assert_array_equal(found[10:], wanted[10:])
    assert (found @ costs <= capacity).all()
    if rule == "exact":  # among choices that are equally good, rounding of their sums decides
        np.testing.assert_allclose((found * values).sum(axis=1), (wanted * values).sum(axis=1), rtol=0, atol=1e-9)
    else:
        np.testing.assert_array_equal(found, wanted)


def test_the_guard_rule_is_worth_at_least_half():
    for seed in range(12):
        costs, values, capacity = problem(2 * seed)
        best, some = ((knapsack(costs, values, capacity, rule) * values).sum(axis=1) for rule in ("exact", "greedy"))
        assert (some >= best / 2 - 1e-12).all()
        assert (some <= best + 1e-9).all()


def test_what_has_too_many_sums_is_not_for_a_file():
    costs = np.random.default_rng(0).integers(10**6, 2 * 10**6, size=30)
    assert decisions(costs, int(costs.sum()) // 2) is None
    assert decisions(costs, int(costs[:3].sum())) is not None
