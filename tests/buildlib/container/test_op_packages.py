"""Op packages of a build: which libraries a target needs, and which are no good for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.builder_options import apply_options, flatten_options
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import OpPackage, registrations, select_packages
from buildlib.container.writer import ContainerContents, write_container
from buildlib.errors import ContainerError, InvalidOptionError
from buildlib.genai import GenAIBuilderFactory
from buildlib.targets import parse_target
from tests.buildlib.op_packages import build_library

EMULATOR, PHONE = parse_target("SM8650:emulator"), parse_target("SM8650")
SOURCE = "int LLaMAPackageInterfaceProvider(void *x) { return 0; }"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Libraries by target, under mllm's names, with the code of this host."""
    root = tmp_path_factory.mktemp("build")
    made = {}
    for target, machine, flags in (
        ("x86_64", None, 0),
        ("aarch64-android", "aarch64", 0),
        ("hexagon-v75", "hexagon", 0x75),
        ("hexagon-v73", "hexagon", 0x73),
    ):
        (root / target).mkdir()
        library = root / target / "libQnnLLaMAPackage.so"
        made[target] = str(build_library(library, SOURCE, machine=machine, flags=flags))
    return made


@pytest.fixture
def package(libraries: dict[str, str]) -> OpPackage:
    return OpPackage(
        name="QnnLLaMAPackage",
        interface_provider="LLaMAPackageInterfaceProvider",
        targets=libraries,
    )


def write(draft: ContainerContents, folder: Path) -> GenAIContainer:
    return write_container(draft, folder, validate=lambda _folder: None)


def test_a_phone_registers_the_processors_library_before_the_hexagons(package: OpPackage) -> None:
    (chosen,) = select_packages([package], PHONE)
    assert set(chosen.targets) == {"aarch64-android", "hexagon-v75"}
    assert [str(one) for one in registrations([chosen.in_container()])] == [
        "libQnnLLaMAPackage_CPU.so:LLaMAPackageInterfaceProvider:CPU",
        "libQnnLLaMAPackage_HTP.so:LLaMAPackageInterfaceProvider:HTP",
    ]


def test_the_emulator_registers_the_library_of_its_host(package: OpPackage) -> None:
    (chosen,) = select_packages([package], EMULATOR)
    assert [str(one) for one in registrations([chosen.in_container()])] == [
        "libQnnLLaMAPackage_CPU.so:LLaMAPackageInterfaceProvider:CPU"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hexagon-v75": None}, "no library for hexagon-v75"),
        ({"aarch64-android": None}, "no library for aarch64-android or aarch64-oe-linux"),
        ({"aarch64-oe-linux-gcc11.2": "aarch64-android"}, "two libraries for aarch64-android or"),
        ({"hexagon-v75": "hexagon-v73"}, "is for hexagon v73"),
        ({"hexagon-v75": "aarch64-android"}, "is for aarch64"),
        ({"aarch64-android": "x86_64"}, "is for x86_64"),
        ({"aarch64-android": "/missing/libX.so"}, "/missing/libX.so No such file"),
    ],
)
def test_a_library_that_is_not_for_its_target_is_named(
    package: OpPackage, changes: dict[str, str | None], reason: str
) -> None:
    targets = dict(package.targets)
    for key, value in changes.items():
        if value is None:
            del targets[key]
        else:
            targets[key] = package.targets.get(value, value)
    with pytest.raises(InvalidOptionError, match=reason):
        select_packages([package.model_copy(update={"targets": targets})], PHONE)


def test_a_provider_that_a_library_does_not_export(package: OpPackage) -> None:
    other = package.model_copy(update={"interface_provider": "OtherProvider"})
    with pytest.raises(InvalidOptionError, match="exports no OtherProvider"):
        select_packages([other], EMULATOR)


def test_a_package_that_is_there_twice(package: OpPackage) -> None:
    with pytest.raises(InvalidOptionError, match="there twice"):
        select_packages([package, package], EMULATOR)


def test_a_container_holds_its_packages_and_is_another_with_another_provider(
    make_draft: Callable[[], ContainerContents], package: OpPackage, tmp_path: Path
) -> None:
    draft = make_draft()
    plain = write(draft, tmp_path / "plain").metadata
    made = write(replace(draft, op_packages=select_packages([package], PHONE)), tmp_path / "made")
    loaded = GenAIContainer.load(tmp_path / "made")
    assert loaded.metadata == made.metadata
    names = [one.file for one in registrations(loaded.metadata.op_packages)]
    assert names == ["libQnnLLaMAPackage_CPU.so", "libQnnLLaMAPackage_HTP.so"]
    for name, key in zip(names, ("aarch64-android", "hexagon-v75"), strict=True):
        assert loaded.files[name].read_bytes() == Path(package.targets[key]).read_bytes()
        assert loaded.metadata.files[name].kind == "op_package"
    other = package.model_copy(update={"interface_provider": "OtherProvider"}).for_target(PHONE)
    twin = write(replace(draft, op_packages=(other,)), tmp_path / "twin").metadata
    assert twin.files == made.metadata.files
    digests = {plain.container_sha256, made.metadata.container_sha256, twin.container_sha256}
    assert len(digests) == 3


def test_a_manifest_that_names_a_package_which_is_not_there(
    draft: ContainerContents, package: OpPackage, tmp_path: Path
) -> None:
    made = write(
        replace(draft, op_packages=select_packages([package], EMULATOR)), tmp_path / "made"
    )
    text = made.metadata.to_json().replace(
        '"x86_64": "libQnnLLaMAPackage_CPU.so"', '"x86_64": "libOther_CPU.so"'
    )
    (tmp_path / "made" / "metadata.json").write_text(text)
    with pytest.raises(ContainerError, match="which is no op package in it"):
        GenAIContainer.load(tmp_path / "made")


def test_paths_of_an_options_file_are_relative_to_it(
    tiny_export: Path, libraries: dict[str, str]
) -> None:
    root = Path(libraries["x86_64"]).parents[1]
    builder = GenAIBuilderFactory.create(tiny_export)
    apply_options(builder, flatten_options({"op_packages": [entry(libraries)]}, root))
    assert [dict(one.targets) for one in builder.op_packages] == [libraries]


def test_the_compiler_needs_a_library_for_this_host(
    tiny_export: Path, libraries: dict[str, str]
) -> None:
    phone = {key: path for key, path in libraries.items() if key != "x86_64"}
    builder = GenAIBuilderFactory.create(tiny_export).set_targets(["SM8650"])
    root = Path(libraries["x86_64"]).parents[1]
    apply_options(builder, flatten_options({"op_packages": [entry(phone)]}, root))
    with pytest.raises(InvalidOptionError, match="no library for x86_64"):
        builder.plan()


def entry(targets: dict[str, str]) -> dict[str, object]:
    """Return an entry of options, with paths relative to the folder of the libraries' folders."""
    paths = {key: f"{key}/libQnnLLaMAPackage.so" for key in targets}
    provider = "LLaMAPackageInterfaceProvider"
    return {"name": "QnnLLaMAPackage", "interface_provider": provider, "targets": paths}


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "../X", "interface_provider": "P", "targets": {"x86_64": "a"}},
        {"name": "X", "interface_provider": "P:Q", "targets": {"x86_64": "a"}},
        {"name": "X", "interface_provider": "P", "targets": {"hexagon": "a"}},
        {"name": "X", "interface_provider": "P", "targets": {}},
        {"name": "X", "interface_provider": "P"},
    ],
)
def test_an_entry_that_is_no_package(tiny_export: Path, keys: dict[str, object]) -> None:
    builder = GenAIBuilderFactory.create(tiny_export)
    with pytest.raises(InvalidOptionError, match="op_packages"):
        apply_options(builder, {"op_packages": [keys]})
