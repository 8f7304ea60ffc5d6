"""Site of a report: a page for each run, with shared style and scripts, for histories of any size.

Run pages are written once, as a run that has ended does not change. They are written again when
another qnnfarm, or another style, makes them.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from buildlib.files import atomic_write_bytes
from harness.results.provenance import own_version
from harness.results.published import FILE, publish
from harness.results.records import Run
from harness.results.store import ResultsStore, RunFilter
from reports import html_file, page
from reports.errors import ReportError, cannot_write
from reports.history import find_runs_before
from reports.page import Page

STAMP = "assets/stamp"
_BATCH = 200


def write(composed: Page, location: str, folder: Path, generated_at: datetime) -> int:
    """Write the site, and return the number of run pages that were written.

    Args:
        location: the results database, from which runs are read part by part.

    Raises:
        ReportError: the folder is a file, or holds something else; it cannot be written, as on a
            full disk.
        StoreError: the database cannot be read.
    """
    _check(folder)
    stamp = _stamp()
    is_ours = _read(folder / STAMP) == stamp
    runs = [one.run for one in composed.results.measured]
    outdated = [
        run
        for run in runs
        if not is_ours or run.status == "running" or not (folder / f"runs/{run.id}.html").exists()
    ]
    before = find_runs_before(composed.results.groups, {run.id for run in runs})
    with ResultsStore.open(location, create=False) as store:
        for start in range(0, len(outdated), _BATCH):
            part = outdated[start : start + _BATCH]
            _write_runs(composed, store, part, before, folder, generated_at)
    for name, content in html_file.render_site(composed, generated_at):
        _write(folder / name, content)
    _write(folder / STAMP, stamp)
    return len(outdated)


def write_public(location: str, wanted: RunFilter, folder: Path, generated_at: datetime) -> int:
    """Write a site that can be published, with every repetition as CSV and Parquet.

    It is a site of other runs: copies without what names people, places and single devices.

    Returns:
        The number of runs.

    Raises:
        ReportError: as for `write`, or there is nothing to publish.
        WrongUseError: pyarrow is not installed.
        StoreError: the database cannot be read.
    """
    from harness.results.data_frames import encode, frames  # slow to import

    _check(folder)
    with ResultsStore.open(location, create=False) as store:
        runs = publish(store.list_runs(replace(wanted, status="done")))
    runs = tuple(run for run in runs if run.measurements)
    if not runs:
        raise ReportError(f"nothing to publish: {location} has no such results")
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
        copy = f"{scratch}/results.db"
        with ResultsStore.open(copy) as store:
            store.add_runs(runs)
        results = replace(page.load(copy), location="results.db", is_public=True)
        table = frames(copy).repetitions.dropna(axis="columns", how="all")
        data = {FILE: encode(table, "csv"), "results.parquet": encode(table, "parquet")}
        shutil.rmtree(folder / "runs", ignore_errors=True)  # of devices by other numbers
        write(page.compose(results), copy, folder, generated_at)
    for name, content in data.items():
        _write(folder / name, content)
    return len(runs)


def _write_runs(
    composed: Page,
    store: ResultsStore,
    part: Sequence[Run],
    before: dict[str, str],
    folder: Path,
    generated_at: datetime,
) -> None:
    ids = {run.id for run in part}
    both = sorted(ids | {before.get(run_id, run_id) for run_id in ids})
    run_of = {run.id: run for run in store.get_runs(both)}
    for run_id in ids & run_of.keys():
        earlier = run_of.get(before.get(run_id, ""))
        name, content = render_run(composed, store, run_of[run_id], earlier, generated_at)
        _write(folder / name, content)


def render_run(
    composed: Page, store: ResultsStore, run: Run, before: Run | None, generated_at: datetime
) -> tuple[str, str]:
    """Render the page of one run, and return its name and content.

    Args:
        before: the run before it in its series, to stand beside.
    """
    kept = page.read_kept(store, store.artifacts(run.id))
    one = page.run_page(run, store.telemetry(run.id), before, kept)
    return html_file.render_site_run(composed, one, generated_at)


def _check(folder: Path) -> None:
    """Refuse a folder that is no site: its files would be mixed with others."""
    try:
        if folder.exists() and not folder.is_dir():
            raise cannot_write(folder, "it is a file")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "assets").is_dir():
            raise cannot_write(folder, "it is a folder with other files in it")
        if not folder.absolute().parent.is_dir():
            raise cannot_write(folder, "the folder around it does not exist")
    except OSError as error:
        raise cannot_write(folder, error) from error


def _stamp() -> str:
    assets = html_file.load_assets()
    content = repr((own_version(), assets))
    return hashlib.sha256(content.encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise cannot_write(path, error) from error
