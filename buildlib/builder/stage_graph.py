"""`StageGraph`: the stages of a build, declared before they run.

    graph = StageGraph(runner)
    float_model = graph.add(ConvertShape(model, shape))
    parts = graph.add(Transform(float_model, shape, 2, SplitModelConfig(), MhaConfig()))
    graph.run()

The fields of a stage declare its inputs: each `CacheEntry` there is the output of another stage. As
keys are over keys, not over outputs, an entry has its folder and its hash before any stage runs. A
graph can be counted and compared with the cache first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from buildlib.builder.original_paths import original_paths
from buildlib.builder.runner import StageRunner
from buildlib.builder.scheduler import ScheduledTask, run_bounded, usable_memory
from buildlib.builder.sources import ModelSource
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry


@dataclass(frozen=True)
class Load:
    """Memory that a stage takes at its peak, and the time that it runs, in any unit."""

    memory_bytes: int
    cost: float


@dataclass(frozen=True, eq=False)
class StageNode:
    """One stage of a graph.

    Attributes:
        entry: its output.
        needs: the stages of the graph that it reads the outputs of.
        source: the model that it belongs to.
        load: called once the stages before it have run; None where it runs alone.
        check: called with the folder of its output.
    """

    stage: CachedStage
    entry: CacheEntry
    needs: tuple["StageNode", ...]
    source: ModelSource | None
    load: Callable[[], Load] | None
    check: Callable[[Path], None] | None

    @property
    def is_made(self) -> bool:
        """True if the cache has the output."""
        return self.entry.folder.is_dir()


class UnmadeError(Exception):
    """A graph that runs nothing needs an output that the cache does not have."""


class StageGraph:
    """Stages of one build, in an order in which they can run.

    Attributes:
        runner: takes each through the cache.
        dry: run nothing; all outputs must be in the cache.
    """

    def __init__(
        self,
        runner: StageRunner,
        groups: Mapping[ModelSource, str] | None = None,
        max_workers: int = 1,
        memory_bytes: int | None = None,
    ) -> None:
        """Nothing is declared yet.

        Args:
            runner: runs the stages.
            groups: folders in the cache of the stages of some models; others have the build's.
            max_workers: stages at once, of those with a load.
            memory_bytes: for these; by default two thirds of the available memory.
        """
        self.runner = runner
        self.dry = False
        self._groups = groups or {}
        self._max_workers = max_workers
        self._memory_bytes = memory_bytes
        self._nodes: dict[Path, StageNode] = {}
        self._ran = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[StageNode]:
        return iter(self._nodes.values())

    def add(
        self,
        stage: CachedStage,
        source: ModelSource | None = None,
        *,
        load: Callable[[], Load] | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> CacheEntry:
        """Declare a stage, and return its output, which need not be there.

        Args:
            stage: reads outputs of stages that were declared before, and none while it is declared.
            source: the model that it belongs to; errors name its files.
            load: its memory and time. Neighbours with one run at once, as workers and memory allow.
            check: called with the folder of the output, before a stage that needs it runs.
        """
        entry = self.runner.entry(stage, self._group(source))
        folders = dict.fromkeys(need.folder for need in stage.entries())
        needs = tuple(self._nodes[folder] for folder in folders if folder in self._nodes)
        self._nodes[entry.folder] = StageNode(stage, entry, needs, source, load, check)
        return entry

    def run(self, *, last: bool = False) -> None:
        """Run the stages that were declared since the last call.

        Args:
            last: whether the graph is whole, so that records can tell its number of stages.

        Raises:
            UnmadeError: the graph is dry.
        """
        self.runner.total = len(self) if last else None
        batch, self._ran = list(self)[self._ran :], len(self)
        if self.dry:
            if not all(node.is_made for node in batch):
                raise UnmadeError
            return
        for bounded, nodes in groupby(batch, key=lambda node: node.load is not None):
            if bounded:
                self._run_bounded(list(nodes))
            else:
                for node in nodes:
                    self._run(node)

    def _run_bounded(self, nodes: Sequence[StageNode]) -> None:
        tasks: dict[StageNode, ScheduledTask[None]] = {}
        for node in nodes:
            load = node.load() if node.load else Load(0, 0)
            tasks[node] = ScheduledTask(
                node.stage.subject,
                lambda *_, node=node: self._run(node),
                load.memory_bytes,
                load.cost,
                [tasks[need] for need in node.needs if need in tasks],
            )
        memory = usable_memory() if self._memory_bytes is None else self._memory_bytes
        run_bounded(list(tasks.values()), max_workers=self._max_workers, memory_bytes=memory)

    def _run(self, node: StageNode) -> None:
        with original_paths(node.source):
            self.runner.run(node.stage, self._group(node.source))
            if node.check is not None:
                node.check(node.entry.folder)

    def _group(self, source: ModelSource | None) -> str | None:
        return None if source is None else self._groups.get(source)
