"""Readers of raw samples from tables (CSV, TSV, parquet), numpy files (npz, npy), and folders of pictures or sounds.

They take what a file says and guess nothing in silence: a value that cannot be read is refused with its line, its
column and the option that helps, and each reading of a doubtful form is said. Neither torch nor pandas is used; pyarrow
is imported for parquet files, Pillow for pictures, soundfile and soxr for sounds.
"""

from __future__ import annotations

from .decoded import Decoded, join
from .files import read_file
from .media import take
from .options import ReadOptions, read_options
from .samples import Raw, class_order

__all__ = ["Decoded", "Raw", "ReadOptions", "class_order", "join", "read_file", "read_options", "take"]
