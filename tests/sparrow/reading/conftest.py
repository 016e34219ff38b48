"""Reading what a test has written into its folder, and its refusals."""

import pytest

from sparrow.reading import ReadOptions, read_file
from sparrow.reading.errors import DataError


@pytest.fixture
def read(tmp_path):
    def read(options=None, name="", **more):
        return read_file(tmp_path / name, ReadOptions(**(options or {})), **more)

    return read


@pytest.fixture
def refused(read):
    def refused(*words, error=DataError, **more):
        with pytest.raises(error) as raised:
            read(**more)
        said = str(raised.value)
        assert all(word in said for word in words), said
        assert "\n" not in said
        return said

    return refused
