"""The ClientApp: it adds a little to every value, by another amount on every SuperNode."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Return one client's part of a round."""
    step = np.float32(1e-3 * (1 + int(context.node_config["partition-id"])))
    arrays = [array + step for array in message.content["arrays"].to_numpy_ndarrays()]
    reply = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 100})}
    return Message(content=RecordDict(reply), reply_to=message)
