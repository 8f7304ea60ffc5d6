"""From a plan to its cells: which, in what order, and what makes a cell another one."""
# ruff: noqa: F401, F811 - a fixture of another module

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import suites
from buildlib.container.genie_config import Context, basic_dialog
from buildlib.container.manifest import GraphsRecord
from buildlib.errors import ContainerError
from harness.errors import ConfigFileError
from harness.plans.cells import Cell
from harness.plans.matrix import Check, cell_as_mapping, expand, select
from harness.plans.plan_file import Plan, load_plan
from harness.runtimes import registry
from harness.runtimes.genie.runtime import GenieModel
from harness.workloads.registry import AnyWorkload
from tests.harness.plans.farm import members
from tests.harness.runtimes.stopwatch import script

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer

Expand = Callable[..., tuple[Cell, ...]]
BENCH = {"kind": "bench"}
COMMAND = {"kind": "command", "command": ["true"]}


@pytest.fixture
def cells_of(tmp_path: Path) -> Expand:
    def make(
        sha256: str = "a" * 64, check: Check = lambda *_: None, **keys: object
    ) -> tuple[Cell, ...]:
        plan = Plan.model_validate({"name": "p", "workloads": [BENCH], **keys})
        return expand(
            plan,
            tmp_path / "plan.yaml",
            identify=lambda path, _: f"{path.name}-{sha256}",
            members=lambda: members("pixel", "board") + members("old", soc="SM8650"),
            check=check,
        )

    return make


def labels(cells: tuple[Cell, ...]) -> list[str]:
    return [cell.label for cell in cells]


TWO = [{"path": "a"}, {"path": "b"}]


def test_it_is_the_product_of_containers_devices_and_workloads(cells_of: Expand) -> None:
    cells = cells_of(
        containers=TWO,
        devices=[{"soc": "SM8750"}, {"label": "old", "soc": "SM8650"}],
        workloads=[{**BENCH, "sessions": 2}, COMMAND],
    )
    assert sorted(labels(cells)) == sorted(
        [f"{c}/{d}/bench#{s}" for c in "ab" for d in ("SM8750", "old") for s in (1, 2)]
        + ["SM8750/command", "old/command"]
    )
    assert len({cell.key for cell in cells}) == len(cells)
    groups = {cell.group for cell in cells if cell.workload.kind == "bench"}
    assert len(groups) == 4


def test_exclude_leaves_out_and_include_brings_back(cells_of: Expand) -> None:
    cells = cells_of(
        containers=TWO,
        workloads=[BENCH, {**BENCH, "label": "long", "new_tokens": 64}],
        exclude=[{"container": "a"}],
        include=[{"container": "a", "workload": "long"}],
    )
    assert labels(cells) == ["b/any/bench", "a/any/long", "b/any/long"]


def test_each_device_of_the_pool_gets_a_cell_of_its_own(cells_of: Expand) -> None:
    cells = cells_of(containers=TWO[:1], devices=[{"soc": "SM8750", "count": "all"}])
    assert labels(cells) == ["a/SM8750@board/bench", "a/SM8750@pixel/bench"]
    assert [cell.requirement.name for cell in cells] == ["board", "pixel"]


def test_several_devices_are_replicas_that_keep_apart(cells_of: Expand) -> None:
    cells = cells_of(containers=TWO[:1], devices=[{"soc": "SM8750", "count": 3}])
    assert labels(cells) == [f"a/SM8750@{n}/bench" for n in (1, 2, 3)]
    assert len({cell.key for cell in cells}) == 3
    assert len({cell.anti_affinity for cell in cells}) == 1
    assert cells[0].anti_affinity


@pytest.mark.parametrize(
    "changed",
    [
        {"sha256": "b" * 64},
        {"workloads": [{**BENCH, "new_tokens": 17}]},
        {"devices": [{"soc": "SM8750"}]},
        {"conditions": "none"},
        {"conditions": {"max_temp_c": 30.0}},
    ],
)
def test_settings_that_change_a_measurement_make_another_cell(
    cells_of: Expand, changed: dict[str, Any]
) -> None:
    before, after = cells_of(containers=TWO[:1]), cells_of(**{"containers": TWO[:1], **changed})
    assert {cell.key for cell in before}.isdisjoint(cell.key for cell in after)


def test_settings_that_change_no_measurement_keep_the_cell(cells_of: Expand) -> None:
    before = cells_of(containers=TWO[:1])
    after = cells_of(
        containers=TWO,
        workloads=[COMMAND, {**BENCH, "label": "renamed", "sessions": 2}],
        retries={"device": 0},
        timeouts={"cell_s": 5.0},
    )
    assert {cell.key for cell in before} < {cell.key for cell in after}


def test_the_text_counts_by_its_content(cells_of: Expand, tmp_path: Path) -> None:
    keys = {"containers": TWO[:1], "workloads": [{"kind": "perplexity", "text": "t.txt"}]}
    (tmp_path / "t.txt").write_text("one")
    first = cells_of(**keys)
    (tmp_path / "t.txt").write_text("two")
    second = cells_of(**keys)
    (tmp_path / "t.txt").write_text("one")
    assert first[0].key != second[0].key
    assert first == cells_of(**keys)


def test_files_of_the_users_count_by_content_and_name(cells_of: Expand, tmp_path: Path) -> None:
    works = {"containers": TWO[:1], "workloads": [BENCH, COMMAND]}
    plain = [cell.key for cell in cells_of(**works)]
    keys = set()
    for content, push in (("one", "x.so"), ("two", "x.so"), ("two", "x.so:y.so")):
        (tmp_path / "x.so").write_text(content)
        bench, command = (cell.key for cell in cells_of(**works, push=[push]))
        assert command == plain[1]  # it has no container that they would go with
        keys.add(bench)
    assert len({*keys, plain[0]}) == 4


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"containers": TWO, "push": ["gone.so"]}, "push", "no file"),
        ({}, "containers", "name containers"),
        ({"containers": [{"path": "x/a"}, {"path": "y/a"}]}, "containers[0].label", "several"),
        ({"containers": TWO, "workloads": [BENCH, BENCH]}, "workloads[0].label", "several"),
        ({"containers": TWO, "exclude": [{"workload": "bunch"}]}, "exclude[0]", "no combination"),
        ({"containers": TWO, "exclude": [{"workload": "bench"}]}, "", "no cell"),
        ({"containers": TWO, "devices": [{"tags": ["x"], "count": "all"}]}, "devices[0]", "such"),
        ({"containers": TWO, "devices": [{"count": 10_000}],
          "workloads": [{**BENCH, "sessions": 1000}]}, "", "more than"),
        ({"containers": TWO, "workloads": [{"kind": "perplexity", "text": "no.txt"}]},
         "workloads[0].text", "no.txt"),
        ({"containers": TWO, "workloads": [{**BENCH, "reference_tokens": "no.txt"}]},
         "workloads[0].reference_tokens", "no.txt"),
    ],
)  # fmt: skip
def test_a_matrix_that_cannot_be_is_refused(
    cells_of: Expand, keys: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigFileError) as caught:
        cells_of(**keys)
    assert caught.value.key == key
    assert reason in caught.value.reason


def test_a_container_that_is_not_whole_is_named_by_its_key(tmp_path: Path) -> None:
    plan = Plan.model_validate(
        {"name": "p", "containers": [{"path": "../../x/one"}], "workloads": [BENCH]}
    )
    folder = tmp_path / "deep" / "plans"

    def identify(path: Path, _runtime: str) -> str:
        raise ContainerError(str(path), "it has no manifest")

    with pytest.raises(ConfigFileError) as caught:
        expand(plan, folder / "plan.yaml", identify=identify, members=list)
    assert caught.value.key == "containers[0].path"
    assert f"{tmp_path}/x/one" in caught.value.reason
    assert ".." not in str(caught.value)


@pytest.mark.parametrize(
    ("work", "key"),
    [
        ({**BENCH, "prompt_tokens": 500}, "workloads[1].prompt_tokens"),
        ({**BENCH, "prompt_tokens": 100, "new_tokens": 100}, "workloads[1].prompt_tokens"),
        ({"kind": "generate", "prompt": "x", "max_tokens": 192}, "workloads[1].max_tokens"),
        ({"kind": "generate", "prompt": "x", "lora": {"red": 1.0}}, "workloads[1]"),
    ],
)
def test_a_workload_that_no_context_holds_is_refused(
    cells_of: Expand, work: dict[str, Any], key: str
) -> None:
    graphs = GraphsRecord(auto_regression_numbers=(1, 32), context_length=192, splits=1)
    metadata = SimpleNamespace(graphs=graphs)
    config = basic_dialog(
        context=Context(size=192, n_vocab=100, bos_token=0, eos_token=1), head_dim=8, rotary_dim=8,
        rope_theta=1e4, rope_scaling=None, ctx_bins=["model.bin"], emulator=True,
    )  # fmt: skip
    plain = SimpleNamespace(metadata=metadata, genie_config=config, path=Path("one"))
    model = GenieModel(cast("GenAIContainer", plain))

    def cells(*works: dict[str, Any]) -> tuple[Cell, ...]:
        def check(_path: Path, _runtime: str, workload: AnyWorkload) -> None:
            workload.check(model)

        return cells_of(check=check, containers=[{"path": "one"}], workloads=works)

    fits = {**BENCH, "prompt_tokens": 161, "new_tokens": 31}
    assert len(cells(fits, COMMAND)) == 2
    with pytest.raises(ConfigFileError, match=r"one.* (192 tokens in all|no LoRA)") as caught:
        cells(fits, {**work, "label": "long"})
    assert caught.value.key == key


@pytest.mark.needs("plugins.other_runtimes", "plugins.diagnosis")
def test_the_plan_that_compares_runtimes_gives_each_the_models_that_it_runs() -> None:
    path = Path(suites.__path__[0]) / "plans" / "runtimes.yaml"
    cells = expand(load_plan(path), path, identify=lambda *_: "a" * 64, members=list)
    models = {"htp/genie", "htp/graph", "gguf/llama.cpp"}
    works = ("perplexity", "short", "deep")
    assert set(labels(cells)) == {f"{model}/phone/{work}" for model in models for work in works}


def test_cells_are_chosen_by_patterns_of_their_labels(cells_of: Expand) -> None:
    cells = cells_of(containers=TWO, workloads=[{**BENCH, "sessions": 2}])
    assert labels(select(cells, ["a/*"])) == ["a/any/bench#1", "a/any/bench#2"]
    assert labels(select(cells, ["b/any/bench#2"])) == ["b/any/bench#2"]
    assert select(cells, []) == cells
    assert select(cells, ["c/*"]) == ()


def test_each_runtime_runs_the_containers_that_it_can(cells_of: Expand, script: Path) -> None:
    both: dict[str, Any] = {
        "containers": [{"path": "a"}, {"path": script.name}],
        "runtimes": ["genie", "stopwatch"],
    }
    cells = cells_of(**both, workloads=[BENCH, COMMAND])
    assert labels(cells) == [
        "a/genie/any/bench", "model.sh/stopwatch/any/bench", "any/command",
    ]  # fmt: skip
    assert [cell.runtime for cell in cells] == ["genie", "stopwatch", "genie"]
    assert Cell.from_json(cells[1].to_json()) == cells[1]
    (left,) = cells_of(**both, exclude=[{"runtime": "genie"}])
    assert (left.label, left.affinity[:8]) == ("model.sh/stopwatch/any/bench", "model.sh")
    (alone,) = cells_of(containers=TWO[:1])
    assert alone.key == cells[0].key


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"containers": TWO[:1]}, "runtimes", "stopwatch runs none of the plan's containers"),
        (
            {"containers": [{"path": "model.sh"}], "runtimes": ["genie"]},
            "containers[0].path",
            "is nothing that genie can run",
        ),
    ],
)
def test_a_runtime_and_a_container_that_do_not_go_together_are_named(
    cells_of: Expand, script: Path, keys: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigFileError) as caught:
        cells_of(**{"runtimes": ["genie", "stopwatch"], **keys})
    assert (caught.value.key, reason in caught.value.reason) == (key, True)


def test_a_workload_that_a_runtime_cannot_do_is_refused_unless_it_is_left_out(
    cells_of: Expand, script: Path
) -> None:
    keys: dict[str, Any] = {
        "containers": [{"path": "a"}, {"path": script.name}],
        "runtimes": ["genie", "stopwatch"],
        "workloads": [BENCH, {"kind": "generate", "prompt": "x"}],
    }

    def check(path: Path, runtime: str, workload: AnyWorkload) -> None:
        if runtime != "genie":
            workload.check(registry.open_model(path, runtime))

    with pytest.raises(ConfigFileError, match="stopwatch cannot answer prompts") as caught:
        cells_of(check=check, **keys)
    assert caught.value.key == "workloads[1]"
    match = {"runtime": "stopwatch", "workload": "generate"}
    assert "{runtime: stopwatch, workload: generate}" in caught.value.reason
    assert len(cells_of(check=check, **keys, exclude=[match])) == 3


def test_a_cell_for_programs(cells_of: Expand) -> None:
    cell = cells_of(containers=TWO[:1], devices=[{"soc": "SM8750"}])[0]
    shown = cell_as_mapping(cell)
    assert shown["cell"] == "a/SM8750/bench"
    assert shown["requirement"] == "soc=SM8750"
    assert str(shown["container"]).endswith("/a")


@pytest.mark.parametrize(
    "plan",
    [
        {"workloads": [{**COMMAND, "label": "one"}, {**COMMAND, "label": "two"}]},
        {"workloads": [COMMAND], "devices": [{"label": "one"}, {"label": "two"}]},
        {
            "workloads": [{**COMMAND, "sessions": 2}, {**COMMAND, "label": "two", "sessions": 2}],
            "devices": [{"count": 2}],
        },
    ],
    ids=["workloads", "devices", "replicas"],
)
def test_a_workload_listed_twice_runs_twice(cells_of: Expand, plan: dict[str, Any]) -> None:
    cells = cells_of(**plan)
    assert len({cell.key for cell in cells}) == len(cells)
    assert len({cell.label for cell in cells}) == len(cells)
    alone = cells_of(**{**plan, "workloads": plan["workloads"][:1]})
    assert {cell.key for cell in alone} <= {cell.key for cell in cells}
    for cell in cells:  # sessions of one cell share a group, and the copies do not
        same = [other.session for other in cells if other.group == cell.group]
        assert len(same) == len(set(same))
    keep_apart = {cell.anti_affinity for cell in cells if cell.anti_affinity}
    assert all(sum(cell.anti_affinity == spread for cell in cells) == 2 for spread in keep_apart)
