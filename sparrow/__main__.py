"""``python -m sparrow``, the same as ``sparrow``."""

import sys

from sparrow.main import main

if __name__ == "__main__":
    sys.exit(main())
