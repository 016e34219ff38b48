"""Jetson sensors: the power mode, and the load and clock frequency of the integrated GPU."""

import re
from dataclasses import dataclass

from .readings import Files, ReadError, Reading, Reason
from .system import System

# Sources: nvpmodel's files and output, the load file of NVIDIA's GPU driver (thousandths), devfreq (Hz).
DEVFREQ = "sys/class/devfreq"

_STATUS = "var/lib/nvpmodel/status"
_MODES = "etc/nvpmodel.conf"
_GPU = re.compile(r"(.*\.)?(gpu|ga10b|gv11b|gp10b|gb10b)|gpu\.0|gpu-gpc-0")
_GPU_FOLDERS = ("sys/devices/platform/bus@0", "sys/devices/platform", "sys/devices")


@dataclass(frozen=True)
class PowerMode:
    """A mode of nvpmodel, which limits clock frequencies, not power; some changes show only after a reboot."""

    id: int
    name: str


def power_mode(system: System) -> PowerMode:
    """Return the current mode, from nvpmodel's files, or else from its command. Raises ReadError if neither works."""
    try:
        return _mode_of_files(system.files)
    except ReadError:
        text = system.commands.text(["nvpmodel", "-q"])
    match = re.search(r"NV Power Mode: (\S+)\s+(\d+)", text)
    if match is None:
        raise ReadError("nvpmodel -q", Reason.PARSE)
    return PowerMode(int(match[2]), match[1])


def _mode_of_files(files: Files) -> PowerMode:
    status = re.search(r"pmode:(\d+)", files.text(_STATUS))
    if status is None:
        raise ReadError(_STATUS, Reason.PARSE)
    names = {int(m[1]): m[2] for m in re.finditer(r"< POWER_MODEL ID=(\d+) NAME=(\S+) >", files.text(_MODES))}
    number = int(status[1])
    if number not in names:
        raise ReadError(_MODES, Reason.PARSE)
    return PowerMode(number, names[number])


def gpu_load(files: Files, now: float) -> Reading:
    """Return the load of the GPU, in per cent."""
    for folder in _GPU_FOLDERS:
        for path in files.folders(folder):
            if _GPU.fullmatch(path.rpartition("/")[2]) and files.has(f"{path}/load"):
                return files.reading(f"{path}/load", "%", "gpu", now, 0.1)
    return Reading.failed("%", "gpu", "GPU load", now, Reason.ABSENT)


def gpu_clock(files: Files, now: float) -> Reading:
    """Return the GPU's clock in Hz."""
    for path in files.folders(DEVFREQ):
        if _GPU.fullmatch(path.rpartition("/")[2]):
            return files.reading(f"{path}/cur_freq", "Hz", "gpu", now)
    return Reading.failed("Hz", "gpu", DEVFREQ, now, Reason.ABSENT)
