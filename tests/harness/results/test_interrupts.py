"""Ctrl-C in the middle of a transaction: it comes out as itself, and leaves no lock and no half."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
from sqlalchemy import Engine, event

from harness.errors import StoreError, StoreLockedError
from harness.results.interrupts import interrupts_first
from harness.results.records import Run
from harness.results.store import ResultsStore
from tests.harness.results.places import Place, PostgresqlPlace

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.timeout(900)
_COMMITS = frozenset(["commit", "_commit_impl", "_deactivate_from_connection", "_do_commit"])
_ENDS = _COMMITS | frozenset(
    [
        "__exit__",
        "__init__",
        "begin",
        "close",
        "rollback",
        "_close_impl",
        "_close_connection",
        "_do_close",
        "_do_rollback",
        "_finalize_fairy",
        "_rollback_impl",
        "invalidate",
    ]
)
"""Functions of SQLAlchemy that begin and end transactions; all lines of an open are thousands."""
_PATIENCE_S = 0.3


class _Cut:
    """Raises at line `number` of these functions, and counts them."""

    def __init__(self, number: int, functions: frozenset[str]) -> None:
        self.number, self.count, self.where = number, 0, ""
        self._functions = functions

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        gc.disable()  # else lines that clean up after others would count, here or there
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _trace(self, frame: FrameType, what: str, _: object) -> Any:  # noqa: ANN401
        code = frame.f_code
        if code.co_name not in self._functions or "/sqlalchemy/" not in code.co_filename:
            return None
        if what == "line":
            self.count += 1
            if self.count == self.number:
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                sys.settrace(self._before)
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.filterwarnings("ignore:.*deassociated")
@pytest.mark.parametrize(
    ("functions", "is_there"), [(_COMMITS, False), (_ENDS, True)], ids=["new", "existing"]
)
def test_an_interrupt_comes_out_of_opening_wherever_it_falls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, functions: frozenset[str], *, is_there: bool
) -> None:
    caplog.set_level("CRITICAL")  # SQLAlchemy tells of what it could not close
    path = tmp_path / "warm.db"
    ResultsStore.open(path).close()
    wrong, number = [], 0
    while True:
        number += 1
        path = path if is_there else tmp_path / f"{number}.db"
        cut, after = _cut_opening(str(path), number, functions, patience_s=_PATIENCE_S)
        if not cut:
            break
        wrong += after
    assert not wrong, "\n".join(wrong)
    assert number > (200 if is_there else 20)


@pytest.mark.filterwarnings("ignore:.*deassociated")
def test_an_interrupt_comes_out_of_opening_a_servers_database(
    postgresql: PostgresqlPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """Every line that ends a transaction; beginning it is SQLAlchemy's for both engines."""
    caplog.set_level("CRITICAL")
    wrong, number = [], 0
    while True:
        number += 1
        cut, after = _cut_opening(postgresql.location, number, _COMMITS, patience_s=60)
        if not cut:
            break
        wrong += after
    assert not wrong, "\n".join(wrong)
    assert number > 20


def _cut_opening(
    location: str, number: int, functions: frozenset[str], *, patience_s: float
) -> tuple[str, list[str]]:
    """Where an interrupt fell into opening, and what was wrong then."""
    wrong = []
    cut = _Cut(number, functions)
    ended: BaseException | None = None
    try:
        with cut:
            ResultsStore.open(location).close()
    except BaseException as error:  # noqa: BLE001
        ended = error  # and with it all frames that hold cursors and connections
    if not cut.where:
        return "", []
    # Where SQLAlchemy closes what is done already, it logs what goes wrong, and goes on.
    swallows = "_finalize_fairy" in cut.where or "_close_connection" in cut.where
    if type(ended) is not KeyboardInterrupt and not (swallows and ended is None):
        wrong.append(f"{cut.where}: {ended!r}")
    try:
        with ResultsStore.open(location, busy_timeout_s=patience_s) as store:
            assert store.list_runs() == ()
    except StoreError as error:
        wrong.append(f"{cut.where}: afterwards {error}")
    del ended  # it holds this frame, which holds it
    return cut.where, wrong


@contextmanager
def interrupted_after(words: str) -> Iterator[None]:
    """Ctrl-C falls right after the first statement that begins like that."""

    def strike(*arguments: Any) -> None:  # noqa: ANN401
        if arguments[2].startswith(words):
            event.remove(Engine, "after_cursor_execute", strike)
            raise KeyboardInterrupt

    event.listen(Engine, "after_cursor_execute", strike)
    yield
    assert not event.contains(Engine, "after_cursor_execute", strike), "nothing was struck"


@pytest.mark.parametrize("words", ["SELECT runs.status", "INSERT INTO measurements"])
def test_an_interrupted_write_leaves_no_lock(place: Place, make_run: MakeRun, words: str) -> None:
    """While the traceback lives, so do its cursors; the run is finished in spite of them."""
    run = make_run()
    with ResultsStore.open(place.location, busy_timeout_s=_patience_s(place)) as store:
        with (
            pytest.raises(KeyboardInterrupt) as caught,
            interrupted_after(words),
            store.recording(run) as recorder,
        ):
            recorder.add_values({"init_s": 1.0})
        kept = store.get_run(run.id)
        assert (kept.status, kept.measurements) == ("interrupted", ())
        del caught


def _patience_s(place: Place) -> float:
    """A server sees a closed connection a little later; a SQLite lock is gone with it."""
    return _PATIENCE_S if place.engine == "sqlite" else 60


@pytest.mark.parametrize("error", [KeyboardInterrupt("cut"), RuntimeError("lost")])
def test_a_store_that_fails_hides_nothing(
    place: Place, make_run: MakeRun, error: BaseException
) -> None:
    with (  # noqa: PT012
        contextlib.ExitStack() as other,
        ResultsStore.open(place.location, busy_timeout_s=0.1) as store,
        pytest.raises(type(error)) as caught,
        store.recording(make_run()),
    ):
        other.enter_context(place.held())
        raise error
    assert caught.value is error
    assert any("stayed locked" in note for note in error.__notes__)


def test_an_error_of_somebody_elses_interrupt_stays_an_error(
    place: Place, make_run: MakeRun
) -> None:
    with ResultsStore.open(place.location, busy_timeout_s=0.1) as store, place.held():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with pytest.raises(StoreLockedError):
                store.write_run(make_run())


def test_only_an_interrupt_goes_first() -> None:
    def fail() -> None:
        try:
            raise OSError("a file")
        finally:
            raise ValueError("a value")

    with pytest.raises(ValueError, match="a value"), interrupts_first():
        fail()
