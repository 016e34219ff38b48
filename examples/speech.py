"""Own WAV files: three speakers, a folder for each word, and a file for each time. python examples/speech.py"""

import atexit
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile

SPARROW = [sys.executable, "-m", "sparrow"]
AT = ["--server", "http://127.0.0.1:8765"]
WORDS = {"yes": (300, 900), "no": (900, 300), "stop": (600, 600)}
SPEAKERS = {"anna": (1.6, 44_100), "ben": (1.0, 16_000), "cleo": (1.3, 22_050)}


def said(word, pitch, rate, chance):
    """Return a made word, float32 [samples]: a tone that rises, falls or stays, in another room each time."""
    length = int(rate * chance.uniform(0.5, 0.9))
    path = np.geomspace(*WORDS[word], length) * pitch * chance.uniform(0.9, 1.1)
    tones = sum(np.sin(n * 2 * np.pi * np.cumsum(path) / rate) / n for n in (1, 2, 3))
    loud = np.hanning(length) * chance.uniform(0.05, 0.3)
    return (tones * loud + chance.normal(0, 0.005, length)).astype(np.float32)


def write(folder, pitch, rate, count, chance):
    """Write FOLDER/WORD/NUMBER.wav."""
    for word in WORDS:
        (Path(folder) / word).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            soundfile.write(Path(folder) / word / f"{number}.wav", said(word, pitch, rate, chance), rate)


if __name__ == "__main__":
    for number, (name, (pitch, rate)) in enumerate({**SPEAKERS, "week": SPEAKERS["ben"]}.items()):
        write(name, pitch, rate, 10 if name == "week" else 20, np.random.default_rng(number))
    coordinator = subprocess.Popen([*SPARROW, "serve", "--port", "8765"], stdout=subprocess.DEVNULL)
    atexit.register(coordinator.terminate)
    settings = ["min_devices=3", "rounds=6"]
    subprocess.run([*SPARROW, "publish", "words", *AT, "--data", "anna", *settings], check=True)
    join = [*SPARROW, "join", *AT, "--federation", "words", "--quiet", "--device-name"]
    each = [[*join, name, "--data", name, "--export", f"{name}.onnx"] for name in SPEAKERS]
    assert sum(device.wait() for device in [subprocess.Popen(command) for command in each]) == 0
    predicted = json.loads(subprocess.check_output([*SPARROW, "predict", "ben.onnx", "--input", "week", "--json"]))
    named = [best[0]["name"] for best in predicted["classes"]]
    right = [Path(file).parent.name == name for file, name in zip(predicted["files"], named, strict=True)]
    print("ben's model:", *named[:5], f"... right {sum(right) / len(right):.2f}")
