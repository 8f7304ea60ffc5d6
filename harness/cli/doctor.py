"""`qnnfarm doctor`: checks this machine, and says how to fix it.

Each check imports its subject, so that an import that fails is a finding too.
"""

import ctypes.util
import importlib.util
import os
import platform
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from buildlib.entry_points import entry_names, load_entry
from buildlib.targets import find_soc
from buildlib.toolchains.base import host_fault
from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION
from buildlib.toolchains.registry import DOOR as TOOLCHAINS
from buildlib.toolchains.registry import ToolchainModule
from harness.cli.arguments import Json
from harness.console import answers, print_json
from harness.devices.adb.connection import address_from
from harness.devices.socket_owner import user_name
from harness.devices.spec import State, device_types
from harness.errors import BAD, AdbServerError, ConfigFileError, GenieMissingError, LedgerError

if TYPE_CHECKING:
    from harness.devices.adb.client import AdbServer

"""Of these, `note` works less well, and `broken` stops the main job."""


_GLIBC = (2, 35)
"""Of the wheel's tag, manylinux_2_35."""


@dataclass(frozen=True)
class Finding:
    """Result of one check, with advice where there is something to do."""

    subject: str
    state: State
    detail: str
    advice: str = ""


Result = tuple[State, str] | tuple[State, str, str]
"""State, detail and advice of a finding."""


def doctor(json: Json = False) -> None:
    """Check compiler, Genie, adb and virtual devices. Exits with 1 if one is broken.

    Example: qnnfarm doctor
    """
    findings = list(examine())
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "note": "yellow", "broken": "red"}
        for finding in findings:
            advice = f" — {finding.advice}" if finding.advice else ""
            answers().print(
                Text(f"{finding.state:6}", colours[finding.state]),
                Text(f"{finding.subject:16}", "bold"),
                f"{finding.detail}{advice}",
            )
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(BAD)


def examine() -> Iterator[Finding]:
    """Run all checks, in the order of the data flow; a check that raises is a finding too."""
    checks: dict[str, Callable[[], Result | None]] = {
        "host": _host,
        "QNN compiler": _compiler,
        **{f"toolchain {name}": partial(_toolchain, name) for name in entry_names(TOOLCHAINS)},
        "Genie for phones": _phones,
        "cache": _cache,
        "pool ledger": _ledger,
        "adb": _adb,
    }
    if host_fault():
        del checks["QNN compiler"]
    for name, kind in device_types().items():
        checks[f"{name} devices"] = kind.examine_host
    for subject, check in checks.items():
        try:
            if (found := check()) is not None:
                yield Finding(subject, *found)
        except Exception as error:  # noqa: BLE001  (whatever is broken is what we are here to report)
            yield Finding(subject, "broken", f"{type(error).__name__}: {error}")


def _host() -> Result:
    detail = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if host_fault():
        advice = "phones, results and reports; builds and virtual devices need Linux on x86_64"
        return "note", detail, f"it is for {advice} (docs/hosts.md)"
    library, version = platform.libc_ver()
    detail += f", {library or 'no glibc'} {version}".rstrip()
    if library != "glibc" or tuple(map(int, version.split("."))) < _GLIBC:
        advice = "the compiler and the emulator need glibc 2.35: Debian 12, Ubuntu 22.04 or later"
        return "note", detail, advice
    return "ok", detail


def _compiler() -> Result:
    """Check the compiler, and for libatomic, which its libraries need and minimal systems lack."""
    if importlib.util.find_spec(DISTRIBUTION.replace("-", "_")) is None:
        advice = "for builds and virtual devices, pip install 'qnnfarm[build]'"
        return "note", f"{DISTRIBUTION} is not installed", advice
    if ctypes.util.find_library("atomic") is None:
        return "broken", "libatomic.so.1 is missing", "apt install libatomic1"

    from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

    toolchain = OrtQnnToolchain()
    versions = toolchain.versions()
    parts = (f"{name} {version}" for name, version in versions.items() if name != "toolchain")
    return "ok", f"{toolchain.name}: {', '.join(parts)}"


def _toolchain(name: str) -> Result | None:
    module: ToolchainModule = load_entry(TOOLCHAINS, name)
    return module.examine_host()


def _phones() -> Result:
    from harness.runtimes.bundles.sources import ANDROID, find_genie

    try:
        genie = find_genie(ANDROID, find_soc("SM8750"))
    except GenieMissingError as error:
        return "note", error.reason, "virtual devices do without"
    return "ok", f"{genie.files['libGenie.so'].origin}: it compiles nothing here"


def _cache() -> Result:
    from buildlib.paths import default_cache_root

    folder = default_cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    detail = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < 1 << 30:
        advice = "builds of large models need more room; QNNFARM_CACHE_DIR moves it"
        return "note", detail, advice
    return "ok", detail


def _ledger() -> Result:
    """Check that the ledger of leases can be used, without making a file of one."""
    from harness.pool.database import Database, check_folder
    from harness.pool.pool import find_config, find_ledger

    try:
        with closing(Database(find_ledger(find_config(None)[1]))) as database:
            if database.path is None:
                database.version()
                return "ok", f"{database.location}, of several hosts"
            check_folder(database.path)
            return "ok", database.location
    except (LedgerError, ConfigFileError) as error:
        return "broken", str(error)


def _adb() -> Result:
    """Name program and server: qnnfarm asks the server itself, people and scripts the program."""
    from harness.devices.adb.server import find_adb, identify_adb

    try:
        program = identify_adb(find_adb())
        state, detail, *advices = _adb_server()
    except AdbServerError as error:
        return "broken", str(error)
    detail = f"{program.release} at {program.path}; {detail}"
    if not program.tells_loss:
        state = "note"
        advices.append("scripts need 35: `adb shell` of this one exits with 0 if its device goes")
    return state, detail, "; ".join(filter(None, advices))


def _adb_server() -> Result:
    from harness.devices.adb.server import is_taken, resolve_server, server_address
    from harness.pool.pool import trusted_users

    address = server_address()
    if address.local and not is_taken(address):
        return "ok", "no server runs, qnnfarm starts one when a device is needed"
    return _reach_of(resolve_server(address, trusted_users=trusted_users()))


def _reach_of(server: "AdbServer") -> Result:
    """Name the users of an adb server's devices: it authenticates nobody."""
    address = server.address
    release = server.release() or f"1.0.{server.version}, before 35"
    detail = f"server of adb {release} at {address}, used as it is"
    if address.path:
        status = Path(address.path).stat()
        owner = user_name(status.st_uid)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            others = "whoever may write to that file can use its devices"
            return "note", f"{detail}, of {owner}; {others}"
        return "ok", f"{detail}; {owner} alone can use its devices"
    if not address.local:
        return "note", f"{detail}; whoever reaches that port can use its devices"
    owner = f", of {server.owner}" if server.owner else ""
    is_named = address_from(os.environ) is not None
    advice = "" if is_named else "once it is stopped, qnnfarm starts one that is yours alone"
    return "note", f"{detail}{owner}; every user of this host can use its devices", advice
