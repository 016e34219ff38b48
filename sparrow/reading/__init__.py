"""Readers of raw samples: tables (CSV, TSV, parquet), numpy files (npz, npy), and folders of pictures or sounds.

A value that cannot be read is refused with its line, its column and the option that helps; assumptions are reported.
pyarrow, Pillow, soundfile and soxr are imported only for their formats.
"""

from __future__ import annotations

from .decoded import Decoded, join
from .files import read_file
from .media import take
from .options import ReadOptions, read_options
from .samples import Raw, class_order

__all__ = ["Decoded", "Raw", "ReadOptions", "class_order", "join", "read_file", "read_options", "take"]
