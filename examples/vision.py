"""Own pictures of any size: three cameras, and a folder for each class. python examples/vision.py"""

import atexit
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SPARROW = [sys.executable, "-m", "sparrow"]
AT = ["--server", "http://127.0.0.1:8765"]
CAMERAS = {"hall": ["ball", "box", "cross"], "yard": ["ball", "box"], "gate": ["box", "cross"]}


def picture(kind, chance):
    """Return a made picture of a thing: of any size and colour, on another ground each time."""
    width, height = (int(side) for side in chance.integers(60, 200, 2))
    image = Image.fromarray(chance.integers(0, 120, (height, width, 3), dtype=np.uint8))
    draw = ImageDraw.Draw(image)
    size = min(width, height) * chance.uniform(0.3, 0.45)
    x = chance.uniform(size, width - size)
    y = chance.uniform(size, height - size)
    colour = tuple(int(value) for value in chance.integers(150, 256, 3))
    if kind == "cross":
        draw.line((x - size, y - size, x + size, y + size), fill=colour, width=8)
        draw.line((x - size, y + size, x + size, y - size), fill=colour, width=8)
    else:
        shape = draw.ellipse if kind == "ball" else draw.rectangle
        shape((x - size, y - size, x + size, y + size), fill=colour)
    return image


if __name__ == "__main__":
    for number, (name, kinds) in enumerate({**CAMERAS, "week": CAMERAS["hall"]}.items()):
        chance = np.random.default_rng(number)
        for kind in kinds:
            (Path(name) / kind).mkdir(parents=True, exist_ok=True)
            for place in range(12 if name == "week" else 60):
                picture(kind, chance).save(Path(name) / kind / f"{place}.png")
    coordinator = subprocess.Popen([*SPARROW, "serve", "--port", "8765"], stdout=subprocess.DEVNULL)
    atexit.register(coordinator.terminate)
    settings = ["--picture-size", "32", "min_devices=3", "rounds=10"]
    subprocess.run([*SPARROW, "publish", "things", *AT, "--data", "hall", *settings], check=True)
    join = [*SPARROW, "join", *AT, "--federation", "things", "--quiet", "--device-name"]
    each = [[*join, name, "--data", name, "--export", f"{name}.onnx"] for name in CAMERAS]
    assert sum(device.wait() for device in [subprocess.Popen(command) for command in each]) == 0
    predicted = json.loads(subprocess.check_output([*SPARROW, "predict", "hall.onnx", "--input", "week", "--json"]))
    named = [best[0]["name"] for best in predicted["classes"]]
    right = [Path(file).parent.name == name for file, name in zip(predicted["files"], named, strict=True)]
    print("hall's model:", *named[:5], f"... right {sum(right) / len(right):.2f}")
