"""Options and ini settings of the plugin, read into one frozen value."""

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import pytest

_SESSIONS = re.compile(r"[1-9][0-9]{0,4}")
_GENIE = "genie"
_KEY = pytest.StashKey["PluginSettings"]()

MissingDevice = Literal["", "skip", "fail"]


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Settings from the command line or an ini file.

    Attributes:
        pool: a `pool.yaml`; `None` where the pool finds its configuration itself.
        devices: by their texts, instead of a pool's configuration.
        containers: folders, or other models of the runtime; tests that take `container` or
            `session` run once with each.
        runtime: its name.
        db: results store, a path or URL; `None` for a file in pytest's temporary folder.
        repeat: how many sessions each device test runs in.
        run_timeout_s: time limit of an answer, a window or a text on the device; None for that of
            the runtime.
        lease_timeout_s: how long a test waits for its devices; `None` for ever.
        missing_device: end of a test without a device for its requirement; empty to skip only if
            there is no device at all.
        baseline: earlier results that those of this session are judged against; empty for none.
        params: parameters of suites, by name.
        push: files of the user's, as `pushed_files` takes them.
    """

    pool: Path | None
    devices: tuple[str, ...]
    containers: tuple[Path, ...]
    runtime: str
    db: str | None
    repeat: int
    run_timeout_s: float | None
    lease_timeout_s: float | None
    missing_device: MissingDevice
    baseline: str
    params: Mapping[str, str]
    push: tuple[str, ...]

    @property
    def loads_more(self) -> bool:
        """True if checking them loads more than pytest."""
        return bool(self.devices or self.push or self.runtime != _GENIE)


_Kind = Literal["args", "linelist"] | None
_OPTIONS: tuple[tuple[str, str, _Kind, str | None, str], ...] = (
    ("--pool", "FILE", None, "", "pool.yaml: the devices that tests may use."),
    (
        "--device", "SPEC", "args", "",
        "A device instead of a pool: SERIAL, SERIAL@HOST, linux:HOST, virtual:NAME, local.",
    ),
    ("--container", "DIR", "args", "", "A container for the tests that take one."),
    (
        "--runtime", "NAME", None, _GENIE,
        "What runs the containers: genie, or another runtime of docs/runtimes.md.",
    ),
    (
        "--push", "FILE[:NAME]", "args", None,
        "A file of your own to push with containers, in place of one of that name there.",
    ),
    (
        "--qnnfarm-db", "FILE|URL", None, "",
        "Results store; by default a file in pytest's temporary folder.",
    ),
    (
        "--repeat", "N", None, "1",
        "Run each test that uses a device in N sessions, each with a lease of its own.",
    ),
    (
        "--baseline", "REF", None, "",
        (
            "Judge what the tests measure against earlier results in --qnnfarm-db, as `qnnfarm "
            "gate` does: previous, a date, a branch or a commit."
        ),
    ),
    ("--suite-param", "NAME=VALUE", "linelist", "", "A parameter of a suite, e.g. soak_s=600."),
)  # fmt: skip
"""Name, metavar, type of its ini setting where it may be given several times, default, and help.

The setting `qnnfarm_NAME` (`qnnfarm_NAMEs` for several) changes the default; None has no setting.
"""
_INI = (
    (
        "qnnfarm_run_timeout", "0",
        (
            "Seconds for an answer, a window or a text on the device; 0: 300, and on the emulator "
            "more, by the size of the model."
        ),
    ),
    ("qnnfarm_lease_timeout", "0", "Seconds that a test waits for devices; 0: for ever."),
    (
        "qnnfarm_missing_device", "",
        (
            "What a test does whose requirement no device meets: skip or fail. By default it skips "
            "if there is no device at all, and fails if there are others."
        ),
    ),
)  # fmt: skip
"""Name, default and help of the settings that no option has."""


def add_options(parser: pytest.Parser) -> None:
    """Register options and ini settings; an option's long name begins with `--qnnfarm-`."""
    group = parser.getgroup("qnnfarm", "qnnfarm: tests on devices")
    for name, metavar, kind, default, text in _OPTIONS:
        several = kind is not None
        stem = name.removeprefix("--").removeprefix("qnnfarm-")
        setting = f"qnnfarm_{stem.replace('-', '_')}"
        attributes: dict[str, Any] = {
            "dest": setting,
            "metavar": metavar,
            "help": text + " May be given several times." * several,
            "action": "append" if several else "store",
        }
        try:
            group.addoption(*dict.fromkeys((name, f"--qnnfarm-{stem}")), **attributes)
        except (ValueError, argparse.ArgumentError):  # another plugin's: ours gives way
            group.addoption(f"--qnnfarm-{stem}", **attributes)
        if default is not None:
            paths = "; a path is relative to this file" * metavar.startswith(("FILE", "DIR"))
            parser.addini(
                setting + "s" * several,
                f"Default of {name}{paths}.",
                kind,
                [] if several else default,
            )
    for name, default, text in _INI:
        parser.addini(name, text, None, default)


def read_settings(config: pytest.Config) -> PluginSettings:
    """Read the settings, once a session; `option_checks` has the checks that load more.

    Raises:
        pytest.UsageError: names the option that cannot be used.
    """
    if _KEY not in config.stash:
        config.stash[_KEY] = _read(config)
    return config.stash[_KEY]


def without_password(db: str) -> str:
    """Remove password and query, which may hold one, from a database's location."""
    scheme, separator, rest = db.partition("://")
    if not separator:
        return db
    user, at, place = rest.partition("?")[0].rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{place}"


def _read(config: pytest.Config) -> PluginSettings:
    base = config.inipath.parent if config.inipath else config.rootpath
    option = config.option
    pool = option.qnnfarm_pool
    containers = option.qnnfarm_container
    if pool is None and option.qnnfarm_device is None and config.getini("qnnfarm_pool"):
        pool = base / config.getini("qnnfarm_pool")
    if containers is None:
        containers = [base / path for path in config.getini("qnnfarm_containers")]
    devices = option.qnnfarm_device
    if devices is None:
        devices = [] if pool is not None else config.getini("qnnfarm_devices")
    settings = PluginSettings(
        pool=None if pool is None else _existing(Path(pool), "--pool"),
        devices=tuple(devices),
        containers=tuple(_existing(Path(path), "--container") for path in containers),
        runtime=option.qnnfarm_runtime or config.getini("qnnfarm_runtime"),
        db=option.qnnfarm_db or _db(config.getini("qnnfarm_db"), base),
        repeat=_whole(option.qnnfarm_repeat or config.getini("qnnfarm_repeat")),
        run_timeout_s=_seconds(config, "qnnfarm_run_timeout"),
        lease_timeout_s=_seconds(config, "qnnfarm_lease_timeout"),
        missing_device=_missing(config.getini("qnnfarm_missing_device")),
        baseline=option.qnnfarm_baseline or config.getini("qnnfarm_baseline"),
        params=_params(
            [*config.getini("qnnfarm_suite_params"), *(option.qnnfarm_suite_param or ())]
        ),
        push=tuple(option.qnnfarm_push or ()),
    )
    if settings.pool is not None and settings.devices:
        raise pytest.UsageError("--pool and --device: give one of them, not both")
    if settings.baseline and settings.db is None:
        raise pytest.UsageError("--baseline: --qnnfarm-db names the results to compare with")
    return settings


def _existing(path: Path, option: str) -> Path:
    if not path.exists():
        raise pytest.UsageError(f"{option}: there is no {str(path)!r}")
    return path.absolute()


def _db(text: str, base: Path) -> str | None:
    if not text:
        return None
    return text if "://" in text else str(base / text)


def _whole(text: str) -> int:
    if not _SESSIONS.fullmatch(text):
        raise pytest.UsageError(f"--repeat: {text!r} is not a number of sessions from 1 to 99999")
    return int(text)


def _seconds(config: pytest.Config, setting: str) -> float | None:
    text = config.getini(setting)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise pytest.UsageError(f"{setting}: {text!r} is not a number of seconds")
    return seconds or None


def _missing(text: str) -> MissingDevice:
    if text not in get_args(MissingDevice):
        raise pytest.UsageError(f"qnnfarm_missing_device: {text!r} is neither skip nor fail")
    return cast("MissingDevice", text)


def _params(texts: list[str]) -> Mapping[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, sign, _ in pairs:
        if not sign or not name.isidentifier():
            raise pytest.UsageError(f"--suite-param: {name + sign!r} is not NAME=VALUE")
    return MappingProxyType({name: value for name, _, value in pairs})
