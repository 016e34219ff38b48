"""The operator of NVIDIA FLARE: ``flare_job KIT FOLDER CLIENTS ROUNDS VALUES MARKS``, in FLARE's environment.

It waits for all clients, submits FLARE's FedAvg of an array of VALUES zeros, and watches the job. If the job fails, it
exits with 1 and the job's record.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe  # type: ignore[import-not-found]
from nvflare.fuel.flare_api.flare_api import new_secure_session  # type: ignore[import-not-found]

START_SECONDS = 120.0
LOGIN_SECONDS = 60.0
LOOK_SECONDS = 2.0


def main(kit: str, folder: str, clients: int, rounds: int, values: int, marks: str) -> int:
    """Submit one job and return when it has ended."""
    session = new_secure_session(Path(kit).name, kit, timeout=LOGIN_SECONDS)
    end = time.monotonic() + START_SECONDS
    while (connected := len(session.get_connected_client_list())) < clients:
        if time.monotonic() > end:
            print(f"{connected} of {clients} clients have connected in {START_SECONDS:g} s")
            return 1
        time.sleep(0.5)
    start = Path(folder, "start.npy")
    np.save(start, np.zeros(values, np.float32))
    recipe = NumpyFedAvgRecipe(
        name="contest",
        initial_ckpt=str(start),
        min_clients=clients,
        num_rounds=rounds,
        train_script=str(Path(__file__).with_name("flare_client.py")),
        train_args=marks,
    )
    recipe.export(folder)
    job = session.submit_job(str(Path(folder, "contest")))
    while not (status := str(session.get_job_status(job))).startswith("FINISHED"):
        time.sleep(LOOK_SECONDS)
    print(status, session.get_job_meta(job), flush=True)
    return 0 if status == "FINISHED:COMPLETED" else 1


if __name__ == "__main__":
    home, work, sites, count, size, file = sys.argv[1:]
    sys.exit(main(home, work, int(sites), int(count), int(size), file))
