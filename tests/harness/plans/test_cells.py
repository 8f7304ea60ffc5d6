"""Cells keep their keys from version to version, and can be sent to another process."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from harness.plans.cells import Cell, duplicate, make_cell
from harness.plans.plan_file import Retries
from harness.pool.requirement import Requirement
from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.registry import AnyWorkload

# As the version before workloads had a package of their own gave them: journals hold such keys.
KEYS = {
    Bench(max_perplexity=9.5): (
        "715c8fa348c84928aeb231ec105b16d9eb73e1c198360c7006ea8ee939e0838a",
        "50c904cfae96303c21c6ef0545ca85aa7056d06df4bccfb0f9273a2331d27df8",
    ),
    Perplexity(text="t.txt", windows=4): (
        "c6fdf2bc90812b4254d10f22311b1537c26d10dec55c7792e50fe15270d97e26",
        "1976fb1c312672fd20fc8bcbf963f3902dde2484d97a6e1c162054a31efc0d74",
    ),
    Generate(prompt="hi", expect="x"): (
        "023b8f809319beeb38c22e10ac2c452ff0c3af9c59e3ec3b3d3467db79154b75",
        "e51d9df33584824783cb4679087393f2dce82e0d3c80211c6167b81bbcba89fb",
    ),
    Command(command=("true", "a b")): (
        "6e02e50831bb546e8ceeb01e5cea6ee33eabe5038e7a543ce79d00d666729320",
        "6999660e3ecdd080f1863a5917b235971daa9e249d72615a8419c7a5459f026f",
    ),
}


def cell_of(workload: AnyWorkload) -> Cell:
    return make_cell(
        "l",
        workload,
        Requirement(soc="SM8750", tags=frozenset({"b", "a"})),
        folder=Path("/plans"),
        container=Path("/containers/c"),
        container_sha256="c" * 64,
        content="d" * 64,
        conditions={"max_temp_c": 45.0},
        session=1,
        spread=True,
        retries=Retries(device=0),
    )


@pytest.mark.parametrize("workload", KEYS, ids=lambda workload: workload.kind)
def test_keys_stay_the_same_so_that_old_journals_count(workload: AnyWorkload) -> None:
    cell = cell_of(workload)
    assert (cell.key, cell.anti_affinity) == KEYS[workload]


@pytest.mark.parametrize("workload", KEYS, ids=lambda workload: workload.kind)
def test_a_cell_comes_back(workload: AnyWorkload) -> None:
    cell = cell_of(workload)
    for each in (cell, duplicate(cell, 2), replace(cell, container=None)):
        assert Cell.from_json(each.to_json()) == each
        assert pickle.loads(pickle.dumps(each)) == each  # noqa: S301
    with pytest.raises(ValueError):
        Cell.from_json("{}")
