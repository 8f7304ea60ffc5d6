"""Parsers for the reports of Android and Linux about a device.

No value is trusted, and each parser takes time in proportion to its input: a repetition in a
pattern is bounded, or followed by characters that it cannot match itself.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType

from buildlib.targets import soc_named
from harness.devices.base import Battery, DeviceProperties

_TREE = "/proc/device-tree"
_SOC = "/sys/devices/soc0"
_DMI = "/sys/class/dmi/id"
_FILES = (
    f"{_TREE}/model",
    f"{_TREE}/compatible",
    f"{_TREE}/serial-number",
    f"{_SOC}/machine",
    f"{_SOC}/family",
    f"{_SOC}/soc_id",
    f"{_SOC}/serial_number",
    f"{_DMI}/sys_vendor",
    f"{_DMI}/product_name",
    "/etc/machine-id",
    "/etc/os-release",
)
HARDWARE = """\
printf '\\n@@memory\\n'; grep MemTotal /proc/meminfo 2>/dev/null
printf '\\n@@page\\n'; getconf PAGESIZE 2>/dev/null
printf '\\n@@clocks\\n'
(cd "${QNNFARM_SYS_ROOT:-/sys}/devices/system/cpu" && for cpu in cpu[0-9]*; do
  cap= max= first=
  read -r cap <"$cpu/cpufreq/scaling_max_freq" || continue
  read -r max <"$cpu/cpufreq/cpuinfo_max_freq"
  read -r first rest <"$cpu/cpufreq/related_cpus"
  echo "$cpu=$cap/$max/$first"
done) 2>/dev/null
"""
"""Prints memory, size of pages and clock limits, for `parse`."""
SCRIPT = f"""\
printf '@@machine\\n'; uname -m
printf '@@host\\n'; uname -n
printf '@@kernel\\n'; uname -r
{HARDWARE}
for f in {" ".join(_FILES)}; do
  [ -r "$f" ] && {{ printf '\\n@@%s\\n' "$f"; head -c 4096 "$f" | tr '\\000' '\\n'; }}
done 2>/dev/null
exit 0
"""
_ARM = ("aarch64", "arm64", "armv8l")
_MOST_NAMES = 64
_MOST_CPUS = 256


def parse(output: str) -> dict[str, str]:
    r"""Parse the output of `SCRIPT`: text by the name of its source.

    >>> parse("@@machine\naarch64\n\n@@/etc/machine-id\nabc\n")
    {'machine': 'aarch64', '/etc/machine-id': 'abc'}
    """
    sections: dict[str, str] = {}
    for section in re.split(r"(?:^|\n)@@", output)[1:]:
        name, _, text = section.partition("\n")
        sections.setdefault(name, text.strip())
    return sections


def linux_properties(
    serial: str, facts: Mapping[str, str], free_bytes: int | None
) -> DeviceProperties:
    """Return the properties that the harness knows by name."""

    def text(*names: str) -> str:
        return next((value for name in names if (value := printable(facts.get(name, "")))), "")

    soc = soc_name(facts)
    machine = text("machine")
    vendor = facts.get(f"{_TREE}/compatible", "").partition(",")[0]
    return DeviceProperties(
        serial=serial,
        hardware_serial=text(f"{_SOC}/serial_number", f"{_TREE}/serial-number", "/etc/machine-id"),
        manufacturer=text(f"{_DMI}/sys_vendor") or printable(vendor),
        model=text(f"{_TREE}/model", f"{_DMI}/product_name", "host"),
        soc=soc,
        hexagon=hexagon_of(soc),
        abi=machine,
        android_version="",
        sdk=None,
        emulator=machine not in _ARM,
        free_bytes=free_bytes,
        battery=None,
        system=_system(facts.get("/etc/os-release", "")),
        build=_system(facts.get("/etc/os-release", "")),
        fingerprint=" ".join(filter(None, ("Linux", text("kernel"), machine))),
        ram_bytes=ram_of(facts),
        page_bytes=_number(facts.get("page")),
        clocks=clocks_of(facts),
    )


_CLOCK = re.compile(
    r"^cpu(?P<cpu>[0-9]{1,3})=(?P<cap>[0-9]{1,8})/(?P<max>[0-9]{0,8})/(?P<first>[0-9]{0,3})$",
    re.MULTILINE,
)


def ram_of(facts: Mapping[str, str]) -> int | None:
    """Return the memory in the output of `HARDWARE`.

    >>> ram_of({"memory": "MemTotal:       11534336 kB"})
    11811160064
    """
    match = re.match(r"MemTotal:\s{1,40}([0-9]{1,12}) kB", facts.get("memory", ""))
    return int(match[1]) * 1024 if match else None


def clocks_of(facts: Mapping[str, str]) -> dict[str, float]:
    r"""Return the limits of the clocks in the output of `HARDWARE`, which is in kHz.

    >>> clocks_of({"clocks": "cpu0=2000000/2200000/0\ncpu1=2000000/2200000/0"})
    {'cpu_cap_hz:0': 2000000000.0, 'cpu_max_hz:0': 2200000000.0}
    """
    clocks: dict[str, float] = {}
    for match in islice(_CLOCK.finditer(facts.get("clocks", "")), _MOST_CPUS):
        if match["first"] in {"", match["cpu"]}:
            for name in ("cap", "max"):
                if match[name]:
                    clocks[f"cpu_{name}_hz:{match['cpu']}"] = int(match[name]) * 1000.0
    return clocks


def soc_name(facts: Mapping[str, str]) -> str:
    r"""Return the SoC by its name in the catalog, else in the kernel's words.

    >>> soc_name({"/proc/device-tree/compatible": "acme,board\nqcom,sm8750"})
    'SM8750'
    """
    names = list(_soc_names(facts))
    catalogued = (name for name in names if hexagon_of(name))
    return next(catalogued, names[0] if names else "")


def _soc_names(facts: Mapping[str, str]) -> Iterable[str]:
    """Return candidates, best first."""
    for file in ("machine", "family"):
        if name := printable(facts.get(f"{_SOC}/{file}", "")).upper():
            yield name
    for line in islice(facts.get(f"{_TREE}/compatible", "").splitlines(), _MOST_NAMES):
        vendor, _, name = line.partition(",")
        if vendor == "qcom":
            yield printable(name).upper()


def _system(os_release: str) -> str:
    match = re.search(r"^PRETTY_NAME=(.*)$", os_release, re.MULTILINE)
    return printable(match[1].strip("\"'")) if match else "Linux"


_NAME = re.compile(r"^\[([^\]\n]{1,200})\]: \[", re.MULTILINE)
_FIELD = re.compile(
    r"^[ \t]{0,40}([A-Za-z][A-Za-z ]{0,60}): (\S{1,60})[ \t\r]{0,40}$", re.MULTILINE
)
_MAX_VALUE = 512

_MAX_DF = 16 * 1024

DF = "df -Pk"
"""Tells in KiB; with `-kP`, toybox before 0.8.6 counts in halves of one."""


def parse_getprop(output: str) -> dict[str, str]:
    r"""Return the properties in the output of `getprop`; a value may have several lines.

    >>> parse_getprop("[ro.soc.model]: [SM8750]\n[x]: [a\nb]\nnoise\n")
    {'ro.soc.model': 'SM8750', 'x': 'a\nb'}
    """
    text = output.replace("\r\n", "\n") + "\n"
    values: dict[str, str] = {}
    position = 0
    while (name := _NAME.search(text, position)) is not None:
        end = text.find("]\n", name.end())
        if end < 0:  # nor does any property after it end
            break
        values[name[1]] = text[name.end() : end]
        position = end + 2
    return values


def parse_df(output: str) -> int | None:
    r"""Free bytes in the output of `df -Pk FOLDER`.

    >>> parse_df("Filesystem 1024-blocks Used Available Capacity Mounted on\n/d 9 4 5 45% /data\n")
    5120
    """
    for line in reversed(output[-_MAX_DF:].splitlines()):
        # A device's name may hold blanks, so the columns are found by the percentage.
        match = re.search(r"\s(\d{1,18})\s+(\d{1,18})\s+(\d{1,18})\s+(\d+%|-)\s", line)
        if match:
            return int(match[3]) * 1024
    return None


def parse_dumpsys(output: str) -> dict[str, str]:
    r"""Return the lines `name: value` of a service's dump.

    >>> parse_dumpsys("Battery state:\n  level: 85\n  AC powered: true\n")
    {'level': '85', 'AC powered': 'true'}
    """
    return {match[1]: match[2] for match in _FIELD.finditer(output)}


def parse_battery(output: str) -> Battery | None:
    """Parse the output of `dumpsys battery`, which has tenths of a degree.

    A battery that is full, or must not be charged, is not charging though a charger is there.
    """
    fields = parse_dumpsys(output)
    level, scale = _number(fields.get("level")), _number(fields.get("scale")) or 100
    tenths = _number(fields.get("temperature"))
    powered = [fields[f"{kind} powered"] for kind in _CHARGERS if f"{kind} powered" in fields]
    if level is None and tenths is None and not powered:
        return None
    plugged = "true" in powered if powered else None
    return Battery(
        level_percent=None if level is None else 100 * level / scale,
        temperature_c=None if tenths is None else tenths / 10,
        charging=_CHARGING.get(fields.get("status", ""), plugged),
    )


_CHARGERS = ("AC", "USB", "Wireless", "Dock")
_CHARGING = {"2": True, "3": False, "4": False, "5": False}
"""`BatteryManager.BATTERY_STATUS_*`; 1 is unknown."""


def properties_from(
    serial: str,
    props: Mapping[str, str],
    free_bytes: int | None,
    battery: Battery | None,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> DeviceProperties:
    """Return the properties that the harness knows by name; `facts` are of `HARDWARE`."""

    def text(name: str) -> str:
        return printable(props.get(name, ""))

    soc = text("ro.soc.model")
    sdk = _number(text("ro.build.version.sdk"))
    version = text("ro.build.version.release")
    return DeviceProperties(
        serial=serial,
        hardware_serial=text("ro.serialno"),
        manufacturer=text("ro.product.manufacturer"),
        model=text("ro.product.model"),
        soc=soc,
        hexagon=hexagon_of(soc),
        abi=text("ro.product.cpu.abi"),
        android_version=version,
        sdk=sdk,
        emulator="1" in {text("ro.kernel.qemu"), text("ro.boot.qemu")},
        free_bytes=free_bytes,
        battery=battery,
        system=f"Android {version}".strip(),
        build=text("ro.build.display.id") or text("ro.build.id"),
        fingerprint=text("ro.build.fingerprint"),
        ram_bytes=ram_of(facts),
        page_bytes=_number(facts.get("page")),
        clocks=clocks_of(facts),
    )


def printable(value: str) -> str:
    """Return a value that a device gave, cut, with control characters as spaces."""
    return "".join(c if c.isprintable() else " " for c in value[:_MAX_VALUE]).strip()


def hexagon_of(soc: str) -> str | None:
    """Return the Hexagon architecture of an SoC of the catalog, e.g. `v79`."""
    soc_entry = soc_named(soc)
    return None if soc_entry is None else soc_entry.dsp_arch


def _number(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"-?[0-9]{1,9}", text):
        return None
    return int(text)
