"""What a Linux machine says of itself; none of it is trusted."""

import re
from collections.abc import Iterable, Mapping

from harness.devices.base import DeviceProperties
from harness.devices.properties import hexagon_of, printable

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
SCRIPT = f"""\
printf '@@machine\\n'; uname -m
printf '@@host\\n'; uname -n
for f in {" ".join(_FILES)}; do
  [ -r "$f" ] && {{ printf '\\n@@%s\\n' "$f"; head -c 4096 "$f" | tr '\\000' '\\n'; }}
done 2>/dev/null
exit 0
"""
_ARM = ("aarch64", "arm64", "armv8l")


def parse(output: str) -> dict[str, str]:
    r"""What `SCRIPT` printed, by the name of the source.

    >>> parse("@@machine\naarch64\n\n@@/etc/machine-id\nabc\n")
    {'machine': 'aarch64', '/etc/machine-id': 'abc'}
    """
    found: dict[str, str] = {}
    for section in re.split(r"(?:^|\n)@@", output)[1:]:
        name, _, text = section.partition("\n")
        found.setdefault(name, text.strip())
    return found


def linux_properties(
    serial: str, said: Mapping[str, str], free_bytes: int | None
) -> DeviceProperties:
    """The properties that the harness knows by name."""

    def text(*names: str) -> str:
        return next((value for name in names if (value := printable(said.get(name, "")))), "")

    soc = soc_name(said)
    machine = text("machine")
    vendor = said.get(f"{_TREE}/compatible", "").partition(",")[0]
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
        system=_system(said.get("/etc/os-release", "")),
    )


def soc_name(said: Mapping[str, str]) -> str:
    r"""The SoC by its name in the catalog, else in the kernel's words.

    >>> soc_name({"/proc/device-tree/compatible": "acme,board\nqcom,sm8750"})
    'SM8750'
    """
    names = list(_soc_names(said))
    known = (name for name in names if hexagon_of(name))
    return next(known, names[0] if names else "")


def _soc_names(said: Mapping[str, str]) -> Iterable[str]:
    """Candidates, best first."""
    for file in ("machine", "family"):
        if name := printable(said.get(f"{_SOC}/{file}", "")).upper():
            yield name
    for line in said.get(f"{_TREE}/compatible", "").splitlines():
        vendor, _, name = line.partition(",")
        if vendor == "qcom":
            yield printable(name).upper()


def _system(os_release: str) -> str:
    match = re.search(r"^PRETTY_NAME=(.*)$", os_release, re.MULTILINE)
    return printable(match[1].strip("\"'")) if match else "Linux"
