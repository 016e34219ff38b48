"""What tests of the device side share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_thread():
    """Many threads on a busy machine wait for each other, and in small layers there is little to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
