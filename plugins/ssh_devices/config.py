"""Connection settings of a host, as OpenSSH's own client reads its configuration."""

import os
import pwd
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HostError, one_line

# What a shell obeys is refused, for a name may come to stand in a ProxyCommand.
_TARGET = re.compile(
    r"(?:(?P<user>[^-@\s'\"`;&<>|(){}][^@\s'\"`;&<>|(){}]*)@)?"
    r"(?:\[(?P<literal>[0-9A-Za-z:.%_-]+)\]"
    r"|(?P<name>[^-@\[\]\s'\"`$\\;&<>|(){}][^@\[\]\s'\"`$\\;&<>|(){}]*?))"
    r"(?::(?P<port>\d{1,5}))?"
)
_MOST_JUMPS = 8
_ASK_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 15
_ADB_PORT = re.compile(r"ANDROID_ADB_SERVER_PORT=(\d{1,5})")
_TOKEN = re.compile(r"%(.?)")


@dataclass(frozen=True, slots=True)
class SshHostConfig:
    """A host, and how to get there and in.

    Attributes:
        asked: the host as the user named it.
        known_as: its name in known_hosts files.
        key_files: private keys to try, in order; they need not exist.
        only_these_keys: an agent's other keys are not tried.
        known_hosts: files of host keys; they need not exist.
        revoked_keys: files of keys that no host may show (`RevokedHostKeys`); they must exist.
        jump: the host that it is reached through.
        proxy_command: the shell's command that it is reached through; empty if there is none.
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
    revoked_keys: tuple[Path, ...]
    jump: "SshHostConfig | None"
    proxy_command: str
    connect_timeout_s: float
    keepalive_s: int
    adb_port: int | None


def resolve_host(asked: str, config_file: Path | None = None) -> SshHostConfig:
    """Resolve `HOST`, `USER@HOST`, either with `:PORT`, as `ssh -G` does.

    Args:
        config_file: in place of `~/.ssh/config` and the system's; it need not exist.

    Raises:
        HostError: the configuration cannot be used, or has a setting that is not supported.
    """
    return _resolve(asked, config_file, (), ())


def _resolve(
    asked: str, config_file: Path | None, via: tuple[str, ...], jumps: Sequence[str]
) -> SshHostConfig:
    """Resolve a host; `jumps` lead there instead of those of its own configuration."""
    match = _TARGET.fullmatch(asked)
    if not match:
        raise HostError(asked, "a host is HOST, USER@HOST or one of them with :PORT")
    if len(via) > _MOST_JUMPS or asked in via:
        raise HostError(asked, "ProxyJump leads in a circle")
    name = match["literal"] or match["name"]
    words = ["-l", match["user"]] if match["user"] else []
    words += ["-p", match["port"]] if match["port"] else []
    words += ["--", name]
    settings = _settings(asked, config_file, words)
    if not jumps and "proxyjump" in settings:
        jumps = [jump.strip() for jump in settings["proxyjump"].split(",")]
    command = "" if jumps else settings.get("proxycommand", "")
    if command and settings.get("proxyusefdpass") == "yes":
        raise HostError(asked, "ProxyUseFdpass is not supported")
    tokens = {"%": "%", "h": settings["hostname"], "n": name, "p": settings["port"]}
    tokens["r"] = settings["user"]
    port = int(settings["port"])
    at_port = settings["hostname"] if port == 22 else f"[{settings['hostname']}]:{port}"
    places = ("userknownhostsfile", "globalknownhostsfile")
    known_hosts = " ".join(settings.get(place, "none") for place in places)
    setenv = _ADB_PORT.search(settings.get("setenv", ""))
    return SshHostConfig(
        asked=asked,
        hostname=settings["hostname"],
        port=port,
        user=settings["user"],
        known_as=settings.get("hostkeyalias") or at_port,
        key_files=_files(_expanded(asked, config_file, words, settings.get("identityfile", ""))),
        only_these_keys=settings["identitiesonly"] == "yes",
        # Names may contain spaces, which `ssh -G` does not quote; they are absolute.
        known_hosts=_files(re.split(r" (?=[/~]|none\b)", known_hosts)),
        revoked_keys=_files(
            _expanded(asked, config_file, words, settings.get("revokedhostkeys", ""))
        ),
        # The hosts before the last lead to the last; the first is reached as it says itself.
        jump=_resolve(jumps[-1], config_file, (*via, asked), jumps[:-1]) if jumps else None,
        proxy_command=_expand_command(asked, command, tokens),
        connect_timeout_s=_number(settings, "connecttimeout") or _CONNECT_TIMEOUT_S,
        keepalive_s=_number(settings, "serveraliveinterval") or _KEEPALIVE_S,
        adb_port=int(setenv[1]) if setenv and 0 < int(setenv[1]) < 65536 else None,
    )


def _settings(asked: str, config_file: Path | None, words: Sequence[str]) -> Mapping[str, str]:
    """Return the settings that `ssh -G` prints for the host in `words`; repeated ones by line."""
    try:
        result = subprocess.run(
            ["ssh", "-G", "-T", *_config_option(config_file), *words],  # noqa: S607 - the user's
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        reason = "the program `ssh`, which reads it, is missing: install OpenSSH's client"
        raise HostError(asked, reason) from None
    except subprocess.TimeoutExpired:
        reason = f"`ssh -G` takes longer than {_ASK_TIMEOUT_S:g} s: see its `Match exec`"
        raise HostError(asked, reason) from None
    except (OSError, ValueError) as error:
        raise HostError(asked, one_line(str(error))) from None
    if result.returncode:
        raise HostError(asked, one_line(os.fsdecode(result.stderr)))
    settings: dict[str, str] = {}
    for line in os.fsdecode(result.stdout).splitlines():
        key, _, value = line.partition(" ")
        settings[key] = f"{settings[key]}\n{value}" if key in settings else value
    return settings


def _config_option(config_file: Path | None) -> list[str]:
    """Return `-F FILE` where it is needed: OpenSSH finds its configuration not by `HOME`."""
    file = config_file or Path(os.path.expanduser("~/.ssh/config"))  # noqa: PTH111 - never raises
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = ""
    if config_file is None and file == Path(home, ".ssh", "config"):
        return []
    return ["-F", str(file) if file.exists() else "none"]


def _expanded(
    asked: str, config_file: Path | None, words: Sequence[str], names: str
) -> Iterator[str]:
    """Expand tokens in the names of files, as known_hosts files: `ssh -G` expands no others."""
    for name in names.splitlines():
        if "%" not in name and "${" not in name:
            yield name
            continue
        option = f'UserKnownHostsFile="{name}"'
        yield _settings(asked, config_file, ["-o", option, *words])["userknownhostsfile"]


def _expand_command(asked: str, command: str, tokens: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            reason = f"its ProxyCommand has the token {match[0]!r}, which is unknown"
            raise HostError(asked, reason)
        return tokens[match[1]]

    return _TOKEN.sub(value, command)


def _files(names: Iterable[str]) -> tuple[Path, ...]:
    paths = (os.path.expanduser(name) for name in names if name != "none")  # noqa: PTH111
    return tuple(Path(path) for path in paths)


def _number(settings: Mapping[str, str], key: str) -> int:
    """Return a number of seconds; 0 where none is set."""
    value = settings.get(key, "")
    return int(value) if value.isdecimal() else 0
