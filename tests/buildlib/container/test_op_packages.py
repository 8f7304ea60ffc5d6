"""Op packages of a build: which libraries a target needs, and which are no good for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.builder_options import apply_options, flatten_options
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import OpPackage, registrations, select_packages
from buildlib.container.writer import ContainerContents, write_container
from buildlib.errors import ContainerError, InvalidOptionError
from buildlib.genai import GenAIBuilderFactory
from buildlib.targets import Target, parse_target
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


@pytest.mark.parametrize(
    ("target", "sides"),
    [(PHONE, {"CPU": "aarch64-android", "HTP": "hexagon-v75"}), (EMULATOR, {"CPU": "x86_64"})],
)
def test_the_libraries_of_a_target_are_registered_the_processors_first(
    package: OpPackage, target: Target, sides: dict[str, str]
) -> None:
    (chosen,) = select_packages([package], target)
    assert set(chosen.targets) == set(sides.values())
    assert [str(one) for one in registrations([chosen.in_container()])] == [
        f"libQnnLLaMAPackage_{side}.so:LLaMAPackageInterfaceProvider:{side}" for side in sides
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
    changed = {k: path and package.targets.get(path, path) for k, path in changes.items()}
    targets = {k: path for k, path in {**package.targets, **changed}.items() if path}
    with pytest.raises(InvalidOptionError, match=reason):
        select_packages([package.model_copy(update={"targets": targets})], PHONE)


def test_packages_that_a_target_cannot_have(package: OpPackage) -> None:
    other = package.model_copy(update={"interface_provider": "OtherProvider"})
    with pytest.raises(InvalidOptionError, match="exports no OtherProvider"):
        select_packages([other], EMULATOR)
    with pytest.raises(InvalidOptionError, match="there twice"):
        select_packages([package, package], EMULATOR)


def test_a_container_holds_its_packages_and_is_another_with_another_provider(
    draft: ContainerContents, package: OpPackage, tmp_path: Path
) -> None:
    other = package.model_copy(update={"interface_provider": "OtherProvider"}).for_target(PHONE)
    plain, made, twin = (
        write_container(replace(draft, op_packages=own), tmp_path / name, validate=lambda _: None)
        for name, own in {
            "plain": (), "made": select_packages([package], PHONE), "twin": (other,),
        }.items()
    )  # fmt: skip
    loaded = GenAIContainer.load(made.path)
    assert loaded.metadata == made.metadata
    names = [one.file for one in registrations(loaded.metadata.op_packages)]
    assert names == ["libQnnLLaMAPackage_CPU.so", "libQnnLLaMAPackage_HTP.so"]
    for name, key in zip(names, ("aarch64-android", "hexagon-v75"), strict=True):
        assert loaded.files[name].read_bytes() == Path(package.targets[key]).read_bytes()
        assert loaded.metadata.files[name].kind == "op_package"
    assert twin.metadata.files == made.metadata.files
    assert len({each.metadata.container_sha256 for each in (plain, made, twin)}) == 3
    path = made.path / "metadata.json"
    path.write_text(path.read_text().replace(f': "{names[0]}"', ': "libOther_CPU.so"'))
    with pytest.raises(ContainerError, match="which is no op package in it"):
        GenAIContainer.load(made.path)


def test_an_entry_of_options_has_paths_relative_to_their_file(
    tiny_export: Path, libraries: dict[str, str]
) -> None:
    """The compiler needs a library for this host beside those of the target."""
    root, entry = Path(libraries["x86_64"]).parents[1], {
        "name": "QnnLLaMAPackage", "interface_provider": "LLaMAPackageInterfaceProvider",
    }  # fmt: skip
    builder = GenAIBuilderFactory.create(tiny_export).set_targets(["SM8650"])
    for keys in (set(libraries), set(libraries) - {"x86_64"}):
        paths = {key: f"{key}/libQnnLLaMAPackage.so" for key in keys}
        options = {"op_packages": [entry | {"targets": paths}]}
        apply_options(builder, flatten_options(options, root))
        assert [dict(one.targets) for one in builder.op_packages] == [
            {key: libraries[key] for key in keys}
        ]
    with pytest.raises(InvalidOptionError, match="no library for x86_64"):
        builder.plan()


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
