"""Android's system properties: one small file each, which shell commands can read and set."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}")
_KEPT = "persist."


class PropertyStore:
    """The properties of one device, in a folder of files named as the keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def boot(self, properties: Mapping[str, str]) -> None:
        """Drop what lives only until the next boot and set what holds from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            if not file.name.startswith(_KEPT):
                file.unlink()
        for key, value in properties.items():
            self.set(key, value)

    def set(self, key: str, value: str) -> None:
        """Set one property; the next reader sees the old value or the new one.

        Raises:
            ValueError: not a key that a property can have.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"not the key of a property: {key!r}")
        partial = self.folder / f".{key}.{os.getpid()}"
        partial.write_text(value.replace("\n", " ") + "\n", encoding="utf-8")
        partial.replace(self.folder / key)

    def get(self, key: str) -> str:
        """The value, empty if it is not set."""
        try:
            return (self.folder / key).read_text(encoding="utf-8").rstrip("\n")
        except FileNotFoundError:
            return ""


def device_properties(*, name: str, soc: str, serial_number: str, abi: str) -> dict[str, str]:
    """What an Android device of that SoC says of itself at boot.

    `ro.kernel.qemu=1` marks it as virtual, as Android's own emulator does. Numbers that only
    hardware could give are left out.
    """
    product = f"qnnfarm_{soc.lower()}"
    build = f"qnnfarm/{product}/{product}:15/virtual/{name}:userdebug/test-keys"
    return {
        "ro.boot.hardware": "qnnfarm",
        "ro.boot.qemu": "1",
        "ro.boot.serialno": serial_number,
        "ro.build.characteristics": "emulator",
        "ro.build.fingerprint": build,
        "ro.build.type": "userdebug",
        "ro.build.version.release": "15",
        "ro.build.version.sdk": "35",
        "ro.debuggable": "1",
        "ro.hardware": "qnnfarm",
        "ro.kernel.qemu": "1",
        "ro.product.board": "qnnfarm",
        "ro.product.brand": "qnnfarm",
        "ro.product.cpu.abi": abi,
        "ro.product.cpu.abilist": abi,
        "ro.product.cpu.abilist64": abi,
        "ro.product.device": product,
        "ro.product.manufacturer": "qnnfarm",
        "ro.product.model": f"qnnfarm virtual {soc}",
        "ro.product.name": product,
        "ro.serialno": serial_number,
        "ro.soc.manufacturer": "QTI",
        "ro.soc.model": soc,
    }


def banner(properties: Mapping[str, str], features: tuple[str, ...]) -> str:
    """What the device says of itself when an adb server connects."""
    keys = ("ro.product.name", "ro.product.model", "ro.product.device")
    parts = [f"{key}={properties[key]}" for key in keys]
    return f"device::{';'.join(parts)};features={','.join(features)}"
