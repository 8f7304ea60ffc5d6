"""The content store of a device: `WORK_ROOT/store/SHA256`.

Files are pushed into an area of this deployment alone, `incoming/RANDOM`, and moved into the store
by `verify.sh -a`, which hashes each on the device first. So an interruption at any point leaves no
bad entry, and several hosts may fill one store.
"""

import contextlib
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.deploy.budget import Budget
from harness.deploy.hashing import FileDigest
from harness.devices.base import Device, PushItem
from harness.errors import (
    AdbServerError,
    DeploymentCorruptError,
    DeviceCommandError,
    DeviceFullError,
    DeviceLostError,
    HarnessError,
)

Progress = Callable[[int, int], None]
"""Called with the bytes pushed so far and the bytes to push."""

_MARGIN_BYTES = 8 << 20
_STALE_MINUTES = 60
_STALE_AREA_MINUTES = 24 * 60
_CLEAN_TIMEOUT_S = 10.0
_ANSWER = re.compile(r"(ok|missing|bad) ([0-9a-f]{64})")
_ENTRY = re.compile(r"(?:\./)?([0-9a-f]{64}) ([0-9]{1,18}) ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A content that a device holds; `used_at` is when it was last put there, since 1970."""

    sha256: str
    size: int
    used_at: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the store of a device holds, oldest first."""

    entries: tuple[StoreEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return sum(entry.size for entry in self.entries)


class DeviceStore:
    """The store of `device`, worked on by the scripts in `scripts_dir` there."""

    def __init__(self, device: Device, scripts_dir: str, budget: Budget) -> None:
        self._device = device
        self._scripts = scripts_dir
        self._budget = budget
        self._root = shlex.quote(device.work_root)

    def holds(self, contents: Sequence[FileDigest]) -> set[str]:
        """Which of `contents` the device really holds, hashed there.

        The folders are made where they are missing. What is there under a right name with a
        wrong content, and what was left behind by deployments long dead, is removed.
        """
        # A file's time tells since when nothing was written to it; a folder's says less.
        stale = (
            f"find incoming -type f -mmin +{_STALE_MINUTES} -exec rm -f {{}} +; find incoming "
            f"-mindepth 1 -maxdepth 1 -mmin +{_STALE_AREA_MINUTES} -exec rm -rf {{}} +"
        )
        script = (
            f"{self._script('setup.sh')} {self._root} >/dev/null || exit\n"
            f"(cd {self._root} && {{ {stale}; }}) 2>/dev/null\n"
            f"exec {self._script('verify.sh')} {self._root}"
        )
        answers = self._verify(script, contents)
        bad = [sha256 for sha256, answer in answers.items() if answer == "bad"]
        if bad:
            paths = " ".join(f"store/{sha256}" for sha256 in bad)
            self._shell(f"cd {self._root} && rm -rf {paths}")
        return {sha256 for sha256, answer in answers.items() if answer == "ok"}

    def add(self, contents: Mapping[FileDigest, Path], on_progress: Progress | None = None) -> None:
        """Bring files of this host into the store.

        Raises:
            DeviceFullError: they do not fit; nothing of them stays.
            DeploymentCorruptError: one arrived with another content; it was removed.
        """
        if not contents:
            return
        total = sum(digest.size for digest in contents)
        self._require_space(total)
        area = f"{self._device.work_root}/incoming/{secrets.token_hex(8)}"
        try:
            self._push(contents, area, total, on_progress)
            self._adopt(contents, area)
        except DeviceFullError:
            self._remove(area)
            raise self._full(total) from None
        except (DeviceLostError, AdbServerError):
            raise  # nobody is there to clean up; a later deployment will
        except BaseException:
            self._remove(area)
            raise
        self._remove(area)

    def link(self, run_id: str, files: Sequence[tuple[str, FileDigest, bool]]) -> str:
        """Make the folder of a run out of (name, content, executable); gives its path.

        Raises:
            DeviceCommandError: the run exists already, or a content is not in the store.
        """
        lines = [
            f"{digest.sha256} {name} {'0755' if executable else '0644'}\n"
            for name, digest, executable in files
        ]
        command = f"{self._script('link.sh')} {self._root} {shlex.quote(run_id)}"
        output = self._shell(command, "".join(lines))
        folder = re.search(r"^run_dir=(/.*)$", output, re.MULTILINE)
        if folder is None:
            raise DeviceCommandError(self._device.serial, command, 0, output)
        return folder[1]

    def usage(self) -> StoreUsage:
        """What is in the store, without hashing it."""
        output = self._shell(
            f"cd {self._root}/store 2>/dev/null || exit 0\n"
            "find . -maxdepth 1 -type f -exec stat -c '%n %s %Z' {} +"
        )
        matches = filter(None, map(_ENTRY.fullmatch, output.splitlines()))
        entries = [StoreEntry(m[1], int(m[2]), int(m[3])) for m in matches]
        return StoreUsage(tuple(sorted(entries, key=lambda entry: entry.used_at)))

    def _push(
        self,
        contents: Mapping[FileDigest, Path],
        area: str,
        total: int,
        on_progress: Progress | None,
    ) -> None:
        sent = 0

        def progress(count: int) -> None:
            nonlocal sent
            sent += count
            if on_progress:
                on_progress(sent, total)

        items = [PushItem(path, f"{area}/incoming/{d.sha256}") for d, path in contents.items()]
        self._device.push_many(items, timeout_s=self._budget.left(), on_progress=progress)

    def _adopt(self, contents: Mapping[FileDigest, Path], area: str) -> None:
        """Move what has arrived into the store, each file after it was hashed there.

        `verify.sh` looks for `incoming` and `store` in the folder it is given: the area of this
        deployment alone, with the common store linked into it.
        """
        script = (
            f"cd {shlex.quote(area)} && ln -s ../../store store || exit\n"
            f"exec {self._script('verify.sh')} -a ."
        )
        answers = self._verify(script, list(contents))
        for digest, path in contents.items():
            if answers.get(digest.sha256) != "ok":
                command = ["sha256sum", f"{area}/incoming/{digest.sha256}"]
                result = self._device.shell(command, timeout_s=self._budget.left(), check=False)
                found = result.stdout.split(" ")[0][:64]
                raise DeploymentCorruptError(self._device.serial, path.name, digest.sha256, found)

    def _remove(self, area: str) -> None:
        with contextlib.suppress(HarnessError):
            self._device.shell(["rm", "-rf", area], timeout_s=_CLEAN_TIMEOUT_S, check=False)

    def _require_space(self, needed: int) -> None:
        free = self._device.free_bytes(timeout_s=self._budget.left())
        if free is not None and free < needed + _MARGIN_BYTES:
            raise DeviceFullError(
                self._device.serial, self._device.work_root, needed + _MARGIN_BYTES, free
            )

    def _full(self, needed: int) -> DeviceFullError:
        free = None
        with contextlib.suppress(HarnessError):
            free = self._device.free_bytes(timeout_s=_CLEAN_TIMEOUT_S)
        return DeviceFullError(self._device.serial, self._device.work_root, needed, free)

    def _verify(self, script: str, contents: Sequence[FileDigest]) -> dict[str, str]:
        lines = "".join(f"{digest.sha256} {digest.size}\n" for digest in contents)
        result = self._device.shell(
            script, timeout_s=self._budget.left(), stdin=lines.encode(), check=False
        )
        if "\nqnnfarm-verify ok=" not in f"\n{result.stdout}":
            if "full" in result.stderr:
                raise self._full(0)
            log = result.stderr.strip() or result.stdout
            raise DeviceCommandError(self._device.serial, "verify.sh", result.exit_status, log)
        matches = filter(None, map(_ANSWER.fullmatch, result.stdout.splitlines()))
        return {match[2]: match[1] for match in matches}

    def _shell(self, command: str, stdin: str | None = None) -> str:
        data = None if stdin is None else stdin.encode("utf-8", "surrogateescape")
        return self._device.shell(command, timeout_s=self._budget.left(), stdin=data).stdout

    def _script(self, name: str) -> str:
        return f"sh {shlex.quote(f'{self._scripts}/{name}')}"
