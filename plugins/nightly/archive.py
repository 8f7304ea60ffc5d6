"""Folder of a plan's nights: a folder each with record and report, and an index page."""

import importlib.metadata
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from buildlib.files import atomic_write_bytes
from harness.console import print_remark
from harness.errors import HostFileError, NightlyBusyError
from plugins.nightly.night import FORMAT, NIGHT, Night

INDEX = "index.html"
RECORD = "night.json"
REPORT = "report.html"
_NIGHT = re.compile(NIGHT)
_NOON = timedelta(hours=12)


class Archive:
    """The nights of one plan in a folder, which one process at a time works on."""

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder = folder
        self._plan = plan

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out.

        Raises:
            NightlyBusyError: another one works on a night of this plan.
            HostFileError: the folder cannot be used, or belongs to another plan.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise NightlyBusyError(str(self.folder)) from None
        except OSError as error:
            raise HostFileError(str(self.folder), error.strerror or str(error)) from error
        try:
            other = next((n.plan for n in self.nights() if n.plan != self._plan), None)
            if other is not None:
                reason = f"it has the nights of the plan {other}: give each plan its own `reports`"
                raise HostFileError(str(self.folder), reason)
            yield
        finally:
            lock.release()

    def nights(self) -> list[Night]:
        """Read all records, oldest first; leave out other files."""
        nights = []
        for path in self.folder.glob(f"*/{RECORD}"):
            if not _NIGHT.fullmatch(path.parent.name):
                continue
            night = _read(path)
            if night is not None:
                nights.append(night)
        return sorted(nights, key=lambda night: (night.began_at, night.name))

    def path(self, night: Night) -> Path:
        """Return the folder of a night."""
        return self.folder / night.name

    def save(self, night: Night) -> None:
        """Write the record of a night, atomically."""
        self._write(self.path(night) / RECORD, night.model_dump_json(indent=1))

    def prune(self, keep: int) -> None:
        """Remove all nights but the newest, and the newest with an answer; other files stay."""
        nights = self.nights()
        names = {night.name for night in nights[-keep:]}
        names |= {night.name for night in [night for night in nights if night.is_over][-1:]}
        for night in nights:
            if night.name not in names:
                shutil.rmtree(self.path(night), ignore_errors=True)

    def write_index(self, now: datetime) -> Path:
        """Write the page that lists the nights, newest first."""
        from reports import html_file  # loads slowly

        template = html_file.make_environment("plugins.nightly").get_template("index.html.j2")
        page = template.render(
            style=html_file.read_template("style.css"),
            plan=self._plan,
            nights=self.nights()[::-1],
            report=REPORT,
            now=now,
            version=importlib.metadata.version("qnnfarm"),
        )
        path = self.folder / INDEX
        self._write(path, page)
        return path

    def _write(self, path: Path, text: str) -> None:
        try:
            atomic_write_bytes(path, text.encode())
        except OSError as error:
            raise HostFileError(str(path), error.strerror or str(error)) from error


def night_name(moment: datetime) -> str:
    """Name the night of a moment: the date of its evening; a night lasts from noon to noon."""
    return f"{moment - _NOON:%Y-%m-%d}"


def next_name(name: str, taken: set[str]) -> str:
    """Name another night of the same date: `2026-11-22.2`."""
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


def _read(path: Path) -> Night | None:
    try:
        night = Night.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        print_remark(f"{path} is no record of a night, and left out: {error}")
        return None
    if night.format > FORMAT:
        raise HostFileError(str(path), "a newer qnnfarm wrote it: update qnnfarm")
    return night if night.name == path.parent.name else None
