"""A process with a deadline and a memory limit: its answer, and each of its ends without one."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest

from sparrow import limited
from sparrow.limited import run_limited

MODULE = """
import json, os, signal, sys, time

def answer(request):
    asked = json.loads(request)
    if asked["do"] == "echo":
        print("a line that a library prints")
        os.write(1, b"and one of its C code")
        return request
    if asked["do"] == "environment":
        return json.dumps(dict(os.environ)).encode()
    if asked["do"] == "sleep":
        time.sleep(3600)
    if asked["do"] == "allocate":
        return str(len(bytearray(asked["bytes"]))).encode()
    if asked["do"] == "signal":
        os.kill(os.getpid(), asked["signal"])
    if asked["do"] == "raise":
        raise ValueError("these are no good words")
    if asked["do"] == "exit":
        sys.exit(3)
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks a module of this test's, in a process of its own."""
    (tmp_path / "asked_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def run(do, seconds=60.0, memory=None, stop=None, **more):
        request = json.dumps({"do": do, **more}).encode()
        return run_limited("asked_module", request, seconds=seconds, memory=memory, stop=stop)

    return run


def test_the_answer_is_the_functions_whatever_it_prints(ask):
    assert ask("echo", words="ä" * 300_000).count(b"\\u00e4") == 300_000, "more than a pipe holds"


def test_the_environment_has_no_secrets(ask, monkeypatch):
    secrets = ("SPARROW_ADMIN_TOKEN", "COORDINATOR_DATABASE_URL", "AWS_SECRET_ACCESS_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "a-secret")
    assert b"a-secret" not in ask("environment")


def test_one_that_takes_too_long_is_ended_at_its_deadline(ask):
    with pytest.raises(limited.TookTooLong, match=r"longer than 0\.3 s"):
        ask("sleep", seconds=0.3)


def test_one_that_is_stopped_ends(ask):
    stop = threading.Event()
    stop.set()
    with pytest.raises(limited.Stopped):
        ask("sleep", stop=stop)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_one_that_takes_too_much_memory_is_ended(ask):
    assert ask("allocate", memory=2**28, bytes=2**27) == str(2**27).encode()
    with pytest.raises(limited.TookTooMuchMemory, match="more than 268,435,456 bytes"):
        ask("allocate", memory=2**28, bytes=2**29)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE, signal.SIGKILL])
def test_a_signal_that_ends_it_is_named(ask, number):
    with pytest.raises(limited.Crashed, match=rf"by the signal {number:d} \({number.name}\)") as crashed:
        ask("signal", signal=int(number))
    assert crashed.value.code == -number


@pytest.mark.parametrize(
    ("do", "code", "words"), [("raise", 1, "these are no good words"), ("exit", 3, "the exit code 3")]
)
def test_an_end_without_an_answer_is_said_in_words(ask, do, code, words):
    with pytest.raises(limited.Crashed, match=words) as crashed:
        ask(do)
    assert crashed.value.code == code


def test_a_module_that_is_missing_is_said_in_words():
    with pytest.raises(limited.Crashed, match="No module named 'no_such_module'"):
        run_limited("no_such_module", b"", seconds=60)
