"""Handlers that a library of ours installs leave no trace."""

from __future__ import annotations

import signal
import threading

from sparrow.command_line.signals import handled


def test_a_handler_acts_and_the_former_one_is_restored():
    seen = []
    with handled({signal.SIGUSR1: lambda number, frame: seen.append("outer")}):
        with handled({signal.SIGUSR1: lambda number, frame: seen.append("inner")}):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_that_python_did_not_install_is_left_as_the_default(monkeypatch):
    real = signal.signal
    monkeypatch.setattr(signal, "signal", lambda number, handler: real(number, handler) and None)
    with handled({signal.SIGUSR1: lambda number, frame: None}):
        assert callable(signal.getsignal(signal.SIGUSR1))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_other_threads_leave_signals_alone():
    with handled({signal.SIGUSR1: signal.SIG_IGN}):
        found = []

        def look():
            with handled({signal.SIGUSR1: signal.SIG_DFL}):
                found.append(signal.getsignal(signal.SIGUSR1))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found == [signal.SIG_IGN]
