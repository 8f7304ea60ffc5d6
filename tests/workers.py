"""Workers that are forked from the process that has collected the tests.

`-n N` of pytest-xdist starts processes that import and collect all of the suite, each for itself,
which takes as long as a tenth of all tests. These begin with what is there. Each takes the next
file of tests where it is done with one, so that tests of a file share what they set up, and sends
its reports to the process with the terminal. `-n 0`, `--pdb` or one file: no workers.
"""

import gc
import os
import traceback
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.command_line import share_server

_COUNT = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Take the number of workers from xdist, which then starts none."""
    count = config.option.numprocesses
    if count in {"auto", "logical"}:
        count = config.hook.pytest_xdist_auto_num_workers(config=config)
    config.stash[_COUNT] = 0 if config.option.usepdb else count or 0
    config.option.numprocesses = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests of each file in one of the workers."""
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    count = min(session.config.stash[_COUNT], len(files))
    if count < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    queue, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(4, "little") for number in range(len(files))))
    os.close(end)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # of all
    gc.freeze()
    share_server()
    workers = dict(_start(session, files, queue, number) for number in range(count))
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    reporter.showfspath = False  # files run beside each other
    running = dict.fromkeys(workers, "nothing")
    try:
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                try:
                    running[connection], report = connection.recv()
                except EOFError:
                    status = os.waitstatus_to_exitcode(os.waitpid(workers.pop(connection), 0)[1])
                    if status:
                        session.shouldfail = (
                            f"a worker ended with {status} in {running[connection]}"
                        )
                    continue
                if report is not None:
                    hook = session.config.hook
                    told = hook.pytest_report_from_serializable(config=session.config, data=report)
                    hook.pytest_runtest_logreport(report=told)
                if session.shouldfail or session.shouldstop:
                    os.read(queue, 4 * len(files))  # what runs is the last
    finally:
        os.read(queue, 4 * len(files))
        for pid in workers.values():
            os.waitpid(pid, 0)
        os.close(queue)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _start(
    session: pytest.Session, files: list[list[pytest.Item]], queue: int, number: int
) -> tuple[Connection, int]:
    """Fork a worker; return the connection on which it reports, and its process."""
    reports, sent = Pipe(duplex=False)
    if pid := os.fork():
        sent.close()
        return reports, pid
    status = 1
    try:
        _prepare(session.config, number, sent)
        _run(session, files, queue)
        status = 0
    except KeyboardInterrupt:
        pass  # the process with the terminal has it, too
    except BaseException:  # noqa: BLE001 - nothing may return to what has forked
        capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        os._exit(status)


def _prepare(config: pytest.Config, number: int, sent: Connection) -> None:
    """Be a worker: a name, a folder, output and reports of its own."""
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"gw{number}"
    factory._basetemp.mkdir(0o700)
    manager = config.pluginmanager
    manager.unregister(manager.get_plugin("terminalreporter"))
    manager.register(_Sender(config, sent))


class _Sender:
    """Sends which test begins, and the reports of it."""

    def __init__(self, config: pytest.Config, sent: Connection) -> None:
        self._config = config
        self._sent = sent

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what runs, in case that it ends this process."""
        self._sent.send((nodeid, None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sent.send((report.nodeid, data))


def _run(session: pytest.Session, files: list[list[pytest.Item]], queue: int) -> None:
    """Run files that no other worker takes; between them stays what the session shares."""
    try:
        while number := os.read(queue, 4):
            file = files[int.from_bytes(number, "little")]
            for item, following in zip(file, [*file[1:], session], strict=True):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        session._setupstate.teardown_exact(None)
