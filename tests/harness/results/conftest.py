"""Places for results on both engines, and sample records; the numbers are made up."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.results.records import ContainerInfo, DeviceInfo, Provenance, Run, WorkloadRecord
from harness.results.store import ResultsStore
from tests.harness.results.places import Place, PostgresqlPlace, SqlitePlace
from tests.postgresql_server import PostgresqlServer


def _make_run(**changes: object) -> Run:
    fields: dict[str, Any] = {
        "kind": "bench",
        "container": ContainerInfo(
            model="tiny_llama",
            sha256="a" * 64,
            target="SM8750:emulator",
            ars=(1, 32),
            cl=192,
            n_splits=2,
            precision="W8A16",
        ),
        "device": DeviceInfo(
            serial="127.0.0.1:5555",
            soc="SM8750",
            emulator=True,
            model="virtual",
            manufacturer="qnnfarm",
            dsp_arch="v79",
            abi="x86_64",
            android_version="15",
        ),
        "workload": WorkloadRecord(
            runner="genie_t2t_run.py",
            prompt_tokens=64,
            max_new_tokens=16,
            repetitions=3,
            warmup=1,
            sampler={"temp": 1.0, "greedy": True, "seed": 42, "type": "basic", "top-p": None},
        ),
        "provenance": Provenance(
            toolchain="ort_qnn",
            toolchain_versions={"onnxruntime-qnn": "2.7.0", "qnn": "2.51"},
            library_versions={"genie": "1.21"},
            qnnfarm_version="0.1.0",
            host="bench-1",
            git_commit="c0ffee",
            git_dirty=True,
        ),
    }
    return Run(**{**fields, **changes})


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """Makes a run that is legal but for what is changed."""
    return _make_run


@pytest.fixture
def postgresql(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlPlace]:
    """An empty database of that server."""
    yield PostgresqlPlace(postgresql_server, "tests")
    postgresql_server.empty("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """PostgreSQL beside SQLite: always in files that try the statements alone, `BOTH_ENGINES`."""
    chosen = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "place" in metafunc.fixturenames and "place" not in chosen:
        marks = () if hasattr(metafunc.module, "BOTH_ENGINES") else pytest.mark.variant
        both = ["sqlite", pytest.param("postgresql", marks=marks)]
        metafunc.parametrize("place", both, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where nothing is stored yet, on each engine."""
    if request.param == "sqlite":
        return SqlitePlace(tmp_path / "results.db")
    found: PostgresqlPlace = request.getfixturevalue("postgresql")
    return found


@pytest.fixture
def store(place: Place) -> Iterator[ResultsStore]:
    with ResultsStore.open(place.location) as opened:
        yield opened
