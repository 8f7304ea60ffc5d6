"""Worker of `EmulatorProcess`: loads graphs, then runs them on request."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.numerics.child import serve
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn.api import HtpSession, load_system
from buildlib.toolchains.qnn.execution import EmulatedGraph, keep_to_one_cpu

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_graphs: list[EmulatedGraph] = []


def answer(header: dict[str, Any], feeds: "Arrays") -> "tuple[dict[str, Any], Arrays]":
    """Load graphs, or run one of those loaded."""
    if "run" in header:
        return {}, _graphs[int(header["run"])].run(feeds)
    libraries = find_libraries()
    session = HtpSession(libraries.htp, header["soc_model"])
    for library, provider in header["op_packages"]:
        session.register_op_package(library, provider)
    system = load_system(libraries.system)
    _graphs[:] = [
        EmulatedGraph(session, system, Path(binary).read_bytes(), name)
        for binary, name in header["graphs"]
    ]
    return {}, {}


if __name__ == "__main__":
    keep_to_one_cpu()
    serve(answer)
