"""Graphs of stages, declared before they run, with stages that add numbers."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from buildlib.builder.runner import StageRecord, StageRunner
from buildlib.builder.stage import CachedStage
from buildlib.builder.stage_graph import Load, StageGraph
from buildlib.cache.layout import CacheEntry
from buildlib.cache.store import StageCache
from buildlib.errors import InputFileError
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain


@dataclass(frozen=True)
class Sum(CachedStage):
    """The sum of a number and of other stages' sums."""

    operation = "sum"
    number: int
    terms: Mapping[str, CacheEntry] | tuple[CacheEntry, ...] | CacheEntry = ()
    barrier: threading.Barrier | None = None

    @property
    def _terms(self) -> list[CacheEntry]:
        if isinstance(self.terms, CacheEntry):
            return [self.terms]
        return list(self.terms.values() if isinstance(self.terms, Mapping) else self.terms)

    @property
    def subject(self) -> str:
        return f"from {self.number}"

    @property
    def source(self) -> Path:
        return Path("numbers")

    @property
    def options(self) -> Mapping[str, object]:
        return {"number": self.number}

    def run(self, folder: Path) -> None:
        if self.barrier is not None:
            self.barrier.wait(timeout=200)
        (folder / "sum").write_text(str(self.number + sum(map(read, self._terms))))


def read(entry: CacheEntry) -> int:
    return int((entry.folder / "sum").read_text())


@pytest.fixture
def records() -> list[StageRecord]:
    return []


@pytest.fixture
def graph(tmp_path: Path, records: list[StageRecord]) -> Iterator[StageGraph]:
    with StageCache(tmp_path, "numbers") as cache:
        runner = StageRunner(OrtQnnToolchain(), cache, tmp_path, records.append)
        yield StageGraph(runner, max_workers=2)


def test_an_output_is_known_before_a_stage_runs(
    graph: StageGraph, records: list[StageRecord]
) -> None:
    one = graph.add(Sum(1))
    three = graph.add(Sum(2, one))
    assert not one.folder.exists()
    assert (len(graph), records) == (2, [])
    graph.run(last=True)
    assert (read(one), read(three)) == (1, 3)
    assert [record.entry for record in records] == [one.folder, three.folder]


def test_the_fields_of_a_stage_say_what_it_needs(graph: StageGraph) -> None:
    one, two = graph.add(Sum(1)), graph.add(Sum(2))
    graph.add(Sum(10, {"a": one, "b": two}))
    graph.add(Sum(20, (two, two)))
    needs = {node.stage.subject: [need.entry for need in node.needs] for node in graph}
    assert needs == {"from 1": [], "from 2": [], "from 10": [one, two], "from 20": [two]}


def test_equal_stages_are_one(graph: StageGraph, records: list[StageRecord]) -> None:
    assert graph.add(Sum(1)) == graph.add(Sum(1))
    graph.run()
    assert (len(graph), len(records)) == (1, 1)


def test_only_a_whole_graph_tells_how_many_stages_it_has(
    graph: StageGraph, records: list[StageRecord]
) -> None:
    one = graph.add(Sum(1))
    graph.run()
    graph.add(Sum(3, graph.add(Sum(2, one))))
    graph.run(last=True)
    assert [(record.number, record.total) for record in records] == [(1, None), (2, 3), (3, 3)]


def test_an_output_that_does_not_pass_its_check_ends_the_run(
    graph: StageGraph, records: list[StageRecord]
) -> None:
    def refuse(folder: Path) -> None:
        raise InputFileError(str(folder), (folder / "sum").read_text())

    graph.add(Sum(2, graph.add(Sum(1), check=refuse)))
    with pytest.raises(InputFileError, match=r"1$"):
        graph.run()
    assert [record.subject for record in records] == ["from 1"]


def test_stages_with_a_load_run_at_once_and_those_they_need_before(
    graph: StageGraph, records: list[StageRecord]
) -> None:
    """Neither of the middle ones ends without the other."""
    barrier = threading.Barrier(2)
    first = graph.add(Sum(1))

    def load() -> Load:
        return Load(memory_bytes=read(first), cost=1)  # the first has run

    middle = tuple(graph.add(Sum(n, first, barrier), load=load) for n in (10, 20))
    last = graph.add(Sum(100, middle), load=load)
    graph.add(Sum(1000, last))
    graph.run(last=True)
    assert read(last) == 132
    subjects = [record.subject for record in records]
    assert (subjects[0], subjects[3:]) == ("from 1", ["from 100", "from 1000"])
