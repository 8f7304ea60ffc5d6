"""Campaigns of cases that run in child processes: a crash or a hang is a failure of its case."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

_ROOT = Path(__file__).parents[1]
Verdict = dict[str, Any]


@dataclass(frozen=True)
class Campaign:
    """Workers that take a case a line, and answer each with a verdict in a line of JSON.

    Attributes:
        command: of a worker with a folder of its own.
        lost: the verdict on a case whose worker died or hung, with the reason.
        fault: key of what is wrong with a case, empty for a good one.
        log: file for every verdict.
        timeout_s: of a case, with the start of its worker.
        clean_up: ends what a worker may leave, by its folder.
    """

    command: Callable[[Path], Sequence[str]]
    lost: Callable[[int, str], Verdict]
    fault: str
    log: str = os.devnull
    timeout_s: float = 240.0
    clean_up: Callable[[Path], object] = lambda _: None

    def run(self, work: Path, cases: Collection[int], n_workers: int = 1) -> list[Verdict]:
        """Run cases; one that ends otherwise than it may fails, and is printed to be run again."""
        queue: SimpleQueue[int] = SimpleQueue()  # each takes the next case when it is done with one
        for case in cases:
            queue.put(case)
        with Path(self.log).open("a", buffering=1) as log, ThreadPoolExecutor(n_workers) as pool:
            workers = [pool.submit(self._work, work / f"{n}", queue, log) for n in range(n_workers)]
            verdicts = [verdict for worker in workers for verdict in worker.result()]
        wrong = [verdict for verdict in verdicts if verdict[self.fault]]
        for verdict in wrong:
            say(json.dumps(verdict))
        assert sorted(verdict["case"] for verdict in verdicts) == sorted(cases)
        assert not wrong, f"{len(wrong)} of {len(cases)} cases: see the output"
        return verdicts

    def _work(self, folder: Path, queue: "SimpleQueue[int]", log: IO[str]) -> list[Verdict]:
        """Run cases until there are none, by another child when one has died or hung."""
        verdicts = []
        for number in itertools.count():
            if queue.empty():
                break
            for verdict in self._run_child(folder / str(number), queue):
                log.write(json.dumps(verdict) + "\n")
                verdicts.append(verdict)
        return verdicts

    def _run_child(self, folder: Path, queue: "SimpleQueue[int]") -> Iterator[Verdict]:
        folder.mkdir(parents=True)
        with (folder / "worker.log").open("wb") as log:
            child = subprocess.Popen(
                self.command(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                cwd=_ROOT, start_new_session=True,
            )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        lines = _lines_of(child.stdout, self.timeout_s)
        try:
            while (case := _next(queue)) is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(b"%d\n" % case)
                    child.stdin.flush()
                line = next(lines, None)
                if line is None:
                    told = (folder / "worker.log").read_text()[-2000:]
                    yield self.lost(case, f"{_state_of(child)}: {told}")
                    return
                yield json.loads(line)
            child.stdin.close()
            assert child.wait(200) == 0, (folder / "worker.log").read_text()[-2000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            self.clean_up(folder)


def _next(queue: "SimpleQueue[int]") -> int | None:
    with contextlib.suppress(Empty):
        return queue.get_nowait()
    return None


def _state_of(child: "subprocess.Popen[bytes]") -> str:
    """Tell whether a silent child lives; one that closed its pipe may need a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.5)
        return "the process died"
    return "it hangs"


def _lines_of(pipe: IO[bytes], timeout_s: float) -> Iterator[bytes]:
    """Lines as they come; ends with the pipe, or when there is none for so long."""
    rest = b""
    while select.select([pipe], [], [], timeout_s)[0]:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def say(text: str) -> None:
    """For whoever looks on."""
    sys.stdout.write(text + "\n")
