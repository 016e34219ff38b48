"""Own CSV files: three people's readings, published, trained on and predicted by name. python examples/sensors.py"""

import atexit
import csv
import json
import random
import subprocess
import sys

SPARROW = [sys.executable, "-m", "sparrow"]
AT = ["--server", "http://127.0.0.1:8765"]
COLUMNS = ["temperature", "pressure", "room", "activity"]
USUAL = {"sit": (20, 101100), "walk": (23, 101300), "run": (27, 101550)}
PEOPLE = {"anna": ["sit", "walk", "run"], "ben": ["sit", "walk"], "cleo": ["walk", "run"]}


def rows(kinds, count):
    """Yield readings in degrees and pascals, unscaled, with the room and what the person did."""
    for kind in random.choices(kinds, k=count):
        warm, pressure = (random.gauss(usual, spread) for usual, spread in zip(USUAL[kind], (1, 80), strict=True))
        yield [round(warm, 1), round(pressure), random.choice(["hall", "yard"]), kind]


if __name__ == "__main__":
    random.seed(0)
    week = list(rows(list(USUAL), 40))
    tables = {person: [COLUMNS, *rows(kinds, 120)] for person, kinds in PEOPLE.items()}
    for name, table in {**tables, "week": [COLUMNS[:3], *(row[:3] for row in week)]}.items():
        with open(f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows(table)
    coordinator = subprocess.Popen([*SPARROW, "serve", "--port", "8765"], stdout=subprocess.DEVNULL)
    atexit.register(coordinator.terminate)
    data = ["--data", "anna.csv,label=activity", "min_devices=3", "rounds=20"]
    subprocess.run([*SPARROW, "publish", "activity", *AT, *data], check=True)
    join = [*SPARROW, "join", *AT, "--federation", "activity", "--quiet", "--device-name"]
    each = [[*join, name, "--data", f"{name}.csv", "--export", f"{name}.onnx"] for name in PEOPLE]
    assert sum(device.wait() for device in [subprocess.Popen(command) for command in each]) == 0
    predicted = subprocess.check_output([*SPARROW, "predict", "ben.onnx", "--input", "week.csv", "--json"])
    named = [best[0]["name"] for best in json.loads(predicted)["classes"]]
    right = [name == row[-1] for name, row in zip(named, week, strict=True)]
    print("ben's model:", *named[:5], f"... right {sum(right) / len(right):.2f}")
