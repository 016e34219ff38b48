"""docs/troubleshooting.md: each message that it quotes stands in the code, word for word, with values in its gaps."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("benchmarks", "coordinator", "devices", "edge_sdk", "export", "sparrow")
LEAST = 25
"""Messages; those that a user meets first."""
OF_OTHERS = {
    "requires a different Python: 3.8.10 not in '>=3.10'",
    "Address already in use",
    "externally-managed-environment",
    "No space left on device",
    "Illegal instruction",
}
"""Messages of the system and of packages, which no code of ours holds."""


def quoted():
    """The messages in the first column of the tables, each with the line where it stands; ``...`` leaves words out."""
    found = []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("| ") and not line.startswith("| message"):
            first = re.split(r"(?<!\\) \| ", line[2:])[0]
            for text in re.findall(r"`` (.+?) ``|`([^`]+)`", first):
                for part in "".join(text).split("..."):
                    if len(part.strip()) > 3:
                        found.append((number, part.strip()))
    return found


@cache
def templates():
    """Every text of the code, with its characters, None where a value stands. Adjacent texts are one, as in Python."""
    found = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(tuple(re.sub(r"%(?:\.\d)?[sdrfg]|{}", "\0", node.value)))
                elif isinstance(node, ast.JoinedStr):
                    found.add(
                        tuple("".join(each.value if isinstance(each, ast.Constant) else "\0" for each in node.values))
                    )
    return [("".join(text), tuple(None if each == "\0" else each for each in text)) for text in found if len(text) > 3]


def stands_in(message, template):
    """Whether the message is a piece of the text with values in its gaps, two fifths of it or more the text's own."""
    # How many characters of the message are the text's own, at most, by the place in the text reached so far.
    reached = dict.fromkeys(range(len(template) + 1), 0)
    for character in message:
        further: dict[int, int] = {}
        for place, own in reached.items():
            while place < len(template):
                if template[place] is None:
                    further[place] = max(own, further.get(place, 0))  # a value goes on
                    place += 1  # or has ended
                    continue
                if template[place] == character:
                    further[place + 1] = max(own + 1, further.get(place + 1, 0))
                break
        reached = further
    return max(reached.values(), default=0) * 5 >= len(message) * 2


def in_the_code(message):
    words = sorted(re.findall(r"[A-Za-z]{3,}", message), key=len, reverse=True)
    for text, template in templates():
        if any(word in text for word in words[:3]) and stands_in(message, template):
            return True
    return False


def test_texts_with_gaps_are_recognised():
    template = (*"there is no ", None, *"; there are ", None)
    assert stands_in("there is no federation 'x'; there are a, b", template)
    assert stands_in("no federation 'x'; there are", template)
    assert not stands_in("there is not a federation; there are a", tuple("there is no federation"))
    assert not stands_in("anything that a value might be", (None,))


def test_it_has_the_messages_that_a_user_meets():
    assert len({text for _, text in quoted()} - OF_OTHERS) >= LEAST


@pytest.mark.parametrize(("line", "message"), quoted(), ids=lambda given: str(given)[:40])
def test_a_quoted_message_stands_in_the_code(line, message):
    if message not in OF_OTHERS:
        assert in_the_code(message), f"docs/troubleshooting.md:{line}: no code says {message!r}"
