"""Network interface, traffic and metering; clock synchronisation."""

from .readings import Files, Quality, ReadError, Reading, Reason
from .system import System

# Sources: NetworkManager's D-Bus interface (property Metered), the kernel's documentation of /proc/net/route and of
# network statistics. Without NetworkManager only modems are known to be metered.
_MODEMS = ("wwan", "ppp", "rmnet")
_NM = "org.freedesktop.NetworkManager"
_METERED = {"1": (1.0, Quality.MEASURED), "2": (0.0, Quality.MEASURED)}
_GUESSED = {"3": (1.0, Quality.ESTIMATED), "4": (0.0, Quality.ESTIMATED)}


def interface(files: Files) -> str:
    """Return the interface of the default route with the lowest metric. Raises ReadError without a route."""
    routes = []
    for line in files.text("proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000" and fields[6].isdecimal():
            routes.append((int(fields[6]), fields[0]))
    if not routes:
        raise ReadError("proc/net/route", Reason.ABSENT)
    return min(routes)[1]


def traffic(files: Files, now: float) -> tuple[Reading, Reading]:
    """Return the bytes received and sent through the default route's interface since it came up."""
    try:
        name = interface(files)
    except ReadError as failure:
        absent = Reading.failed("B", "network", "proc/net/route", now, failure.reason)
        return absent, absent
    folder = f"sys/class/net/{name}/statistics"
    received = files.reading(f"{folder}/rx_bytes", "B", name, now)
    return received, files.reading(f"{folder}/tx_bytes", "B", name, now)


def metered(system: System, now: float) -> Reading:
    """Return 1.0 on a metered connection, 0.0 otherwise; ABSENT if unknown."""
    try:
        answer = system.commands.text(["busctl", "get-property", _NM, f"/{_NM.replace('.', '/')}", _NM, "Metered"])
        known = {**_METERED, **_GUESSED}.get(answer.rpartition(" ")[2])
    except ReadError:
        known = None
    if known is not None:
        return Reading(known[0], "1", "network", known[1], "NetworkManager", now)
    try:
        name = interface(system.files)
    except ReadError as failure:
        return Reading.failed("1", "network", "proc/net/route", now, failure.reason)
    if name.startswith(_MODEMS):
        return Reading(1.0, "1", "network", Quality.DERIVED, f"{name} is a modem", now)
    return Reading.failed("1", "network", "NetworkManager", now, Reason.ABSENT)


def clock_synchronised(system: System, now: float) -> Reading:
    """Return 1.0 if the kernel considers its clock synchronised, else 0.0."""
    source = "timedatectl"

    def take() -> float:
        answer = system.commands.text([source, "show", "--property=NTPSynchronized", "--value"])
        if answer not in ("yes", "no"):
            raise ReadError(source, Reason.PARSE)
        return float(answer == "yes")

    return Reading.taken("1", "clock", source, now, take)
