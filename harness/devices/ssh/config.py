"""Connection settings of a host, from `~/.ssh/config`."""

import getpass
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import paramiko

from harness.errors import HostConfigError

_TARGET = re.compile(
    r"(?:(?P<user>[^@]+)@)?(?:\[(?P<literal>[0-9A-Za-z:.%_-]+)\]|(?P<name>[^@\[\]]+?))(?::(?P<port>\d{1,5}))?"
)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 15
_ADB_PORT = re.compile(r"ANDROID_ADB_SERVER_PORT=(\d{1,5})")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """A host, and how to get there and in.

    Attributes:
        asked: the host as the user named it.
        known_as: its name in known_hosts files.
        key_files: private keys to try, in order; they need not exist.
        only_these_keys: an agent's other keys are not tried.
        known_hosts: files of host keys; they need not exist.
        jump: the host that it is reached through.
        connect_timeout_s: for the connection to stand, authentication included.
        adb_port: where the host's adb server listens, if the configuration says so.
    """

    asked: str
    hostname: str
    port: int
    user: str
    known_as: str
    key_files: tuple[Path, ...]
    only_these_keys: bool
    known_hosts: tuple[Path, ...]
    jump: "HostConfig | None"
    connect_timeout_s: float
    keepalive_s: int
    adb_port: int | None


def resolve_host(asked: str, config_file: Path | None = None) -> HostConfig:
    """The host `HOST`, `USER@HOST`, either with `:PORT`, as the user's configuration knows it.

    `config_file` is `~/.ssh/config` unless given; that it does not exist is no error.

    Raises:
        HostConfigError: the configuration cannot be used, or asks for what is not supported.
    """
    return _resolve(asked, _read(asked, config_file or Path("~/.ssh/config").expanduser()), ())


def _read(asked: str, path: Path) -> paramiko.SSHConfig:
    try:
        return paramiko.SSHConfig.from_path(str(path))
    except FileNotFoundError:
        return paramiko.SSHConfig()
    except (OSError, UnicodeDecodeError, paramiko.SSHException) as error:
        raise HostConfigError(asked, f"{path} cannot be used: {error}") from None


def _resolve(asked: str, config: paramiko.SSHConfig, via: tuple[str, ...]) -> HostConfig:
    match = _TARGET.fullmatch(asked)
    if not match:
        raise HostConfigError(asked, "a host is HOST, USER@HOST or one of them with :PORT")
    if len(via) > 8 or asked in via:
        raise HostConfigError(asked, "ProxyJump leads in a circle")
    name = match["literal"] or match["name"]
    try:
        options = config.lookup(name)
    except Exception as error:
        # Match and CanonicalizeHostname fail in many ways, none of which paramiko names.
        raise HostConfigError(asked, f"{type(error).__name__}: {error}") from error
    if options.get("proxycommand", "none") != "none":
        raise HostConfigError(asked, "ProxyCommand is not supported: use ProxyJump")
    port = int(match["port"] or _number(asked, options, "port", 22))
    alias = options.get("hostkeyalias")
    known_as = options["hostname"] if port == 22 else f"[{options['hostname']}]:{port}"
    jump = options.get("proxyjump", "none")
    first, *rest = reversed(jump.split(","))
    if rest:
        raise HostConfigError(asked, "several hosts in one ProxyJump: give each its own ProxyJump")
    keys = options.get("identityfile", [f"~/.ssh/{key}" for key in _DEFAULT_KEYS])
    return HostConfig(
        asked=asked,
        hostname=options["hostname"],
        port=port,
        user=match["user"] or options.get("user") or getpass.getuser(),
        known_as=alias or known_as,
        key_files=tuple(Path(key).expanduser() for key in keys),
        only_these_keys=options.get("identitiesonly", "no").lower() == "yes",
        known_hosts=_known_hosts(options),
        jump=None if first == "none" else _resolve(first.strip(), config, (*via, asked)),
        connect_timeout_s=float(_number(asked, options, "connecttimeout", 0) or _CONNECT_TIMEOUT_S),
        keepalive_s=_number(asked, options, "serveraliveinterval", 0) or _KEEPALIVE_S,
        adb_port=_adb_port(options),
    )


def _known_hosts(options: Mapping[str, str]) -> tuple[Path, ...]:
    own = shlex.split(options.get("userknownhostsfile", " ".join(_KNOWN_HOSTS)))
    everyones = shlex.split(options.get("globalknownhostsfile", " ".join(_GLOBAL_KNOWN_HOSTS)))
    return tuple(Path(name).expanduser() for name in (*own, *everyones) if name != "none")


def _adb_port(options: Mapping[str, str]) -> int | None:
    match = _ADB_PORT.search(str(options.get("setenv", "")))
    return int(match[1]) if match and 0 < int(match[1]) < 65536 else None


def _number(asked: str, options: Mapping[str, str], key: str, default: int) -> int:
    value = options.get(key, str(default))
    if not re.fullmatch(r"\d{1,5}", value):
        raise HostConfigError(asked, f"{key} {value!r} is no number")
    return int(value)
