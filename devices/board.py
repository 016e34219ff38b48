"""Identify the board from the device tree, the Pi's revision code, or x86's DMI."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .battery import find_batteries
from .cores import online_cores
from .memory import total_memory
from .readings import Files, ReadError
from .system import System

Kind = Literal["phone", "laptop", "raspberry-pi", "jetson", "linux"]

# Names are not trusted: carrier makers write their own into `model`, and DMI is wrong on some Jetsons. Sources:
# Raspberry Pi's documentation of revision codes, NVIDIA's part numbers in device trees, Arm's part numbers.
_TREE = "proc/device-tree"
_DMI = "sys/devices/virtual/dmi/id"


@dataclass(frozen=True)
class BoardInfo:
    """A board and its operating system; unknown fields are empty strings."""

    # This project's name, such as raspberry-pi-5.
    name: str
    kind: Kind
    # The maker's name.
    model: str = ""
    soc: str = ""
    # A Jetson's part number.
    module: str = ""
    # Usable memory, less than the installed memory.
    memory_bytes: int | None = None
    # An x86 processor.
    cpu: str = ""
    # The Arm core.
    cpu_core: str = ""
    # Flags of /proc/cpuinfo.
    features: frozenset[str] = frozenset()
    cores: int = 1
    # 0 if unknown.
    physical_cores: int = 0
    # Word size of programs, 32 on some 64-bit kernels.
    bits: int = 64
    # From the Pi's code.
    revision: str = ""
    ram_code_bytes: int | None = None
    l4t: str = ""
    jetpack: str = ""
    # Compute capability.
    cuda: str = ""
    # Flashed for higher clocks.
    super_mode: bool = False
    # Offered by a Pi 5's power supply.
    supply_milliamperes: int | None = None

    @property
    def has_wheels(self) -> bool:
        """True if wheels of torch and ONNX Runtime exist for this platform."""
        return self.bits == 64

    @property
    def detects_under_voltage(self) -> bool:
        """True if the board detects under-voltage, which the Pi Zero family cannot."""
        return self.kind in ("raspberry-pi", "jetson") and "zero" not in self.name


def find_board(system: System) -> BoardInfo:
    """Identify the board as far as possible; never raises."""
    files = system.files
    compatible = _strings(files, f"{_TREE}/compatible")
    processors, tail = _cpuinfo(files)
    first = processors[0] if processors else {}
    code = _revision(tail.get("Revision", ""))
    found = (
        _raspberry(compatible, code)
        or _jetson(compatible, system)
        or _phone(system)
        or _x86(files, first)
        or BoardInfo("linux", "laptop" if not compatible and find_batteries(files) else "linux")
    )
    model = files.text_or(f"{_TREE}/model") or found.model or tail.get("Model", "")
    memory = total_memory(files, 0.0).value
    facts = {
        "model": model,
        "memory_bytes": None if memory is None else int(memory),
        "cpu": first.get("model name", ""),
        "cpu_core": _core(processors),
        "features": frozenset((first.get("Features") or first.get("flags") or "").split()),
        "cores": len(online_cores(files)),
        "physical_cores": _physical_cores(processors),
        "bits": system.pointer_bits or (32 if first.get("CPU architecture") == "7" else 64),
        "revision": tail.get("Revision", "") if code else "",
        "ram_code_bytes": _RAM_BYTES.get(code >> 20 & 0x7) if code else None,
        "supply_milliamperes": _big_endian(files, f"{_TREE}/chosen/power/max_current"),
    }
    return BoardInfo(**{**vars(found), **facts})


# --- Raspberry Pi

_PI_NAMES: Mapping[str, str] = {
    "model-zero-w": "zero-w",
    "model-zero": "zero",
    "model-zero-2-w": "zero-2-w",
    "2-model-b": "2",
    "3-model-b": "3",
    "3-model-b-plus": "3-plus",
    "3-model-a-plus": "3a-plus",
    "3-compute-module": "cm3",
    "3-plus-compute-module": "cm3-plus",
    "4-model-b": "4",
    "400": "400",
    "4-compute-module": "cm4",
    "4s-compute-module": "cm4s",
    "5-model-b": "5",
    "5-compute-module": "cm5",
    "500": "500",
}
# Type bits of a revision code -> name, for containers that hide the device tree.
_PI_TYPES: Mapping[int, str] = {
    0x04: "2", 0x08: "3", 0x09: "zero", 0x0A: "cm3", 0x0C: "zero-w", 0x0D: "3-plus", 0x0E: "3a-plus",
    0x10: "cm3-plus", 0x11: "4", 0x12: "zero-2-w", 0x13: "400", 0x14: "cm4", 0x15: "cm4s", 0x17: "5", 0x18: "cm5",
    0x19: "500", 0x1A: "cm5-lite", 0x1B: "cm0",
}  # fmt: skip
_PI_CHIPS: Mapping[int, str] = {0: "bcm2835", 1: "bcm2836", 2: "bcm2837", 3: "bcm2711", 4: "bcm2712"}
_RAM_BYTES: Mapping[int, int] = {size: 256 * 2**20 << size for size in range(7)}
_NEW_STYLE = 1 << 23


def _revision(text: str) -> int | None:
    """Return a Pi's new-style revision code; None for old codes, which have no bit fields."""
    try:
        code = int(text, 16)
    except ValueError:
        return None
    return code if code & _NEW_STYLE else None


def _raspberry(compatible: list[str], code: int | None) -> BoardInfo | None:
    for entry in compatible:
        maker, _, name = entry.partition(",")
        if maker == "raspberrypi":
            soc = next((e.partition(",")[2] for e in compatible if e.startswith("brcm,")), "")
            return BoardInfo(f"raspberry-pi-{_PI_NAMES.get(name, name)}", "raspberry-pi", soc=soc)
    if compatible or code is None or (name := _PI_TYPES.get(code >> 4 & 0xFF, "")) == "":
        return None
    return BoardInfo(f"raspberry-pi-{name}", "raspberry-pi", soc=_PI_CHIPS.get(code >> 12 & 0xF, ""))


# --- Jetson

_MODULES: Mapping[str, str] = {
    "p3448-0000": "nano", "p3448-0002": "nano", "p3448-0003": "nano-2gb",
    "p2180-1000": "tx1",
    "p3310-1000": "tx2", "p3489-0000": "tx2i", "p3489-0888": "tx2-4gb", "p3636-0001": "tx2-nx",
    "p3668-0000": "xavier-nx", "p3668-0001": "xavier-nx", "p3668-0003": "xavier-nx",
    "p2888-0001": "agx-xavier", "p2888-0003": "agx-xavier", "p2888-0004": "agx-xavier", "p2888-0005": "agx-xavier",
    "p2888-0006": "agx-xavier", "p2888-0008": "agx-xavier",
    "p3767-0000": "orin-nx", "p3767-0001": "orin-nx",
    "p3767-0003": "orin-nano", "p3767-0004": "orin-nano", "p3767-0005": "orin-nano",
    "p3701-0000": "agx-orin", "p3701-0002": "agx-orin", "p3701-0004": "agx-orin", "p3701-0005": "agx-orin",
    "p3701-0008": "agx-orin",
    "p3834-0008": "agx-thor",
}  # fmt: skip
# Used if the device tree names no module.
_JETSON_WORDS: Mapping[str, str] = {
    "nvidia,jetson-nano": "nano",
    "nvidia,galen": "agx-xavier",
    "nvidia,tegra186": "tx2",
    "nvidia,tegra194": "xavier",
    "nvidia,tegra234": "orin",
    "nvidia,tegra264": "agx-thor",
}
_CUDA: Mapping[str, str] = {
    "tegra210": "5.3", "tegra186": "6.2", "tegra194": "7.2", "tegra234": "8.7", "tegra264": "11.0",
}  # fmt: skip
_JETPACKS: Mapping[str, str] = {
    "32.6.1": "4.6",
    **{f"32.7.{n}": f"4.6.{n}" for n in range(1, 7)},
    "35.1.0": "5.0.2", "35.2.1": "5.1", "35.3.1": "5.1.1", "35.4.1": "5.1.2", "35.5.0": "5.1.3", "35.6.0": "5.1.4",
    "35.6.1": "5.1.5", "35.6.2": "5.1.5", "35.6.3": "5.1.5", "35.6.4": "5.1.6",
    "36.2.0": "6.0 DP", "36.3.0": "6.0", "36.4.0": "6.1", "36.4.3": "6.2", "36.4.4": "6.2.1", "36.4.7": "6.2.1",
    "36.5.0": "6.2.2",
    "38.2.0": "7.0", "38.2.1": "7.0", "38.2.2": "7.0", "38.4.0": "7.1", "39.0.0": "7.2 EA", "39.2.0": "7.2",
}  # fmt: skip
_PART = re.compile(r"p\d{4}-\d{4}")
_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)")


def _jetson(compatible: list[str], system: System) -> BoardInfo | None:
    files = system.files
    soc = next((e.partition(",")[2] for e in compatible if re.fullmatch(r"nvidia,tegra\d{3}", e)), "")
    has_release = files.has("etc/nv_tegra_release")
    if not soc and not has_release and "tegra" not in files.text_or("proc/sys/kernel/osrelease"):
        return None
    parts = [part for entry in compatible for part in _PART.findall(entry) if part in _MODULES]
    name = _MODULES[parts[0]] if parts else next((_JETSON_WORDS[e] for e in compatible if e in _JETSON_WORDS), "")
    l4t = _l4t(system)
    return BoardInfo(
        f"jetson-{name}".rstrip("-"),
        "jetson",
        soc=soc,
        module=parts[0] if parts else "",
        l4t=l4t,
        jetpack=_JETPACKS.get(l4t, ""),
        cuda=_CUDA.get(soc, ""),
        super_mode=any(entry.endswith("-super") for entry in compatible),
    )


def _l4t(system: System) -> str:
    """Return the version of a Jetson's system, such as 36.4.3; "" if unknown."""
    match = _RELEASE.match(system.files.text_or("etc/nv_tegra_release"))
    if match:
        version = f"{match[1]}.{match[2]}"
    else:
        try:
            package = system.commands.text(["dpkg-query", "--showformat=${Version}", "--show", "nvidia-l4t-core"])
        except ReadError:
            return ""
        version = package.partition("-")[0]
    return version if version.count(".") > 1 else f"{version}.0"


# --- phones, x86


def _phone(system: System) -> BoardInfo | None:
    if "com.termux" not in system.environment.get("PREFIX", ""):
        return None
    try:
        model = system.commands.text(["getprop", "ro.product.model"])
    except ReadError:
        model = ""
    return BoardInfo("phone", "phone", model=model)


_MEANINGLESS = {"", "Default string", "To Be Filled By O.E.M.", "System Product Name", "System manufacturer"}
# Chassis types of the SMBIOS standard.
_PORTABLE = {"8", "9", "10", "11", "14", "30", "31", "32"}


def _x86(files: Files, processor: Mapping[str, str]) -> BoardInfo | None:
    words = [files.text_or(f"{_DMI}/{name}") for name in ("sys_vendor", "product_name")]
    if "vendor_id" not in processor and not any(words):
        return None
    portable = files.text_or(f"{_DMI}/chassis_type") in _PORTABLE or find_batteries(files) is not None
    model = " ".join(word for word in words if word not in _MEANINGLESS)
    return BoardInfo("x86", "laptop" if portable else "linux", model=model)


# --- common

_CORES: Mapping[tuple[int, int], str] = {
    (0x41, 0xD03): "cortex-a53", (0x41, 0xD04): "cortex-a35", (0x41, 0xD05): "cortex-a55", (0x41, 0xD07): "cortex-a57",
    (0x41, 0xD08): "cortex-a72", (0x41, 0xD09): "cortex-a73", (0x41, 0xD0A): "cortex-a75", (0x41, 0xD0B): "cortex-a76",
    (0x41, 0xD0C): "neoverse-n1", (0x41, 0xD0D): "cortex-a77", (0x41, 0xD41): "cortex-a78",
    (0x41, 0xD42): "cortex-a78ae", (0x41, 0xD44): "cortex-x1", (0x41, 0xD83): "neoverse-v3ae",
    (0x4E, 0x003): "denver2", (0x4E, 0x004): "carmel",
}  # fmt: skip


def _cpuinfo(files: Files) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the processors listed in /proc/cpuinfo, and the board fields at its end."""
    processors: list[dict[str, str]] = []
    tail: dict[str, str] = {}
    for line in files.text_or("proc/cpuinfo").splitlines():
        key, found, value = (part.strip() for part in line.partition(":"))
        if not found:
            continue
        if key == "processor":
            processors.append({})
        if key in ("Hardware", "Revision", "Serial", "Model"):
            tail[key] = value
        elif processors:
            processors[-1][key] = value
    return processors, tail


def _core(processors: list[dict[str, str]]) -> str:
    """Return the names of all core types, joined by "+"."""
    names = []
    for processor in processors:
        try:
            part = int(processor["CPU implementer"], 16), int(processor["CPU part"], 16)
        except (KeyError, ValueError):
            continue
        names.append(_CORES.get(part, f"{part[0]:#x}/{part[1]:#x}"))
    return "+".join(dict.fromkeys(names))


def _physical_cores(processors: list[dict[str, str]]) -> int:
    each = {p.get("physical id", "0"): int(p["cpu cores"]) for p in processors if p.get("cpu cores", "").isdecimal()}
    return sum(each.values())


def _strings(files: Files, path: str) -> list[str]:
    try:
        return files.strings(path)
    except ReadError:
        return []


def _big_endian(files: Files, path: str) -> int | None:
    try:
        return int(struct.unpack(">I", files.data(path))[0])
    except (ReadError, struct.error):
        return None
