"""Work that tells how far it is, from whatever thread does it."""

import threading
from pathlib import Path

import pytest

from buildlib.builder.scheduler import ScheduledTask, run_bounded
from buildlib.progress import WorkNote, tell, telling, working
from tests.builders import builder_for


def test_tasks_of_threads_tell_the_listener_of_their_caller() -> None:
    heard: list[WorkNote] = []
    together = threading.Barrier(2)

    def work(name: str) -> None:
        with working(name):
            together.wait(200)
            tell("half")

    tasks = [ScheduledTask(name, lambda name=name: work(name)) for name in ("one", "other")]
    with telling(heard.append):
        run_bounded(tasks, max_workers=2, memory_bytes=1)
        tell("of nothing")
    tell("to nobody")
    for name in ("one", "other"):
        own = [work for work in heard if work.name == name]
        assert own == [WorkNote(name), WorkNote(name, "half"), WorkNote(name, ended=True)]
    assert len(heard) == 6


@pytest.mark.needs("libatomic1")
def test_a_build_tells_of_layers_and_windows(small_model: Path, tmp_path: Path) -> None:
    heard: list[WorkNote] = []
    with telling(heard.append):
        builder_for(small_model, tmp_path).build()
    said = {work.words for work in heard}
    assert {"embedding, window 1/3", "layer 1/1, window 3/3", "head, window 1/3"} <= said
    ended = [work.name for work in heard if work.ended]
    assert {"compile part 1 of 1", "convert ar1_cl192_1_of_1"} <= set(ended)
    assert len(ended) == len(set(ended)) == sum(not (w.words or w.ended) for w in heard)
