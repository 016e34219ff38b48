"""client.py http://SERVER:8000 FEDERATION DEVICE.json DATA.npz: softmax regression by FedAvg, on contract.md alone."""

import hashlib
import json
import os
import sys
import time
from urllib import request

import numpy as np

server, federation, device = sys.argv[1:4]
data = np.load(sys.argv[4])
x = data["x"]
y = data["y"]
held_out = np.arange(len(data["y"])) % 5 == 0
# The enrolment token, until the device has its own.
token = os.environ.get("SPARROW_ENROLMENT_TOKEN", "")
compact = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def call(method, path, body=None, media_type="application/json"):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": media_type}
    # Try again after failures that may be temporary.
    while True:
        try:
            answer = request.urlopen(request.Request(f"{server}/v1/{path}", body, headers, method=method), timeout=60)
        except OSError as problem:
            # Either an answer that refuses, or no answer.
            answer = problem
        status = getattr(answer, "status", 503)
        if status in (200, 201, 409, 410):
            # 409: the update is too late. 410: the federation is over.
            return answer.read() if status < 300 else print(answer.read().decode())
        if status not in (204, 408, 429) and status < 500:
            sys.exit(answer.read().decode())
        time.sleep(int(getattr(answer, "headers", {}).get("Retry-After", 5)))


token = json.loads(call("POST", f"federations/{federation}/devices", open(device, "rb").read()))["token"]
while asked := call("GET", f"federations/{federation}/assignment?wait=30"):
    work = json.loads(asked)
    kind = work["kind"]
    settings = work["settings"]
    path = f"assignments/{work['assignment_id']}"
    body = call("GET", f"{path}/payload")
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    values = np.frombuffer(body[end:], "<f4").copy()
    classes = len(values) // (x.shape[1] + 1)
    epochs = settings["local_epochs"]
    # Both are views, so training changes the values.
    weight = values[:-classes].reshape(classes, -1)
    bias = values[-classes:]
    inputs, wanted = (part[held_out != (kind == "train")] for part in (x, np.eye(classes)[y]))
    rate = settings["learning_rate"] * settings["learning_rate_decay"] ** (work["round"] - 1) if kind == "train" else 0
    # One batch per epoch: each device chooses its own batch size.
    for _ in range(epochs):
        scores = inputs @ weight.T + bias
        # Logarithms of probabilities.
        scores -= np.logaddexp.reduce(scores, axis=1, keepdims=True)
        wrong = (np.exp(scores) - wanted) * rate / len(inputs)
        weight -= wrong.T @ inputs
        bias -= wrong.sum(axis=0)
    loss = -(scores * wanted).sum() / len(inputs)
    right = scores.argmax(axis=1) == wanted.argmax(axis=1)
    if kind == "train":
        del header["__metadata__"]["sha256"]
        header["__metadata__"]["report"] = compact({"num_examples": len(inputs), "steps": epochs, "train_loss": loss})
        header["__metadata__"]["sha256"] = hashlib.sha256(compact(header).encode() + values.tobytes()).hexdigest()
        text = compact(header).encode()
        body = len(text).to_bytes(8, "little") + text + values.tobytes()
        call("PUT", f"{path}/update", body, "application/octet-stream")
    else:
        found = {"num_examples": len(inputs), "loss": loss, "accuracy": right.mean()}
        call("PUT", f"{path}/update", compact({"global_model" if kind == "evaluate" else "personal": found}).encode())
