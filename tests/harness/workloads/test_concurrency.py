"""How many sessions ran at once on this host."""

import signal
from pathlib import Path

from harness.workloads.session import SessionCount
from tests.command_line import Started

_JOIN = """
import sys
from pathlib import Path
from harness.workloads.session import SessionCount
count = SessionCount(Path(sys.argv[1]))
count.join()
print(count.highest, flush=True)
sys.stdin.read()
"""


def test_each_knows_the_most_that_it_was_part_of(tmp_path: Path) -> None:
    first, second, third = (SessionCount(tmp_path) for _ in range(3))
    first.join()
    first.join()
    assert first.highest == 1
    second.join()
    second.leave()
    third.join()
    assert (first.highest, third.highest) == (2, 2)
    first.leave()
    alone = SessionCount(tmp_path)
    third.leave()
    alone.join()
    assert alone.highest == 1
    alone.leave()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_session_counts_no_more(tmp_path: Path) -> None:
    with Started("-c", _JOIN, tmp_path) as other:
        assert other.stdout.readline() == "1\n"
        mine = SessionCount(tmp_path)
        mine.join()
        assert mine.highest == 2
        mine.leave()
        other.send_signal(signal.SIGKILL)
        other.wait()
    mine.join()
    assert mine.highest == 1
    mine.leave()


def test_where_nothing_can_be_counted_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    count = SessionCount(tmp_path / "file" / "sessions")
    count.join()
    assert count.highest is None
    count.leave()
