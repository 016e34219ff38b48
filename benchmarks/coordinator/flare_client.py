"""The training script of NVIDIA FLARE's clients, by its Client API: it adds a little to every value and trains nothing.

``flare_client MARKS``, run by FLARE in its job's process. The first site writes a line when work of a new round
arrives, as the end of the previous round.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import nvflare.client as flare  # type: ignore[import-not-found]
from nvflare.apis.fl_constant import FLMetaKey  # type: ignore[import-not-found]

EXAMPLES = 100


def main() -> None:
    """Take part until the job ends."""
    flare.init()
    number = int(flare.get_site_name().rpartition("-")[2]) - 1
    step = np.float32(1e-3 * (1 + number))
    while flare.is_running():
        model = flare.receive()
        if model is None:
            return
        if number == 0 and model.current_round > 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(f"{time.time()}\n")
        params = {name: array + step for name, array in model.params.items()}
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: EXAMPLES}
        flare.send(flare.FLModel(params=params, params_type=flare.ParamsType.FULL, meta=meta))


if __name__ == "__main__":
    main()
