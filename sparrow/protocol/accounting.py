"""Rényi accounting of Gaussian mechanisms (Mironov, "Rényi Differential Privacy", CSF 2017, arXiv:1702.07476).

The coordinator accounts for the noise on its sums, a device for the noise on its own updates (docs/privacy.md).
"""

from __future__ import annotations

from functools import lru_cache

from .errors import MissingPart

SENSITIVITY = {"zero_out": 1.0, "replacement": 2.0}
"""Largest difference between neighbouring data sets, in clips: an update is removed, or replaced."""


@lru_cache(maxsize=1024)
def gaussian_epsilon(delta: float, *mechanisms: tuple[float, int]) -> float:
    """Return epsilon at ``delta`` of a sequence of (noise deviation / sensitivity, runs).

    Raises MissingPart if the accountant is not installed.
    """
    check_accountant()
    from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    ran = [SelfComposedDpEvent(GaussianDpEvent(noise), times) for noise, times in mechanisms if times]
    if not ran:
        return 0.0
    accountant = RdpAccountant()
    accountant.compose(ComposedDpEvent(ran))
    return float(accountant.get_epsilon(delta))


def check_accountant() -> None:
    """Raise MissingPart unless the accountant is installed."""
    try:
        # Takes a second, and most devices do not need it.
        import dp_accounting.rdp  # noqa: F401
    except ImportError:
        raise MissingPart(
            "the accountant of differential privacy is not installed: pip install 'sparrow-fl[privacy]'"
        ) from None
