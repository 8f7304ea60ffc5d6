"""Builds of a plan's containers: real ones, whose stages other tests have cached."""

from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.plans.builds import build_containers, without_containers
from harness.plans.plan_file import Plan
from suites.models import tiny_llama

WORK = [{"kind": "command", "command": ["true"]}]
BUILD = {
    "model": str(tiny_llama.folder()), "target": "SM8750:emulator", "ar": [1, 32], "cl": 192,
    "splits": 2,
}  # fmt: skip

OP_PACKAGE = {
    "name": "Scale",
    "interface_provider": "ScaleProvider",
    "targets": {"x86_64": "trained/libScale.so"},
}


def make_plan(**keys: object) -> Plan:
    return Plan.model_validate({"name": "lab", "workloads": WORK, **keys})


def test_an_unchanged_container_is_neither_built_nor_replaced(
    tmp_path: Path, tiny_bundle: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(build_cache))
    plan = make_plan(
        containers=[
            {"path": "head", "build": BUILD},
            {"path": str(tiny_bundle), "label": "given"},
            {"path": "broken", "build": BUILD | {"options": {"no.such.option": 1}}},
        ]
    )
    first, given, broken = build_containers(plan, tmp_path / "plan.yaml")
    sha256 = GenAIContainer.load(tmp_path / "head").metadata.container_sha256
    assert (first.label, first.sha256, first.stages_run) == ("head", sha256, 0)
    assert first.replaced
    assert (given.sha256, given.built) == (sha256, False)
    assert "no.such.option" in broken.error
    assert (broken.sha256, broken.replaced) == ("", False)

    made = (tmp_path / "head").stat().st_ino
    again, *_ = build_containers(plan, tmp_path / "plan.yaml")
    assert not again.replaced
    assert (tmp_path / "head").stat().st_ino == made


@pytest.mark.parametrize(
    ("options", "path"),
    [
        pytest.param(
            {"speculative_config": {"ssd_tensor_file": "trained/ssd.safetensors"}},
            "ssd.safetensors",
            marks=pytest.mark.needs("plugins.speculation"),
        ),
        ({"op_packages": [OP_PACKAGE]}, "libScale.so"),
    ],
)
def test_paths_among_the_options_are_relative_to_the_plan(
    tmp_path: Path, options: dict[str, object], path: str
) -> None:
    plan = make_plan(containers=[{"path": "head", "build": BUILD | {"options": options}}])
    (build,) = build_containers(plan, tmp_path / "plan.yaml")
    assert f"{tmp_path}/trained/{path}" in build.error


@pytest.mark.needs("plugins.qairt")
def test_the_compiler_that_a_plan_names_builds(tmp_path: Path) -> None:
    how = BUILD | {"toolchain": "qairt", "qairt_sdk": "sdk"}
    (build,) = build_containers(
        make_plan(containers=[{"path": "head", "build": how}]), tmp_path / "plan.yaml"
    )
    assert f"{tmp_path}/sdk" in build.error


def test_a_folder_that_is_no_container_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "thesis.tex").write_text("years of work")
    (build,) = build_containers(
        make_plan(containers=[{"path": "head", "build": BUILD}]), tmp_path / "plan.yaml"
    )
    assert "head" in build.error
    assert (tmp_path / "head" / "thesis.tex").read_text() == "years of work"


def test_a_plan_without_a_container_excludes_no_cells_of_it() -> None:
    plan = make_plan(
        containers=[{"path": "a/head"}, {"path": "base", "label": "old"}],
        exclude=[{"container": "head", "workload": "x"}, {"workload": "y"}],
    )
    left = without_containers(plan, Path("plan.yaml"), {"head"})
    assert [entry.path for entry in left.containers] == ["base"]
    assert [match.workload for match in left.exclude] == ["y"]
