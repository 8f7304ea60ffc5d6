"""Worker of `EmulatorProcess`: loads graphs, then runs them on request, until its parent is gone.

Frames arrive on stdin, and answers leave on what was stdout; output of the libraries goes to
stderr.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.error_base import one_line
from buildlib.reference.frames import BrokenFrameError, read_frame, write_frame
from buildlib.toolchains.child_process import RefusedError
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.api import HtpSession, load_system
from buildlib.toolchains.qnn.execution import EmulatedGraph, keep_to_one_cpu

if TYPE_CHECKING:
    from buildlib.reference.runners import Arrays


def main() -> None:
    """Serve one parent."""
    keep_to_one_cpu()
    answers = os.dup(1)
    os.dup2(2, 1)
    graphs: list[EmulatedGraph] = []
    while True:
        try:
            header, feeds = read_frame(0)
        except BrokenFrameError:
            break
        results: Arrays = {}
        said: dict[str, Any] = {}
        try:
            if "run" in header:
                results = graphs[int(header["run"])].run(feeds)
            else:
                graphs = _load(header)
        except Exception as error:  # noqa: BLE001  (the parent must learn of any error)
            reason = one_line(str(error)) or type(error).__name__
            said["error"] = reason if isinstance(error, RefusedError) else f"{error!r}"[:300]
        try:
            write_frame(answers, said, results)
        except OSError:
            break
    os._exit(0)


def _load(header: dict[str, Any]) -> list[EmulatedGraph]:
    libraries = find_libraries()
    session = HtpSession(libraries.htp, header["soc_model"])
    system = load_system(libraries.system)
    return [
        EmulatedGraph(session, system, Path(binary).read_bytes(), name)
        for binary, name in header["graphs"]
    ]


if __name__ == "__main__":
    main()
