"""The progress of ``join`` on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from .embedding import DeviceProgress

# Phases between two rounds of the device.
BETWEEN = ("waiting", "paused", "stopped")


class Bar:
    """A progress bar over rounds; one line per round if stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None
        self._round: int | None = None
        self._loss = ""

    def show(self, moment: DeviceProgress) -> None:
        """Show one progress event."""
        if moment.text is not None:
            tqdm.write(moment.text, file=sys.stderr)
        elif self._bar is not None:
            self._move(self._bar, moment)
        elif moment.rounds and not self._quiet:
            if sys.stderr.isatty():
                self._bar = tqdm(total=moment.rounds, initial=moment.round, unit="round", desc=moment.phase, leave=True)
            else:
                self._line(moment)

    def _move(self, bar: tqdm[Any], moment: DeviceProgress) -> None:
        if moment.steps:
            bar.set_description(f"{moment.phase} {moment.step}/{moment.steps}", refresh=False)
            bar.set_postfix(loss=f"{moment.loss:.3f}", refresh=moment.step == moment.steps)
        elif moment.phase in BETWEEN:
            bar.n = max(bar.n, moment.round)
            bar.set_description(moment.phase)

    def _line(self, moment: DeviceProgress) -> None:
        if moment.loss is not None:
            self._loss = f", loss {moment.loss:.3f}"
        if moment.phase in BETWEEN:
            if self._round is not None and moment.round > self._round:
                tqdm.write(f"round {moment.round} of {moment.rounds}{self._loss}", file=sys.stderr)
            self._round = moment.round

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
