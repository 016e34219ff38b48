"""Count the lines of Python of the product at one or more commits: ``python .ci/lines.py [COMMIT ...]``."""

import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("coordinator", "edge_sdk", "export", "devices", "command_line", "sparrow")


def lines_of(commit: str) -> Counter[str]:
    """Return the lines of each folder at a commit. Links below ``sparrow`` are not followed."""
    command = ["git", "archive", commit]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    counted: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            folder = member.name.partition("/")[0]
            if folder in FOLDERS and member.isfile() and member.name.endswith(".py"):
                content = files.extractfile(member)
                counted[folder] += content.read().count(b"\n") if content else 0
    return counted


def main() -> None:
    """Print a row for each folder and a column for each commit."""
    commits = sys.argv[1:] or ["HEAD"]
    counts = [lines_of(commit) for commit in commits]
    print(f"{'':14}" + "".join(f"{commit[:10]:>12}" for commit in commits))
    for folder in FOLDERS:
        print(f"{folder:14}" + "".join(f"{count[folder]:12,}" for count in counts))
    print(f"{'all':14}" + "".join(f"{count.total():12,}" for count in counts))


if __name__ == "__main__":
    main()
