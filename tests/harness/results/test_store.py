"""Runs go into the store and come out as they were."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import Engine, event

from harness.errors import (
    CorruptRunError,
    NotStoredError,
    RunConflictError,
    StoreUnavailableError,
    WrongUseError,
)
from harness.results.metrics import Measurement
from harness.results.records import (
    ContainerInfo,
    PerplexityDefinition,
    Run,
    WorkloadRecord,
    now,
    to_storable,
)
from harness.results.run_recorder import RunRecorder
from harness.results.store import LATEST, ResultsStore, RunFilter
from tests.harness.results.places import Place, make_run
from tests.reports.conftest import changed

BOTH_ENGINES = True

REPETITIONS = (
    Measurement(metric="decode_tokens_per_s", value=16.1, repetition=0, is_warmup=True),
    Measurement(metric="decode_tokens_per_s", value=17.0, repetition=0),
    Measurement(metric="decode_tokens_per_s", value=17.1, repetition=1),
    Measurement(metric="ttft_s", value=0.9, repetition=0),
)


def as_set(run: Run) -> tuple[Run, frozenset[Measurement]]:
    """A run for comparison: measurements have no order of their own."""
    return run.model_copy(update={"measurements": ()}), frozenset(run.measurements)


def test_a_run_comes_back_as_it_was_written(store: ResultsStore) -> None:
    run = make_run(
        kind="perplexity",
        status="done",
        finished_at=datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5))),
        generated_text="In the beginning\n\t“God” 🜁",
        workload=WorkloadRecord(
            runner="genie_t2t_run.py",
            dataset_sha256="b" * 64,
            perplexity=PerplexityDefinition(positions="first_cl_minus_ar", windows=3, tokens=288),
        ),
        measurements=REPETITIONS,
    )
    store.write_run(run)
    assert as_set(store.get_run(run.id)) == as_set(run)


def test_a_run_streams_in(store: ResultsStore) -> None:
    run = make_run()
    with store.recording(run) as recorder:
        recorder.add_values({"decode_tokens_per_s": 16.0}, is_warmup=True)
        assert store.get_run(run.id).status == "running"
        recorder.add_values({"decode_tokens_per_s": 17.0, "ttft_s": 0.5}, repetition=0)
        assert store.get_run(run.id).values("ttft_s") == (0.5,)
        recorder.generated_text = "light"
    kept = store.get_run(run.id)
    assert (kept.status, kept.error, kept.generated_text) == ("done", None, "light")
    assert (kept.finished_at or kept.created_at) > kept.created_at


def test_versions_that_a_run_finds_out_are_kept(store: ResultsStore) -> None:
    run = make_run()
    with store.recording(run) as recorder:
        recorder.add_library_versions({"genie": "1.21", "qnn": "2.51"})
        with pytest.raises(RunConflictError, match=r"1\.21 of genie, not 1\.22"):
            recorder.add_library_versions({"genie": "1.22"})
    kept = store.get_run(run.id).provenance.library_versions
    assert kept == {"genie": "1.21", "qnn": "2.51"}
    with pytest.raises(RunConflictError, match="done already"):
        RunRecorder(store.database, run).add_library_versions({"x": "1"})


def test_a_failure_is_kept_with_what_was_measured_before(store: ResultsStore) -> None:
    run = make_run()
    with pytest.raises(RuntimeError), store.recording(run) as recorder:  # noqa: PT012
        recorder.add_values({"init_s": 1.0})
        raise RuntimeError("the device went away")
    kept = store.get_run(run.id)
    assert (kept.status, kept.error) == ("failed", "the device went away")
    assert kept.values("init_s") == (1.0,)


def test_a_run_that_died_on_another_host_does_not_run_for_good(
    store: ResultsStore, place: Place
) -> None:
    begun = {hours: make_run(created_at=now() - timedelta(hours=hours)) for hours in (1, 25)}
    for run in begun.values():
        store.begin_run(run)
    place.run("UPDATE runs SET writer = 'boot:1:2:3'")
    with ResultsStore.open(place.location, create=False) as reader:
        statuses = {hours: reader.get_run(run.id).status for hours, run in begun.items()}
    assert statuses == {1: "running", 25: "interrupted"}
    assert place.rows("SELECT count(*) FROM runs WHERE status = 'running'") == [(1,)]
    # It lives after all, and finishes.
    RunRecorder(store.database, begun[25]).finish()
    assert store.get_run(begun[25].id).status == "done"


def test_a_cell_of_a_plan_is_done_once_however_often_it_ran(
    store: ResultsStore, place: Place
) -> None:
    cell = {"plan": "nightly", "group_id": "e" * 32, "session": 3}
    dead = store.begin_run(make_run(**cell))  # the first try's worker lives on, cut off
    tries = [store.begin_run(make_run(**cell)) for _ in range(4)]
    assert store.get_run(dead.run.id).status == "interrupted"
    tries.append(dead)

    def finish(one: RunRecorder) -> None:
        with ResultsStore.open(place.location) as own:
            RunRecorder(own.database, one.run).finish()

    with ThreadPoolExecutor(len(tries)) as threads:
        list(threads.map(finish, tries))
    statuses = sorted(store.get_run(one.run.id).status for one in tries)
    assert statuses == ["done", *["interrupted"] * 4]
    others = [make_run(**cell | {"session": 4}), *(make_run(group_id="e" * 32) for _ in range(2))]
    for run in others:
        store.begin_run(run).finish()
    assert {store.get_run(run.id).status for run in others} == {"done"}


def test_ctrl_c_is_no_failure_of_the_device(store: ResultsStore) -> None:
    run = make_run()
    with pytest.raises(KeyboardInterrupt), store.recording(run):
        raise KeyboardInterrupt
    assert store.get_run(run.id).status == "interrupted"


def test_a_write_is_all_or_nothing(store: ResultsStore) -> None:
    run = make_run(measurements=(*REPETITIONS, REPETITIONS[0]))
    with pytest.raises(RunConflictError, match="repetition"):
        store.write_run(run)
    assert store.list_runs() == ()


def test_contradictions_are_refused(store: ResultsStore) -> None:
    run = make_run()
    recorder = store.begin_run(run)
    with pytest.raises(RunConflictError, match="exists already"):
        store.begin_run(run)
    recorder.add(*REPETITIONS)
    with pytest.raises(RunConflictError, match="repetition"):
        recorder.add(REPETITIONS[0])
    recorder.finish()
    with pytest.raises(RunConflictError, match="done already"):
        recorder.finish()
    with pytest.raises(RunConflictError, match="done already"):
        recorder.add_values({"init_s": 1.0})
    with pytest.raises(NotStoredError):
        RunRecorder(store.database, make_run()).finish()
    with pytest.raises(NotStoredError):
        store.get_run("0" * 32)
    with pytest.raises(ValueError, match="failed"):
        recorder.finish("failed")
    with pytest.raises(ValueError, match="running"):
        store.begin_run(make_run(status="done"))


def test_filters(store: ResultsStore) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    runs = [
        make_run(kind=kind, created_at=start + timedelta(hours=hour), status="done")
        for hour, kind in enumerate(("bench", "generate", "bench"))
    ]
    runs.append(make_run(created_at=start + timedelta(days=1), status="failed", error="no"))
    for number in (2, 1, 0, 3):
        store.write_run(runs[number])
    for wanted, numbers in (
        (RunFilter(), [0, 1, 2, 3]),
        (RunFilter(kind="bench", status="done"), [0, 2]),
        (RunFilter(status="failed", soc="SM8750", emulator=True), [3]),
        (RunFilter(emulator=False), []),
        (RunFilter(since=runs[2].created_at), [2, 3]),
        (RunFilter(newest=2), [2, 3]),
        (RunFilter(model="other"), []),
    ):
        found = [run.id for run in store.list_runs(wanted)]
        assert found == [runs[number].id for number in numbers], wanted


def test_the_newest_are_counted_among_the_wanted_ones(store: ResultsStore, place: Place) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    interrupted, running, lost = [
        make_run(created_at=start + timedelta(hours=hour)) for hour in range(3)
    ]
    for run in (interrupted, running, lost):
        store.begin_run(run)
    RunRecorder(store.database, interrupted).finish("interrupted")

    def ids(wanted: RunFilter) -> list[str]:
        return [run.id for run in store.list_runs(wanted)]

    assert ids(RunFilter(status="interrupted", newest=1)) == [interrupted.id]
    of_nobody = "UPDATE runs SET writer = rtrim(writer, '0123456789') || '0'"  # its start time
    place.run(f"{of_nobody} WHERE id = '{lost.id}'")
    assert ids(RunFilter(status="running", newest=1)) == [running.id]
    assert ids(RunFilter(status="interrupted", newest=2)) == [interrupted.id, lost.id]


_MOMENTS = (
    datetime.min.replace(tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=timezone(timedelta(hours=-11))),
    datetime.max.replace(tzinfo=UTC),
)  # each later than those before


def test_moments_are_kept_to_the_microsecond(store: ResultsStore) -> None:
    for moment in _MOMENTS:
        store.write_run(make_run(created_at=moment, finished_at=moment))
        (kept,) = store.list_runs(RunFilter(since=moment))
        assert kept.created_at == kept.finished_at == moment
        assert kept.created_at.utcoffset() == timedelta(0)


@settings(max_examples=8)
@given(
    value=st.floats(min_value=0, exclude_min=True, max_value=86_400)
    | st.sampled_from([5e-324, 2.2250738585072014e-308, 0.1 + 0.2]),
    more=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70),
)
def test_numbers_are_kept_to_the_bit(store: ResultsStore, value: float, more: float) -> None:
    run = make_run(
        measurements=(Measurement(metric="ttft_s", value=value),),
        conditions=({"waited_s": more, "done": True, "why": None},),
    )
    store.write_run(run)
    kept = store.get_run(run.id)
    assert kept.values("ttft_s") == (value,)
    assert repr(dict(kept.conditions[0])) == repr(dict(run.conditions[0]))


def test_any_text_can_be_looked_for(store: ResultsStore) -> None:
    store.write_run(make_run())
    for text in ("a\0b", "a\ud800b", "'; DROP TABLE runs; --", "%s %(id)s"):
        run = changed(make_run(), container__model=to_storable(text))
        store.write_run(run)
        found = {kept.id: kept.container.model for kept in store.list_runs(RunFilter(model=text))}
        assert run.id in found
        assert set(found.values()) == {to_storable(text)}
        with pytest.raises(NotStoredError):
            store.get_run(text)
        with pytest.raises(NotStoredError):
            store.telemetry(text)
    assert store.list_runs(RunFilter(group_ids=[text])) == ()


@pytest.mark.parametrize("count", [2**31, 2**63, 2**80])
def test_a_count_that_no_engine_keeps_is_refused(count: int) -> None:
    container = make_run().container.model_dump()
    makers: list[Callable[[], object]] = [
        lambda: WorkloadRecord(runner="genie_t2t_run.py", prompt_tokens=count),
        lambda: Measurement(metric="ttft_s", value=1.0, repetition=count),
        lambda: PerplexityDefinition(positions="all", windows=1, tokens=count),
        lambda: ContainerInfo(**{**container, "cl": count}),
        lambda: ContainerInfo(**{**container, "n_splits": count}),
    ]
    for make in makers:
        with pytest.raises(ValidationError):
            make()


def test_the_largest_counts_are_kept(store: ResultsStore) -> None:
    largest = 2**31 - 1
    run = make_run(
        workload=WorkloadRecord(runner="genie_t2t_run.py", prompt_tokens=largest, warmup=largest),
        measurements=(Measurement(metric="ttft_s", value=1.0, repetition=largest),),
    )
    store.write_run(run)
    assert as_set(store.get_run(run.id)) == as_set(run)


def test_records_refuse_nonsense() -> None:
    wrong: tuple[tuple[dict[str, object], str], ...] = (
        ({"status": "failed"}, "failed run needs its error"),
        ({"created_at": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001
        ({"kind": "guess"}, "kind"),
        ({"id": "../../etc"}, "id"),
        ({"conditions": [{"temp": float("nan")}]}, "JSON does not have"),
        ({"measurements": [{"metric": "ttft_s", "value": "0.5"}]}, "value"),
    )
    for changes, reason in wrong:
        with pytest.raises(ValidationError, match=reason):
            make_run(**changes)


@settings(max_examples=10)
@given(
    text=st.text(st.characters(exclude_categories=())),
    key=st.text(st.characters(exclude_categories=())),
)
def test_any_text_can_be_kept(store: ResultsStore, text: str, key: str) -> None:
    run = make_run(
        generated_text=text,
        workload=WorkloadRecord(runner="genie_t2t_run.py", prompt=text, sampler={key: text}),
    )
    recorder = store.begin_run(run)
    recorder.generated_text = text
    recorder.finish("failed", error=f"x{text}")
    kept = store.get_run(run.id)
    assert kept.generated_text == run.generated_text
    assert kept.workload.prompt == run.workload.prompt
    if not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
        assert kept.generated_text == text
        assert kept.error == f"x{text}"


_TAMPERED = {
    "both": [
        ("UPDATE runs SET kind = 'x'", "kind"),
        ("UPDATE runs SET container_sha256 = '<b>'", "sha256"),
        ("UPDATE measurements SET metric = 'speed'", "unknown metric 'speed'"),
        ("UPDATE measurements SET value = -1", "cannot be -1"),
        ("UPDATE runs SET ars = '5'", "ars"),
    ],
    "sqlite": [
        ("UPDATE measurements SET value = 'fast'", "value"),
        ("UPDATE runs SET sampler = '{'", "cannot be read"),
        ("UPDATE runs SET created_at = 'yesterday'", "cannot be read"),
        ("UPDATE runs SET ars = 5", "ars"),
    ],
    "postgresql": [
        ("UPDATE measurements SET value = 'NaN'", "cannot be nan"),
        ("UPDATE measurements SET value = '-Infinity'", "cannot be -inf"),
        ("UPDATE runs SET created_at = 'infinity'", "cannot be read"),
        ("UPDATE runs SET created_at = '0044-03-15 BC'", "cannot be read"),
        ("UPDATE runs SET sampler = '\"\\u0000\"'", "sampler"),
    ],
}  # what an engine lets in


def test_a_tampered_row_is_a_typed_error(store: ResultsStore, place: Place) -> None:
    for statement, says in _TAMPERED["both"] + _TAMPERED[place.engine]:
        store.write_run(make_run(measurements=REPETITIONS[1:2]))
        place.run(statement)
        with pytest.raises((CorruptRunError, StoreUnavailableError)) as caught:
            store.list_runs()
        assert says in str(caught.value), statement
        assert "\n" not in str(caught.value)
        place.run("DELETE FROM measurements")
        place.run("DELETE FROM runs")
        assert store.list_runs() == ()


@contextmanager
def interrupted_after(words: str) -> Iterator[None]:
    """Ctrl-C right after the first statement that begins like that."""

    def strike(*arguments: Any) -> None:  # noqa: ANN401
        if arguments[2].startswith(words):
            event.remove(Engine, "after_cursor_execute", strike)
            raise KeyboardInterrupt

    event.listen(Engine, "after_cursor_execute", strike)
    yield
    assert not event.contains(Engine, "after_cursor_execute", strike), "no such statement"


@pytest.mark.parametrize("words", ["SELECT runs.status", "INSERT INTO measurements"])
def test_an_interrupted_write_is_rolled_back(place: Place, words: str) -> None:
    run = make_run()
    with ResultsStore.open(place.location, busy_timeout_s=5) as store:
        with (
            pytest.raises(KeyboardInterrupt),
            interrupted_after(words),
            store.recording(run) as recorder,
        ):
            recorder.add_values({"init_s": 1.0})
        kept = store.get_run(run.id)
        assert (kept.status, kept.measurements) == ("interrupted", ())


@pytest.mark.parametrize("error", [KeyboardInterrupt("cut"), RuntimeError("lost")])
def test_a_store_that_fails_hides_no_other_error(place: Place, error: BaseException) -> None:
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


def test_runs_are_found_by_the_beginning_of_an_id_or_a_group(store: ResultsStore) -> None:
    group = "abcd" + "0" * 28
    sessions = [make_run(id=f"{n:032x}", group_id=group, session=n) for n in (1, 2)]
    alone = make_run(id="abce" + "1" * 28, group_id="9" * 32)
    with pytest.raises(NotStoredError):
        store.find_runs(LATEST)
    for number, run in enumerate((alone, *sessions)):
        at = run.created_at + timedelta(minutes=number)
        store.write_run(run.model_copy(update={"created_at": at}))
        assert store.find_runs(LATEST)[-1].id == run.id
    assert [run.id for run in store.find_runs(LATEST)] == [run.id for run in sessions]
    for start, runs in (("abcd", sessions), (sessions[1].id, sessions[1:]), ("ABCE1", [alone])):
        assert [run.id for run in store.find_runs(start)] == [run.id for run in runs]
    with pytest.raises(WrongUseError, match="the beginning of several ids: 000000000000"):
        store.find_runs("0000")
    for unknown in ("abc", "ffff", "%%%%", "zzzz"):
        with pytest.raises(NotStoredError):
            store.find_runs(unknown)


_SELECTIONS: tuple[tuple[dict[str, Any], list[int]], ...] = (
    ({"plan": "nightly"}, [1]),
    ({"plan": "night"}, []),
    ({"container": "aaaa"}, [0, 1]),
    ({"container": "aaa"}, []),
    ({"container": "my-llama"}, [2]),
    ({"container": "my-llama W4A16"}, [2]),
    ({"container": "my-llama W8A16"}, []),
    ({"labels": ["team=camera"]}, [0, 2]),
    ({"labels": ["team"]}, [0, 2]),
    ({"labels": ["team=camera", "phones/*"]}, [2]),
    ({"labels": ["team=audio"]}, []),
    ({"container": "my-llama", "newest": 1}, [2]),
    ({"labels": ["team"], "newest": 1}, [2]),
)


def test_runs_are_selected_by_plan_container_and_label(store: ResultsStore) -> None:
    first = make_run(labels={"team": "camera"})
    other = {
        "container__model": "my-llama",
        "container__sha256": "b" * 64,
        "container__precision": "W4A16",
    }
    runs = [
        first,
        make_run(plan="nightly"),
        changed(first, id="f" * 32, label="phones/bench#2", **other),
    ]
    for run in runs:
        store.write_run(run)
    for wanted, numbers in _SELECTIONS:
        found = {run.id for run in store.list_runs(RunFilter(**wanted))}
        assert found == {runs[number].id for number in numbers}, wanted
        if "newest" not in wanted:
            assert [RunFilter(**wanted).matches(run) for run in runs] == [
                number in numbers for number in range(len(runs))
            ], wanted
