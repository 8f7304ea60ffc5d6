"""Faults of bundles before the push, in libraries that gcc makes for other machines."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.targets import find_soc
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import RuntimeChoiceError
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.checks import check_bundle, find_build, find_faults, libraries_on
from harness.runtimes.bundles.sources import find_genie
from harness.runtimes.container_model import check_fit
from harness.runtimes.genie.runtime import GenieModel, genie_bundle
from tests.buildlib.op_packages import build_library

PHONE = DeviceProperties(
    serial="phone", hardware_serial="", manufacturer="", model="", soc="SM8750", hexagon="v79",
    abi="arm64-v8a", android_version="15", sdk=35, emulator=False, free_bytes=None, battery=None,
    page_bytes=16384,
)  # fmt: skip
ANDROID_NOTE = """
    __attribute__((section(".note.android.ident"), used, aligned(4)))
    static const struct { int name, size, type; char owner[8]; int api; }
    ident = {8, 4, 1, "Android", %d};
"""
NO_LIBC = ("-nostdlib",)
LARGE_PAGES = ("-nostdlib", "-Wl,-z,max-page-size=16384")


def bundle_of(files: Mapping[str, Path], abi: str = "arm64-v8a") -> Bundle:
    found = {name: DeployFile(path) for name, path in files.items()}
    return Bundle(abi, find_soc("SM8750"), found)


@pytest.mark.parametrize(
    ("name", "machine", "flags", "fault"),
    [
        ("libQnnHtp.so", "aarch64", 0, ""),
        ("libQnnHtp.so", None, 0, "is for x86_64, and must be for aarch64"),
        ("libQnnHtp.so", "hexagon", 0x79, "is for hexagon v79, and must be for aarch64"),
        ("libQnnHtpV79Skel.so", "hexagon", 0x79, ""),
        ("libQnnHtpV79Skel.so", "aarch64", 0, "is for aarch64, and must be for hexagon"),
        ("libQnnHtpV79Skel.so", "hexagon", 0x75, "is for hexagon v75, and its name says v79"),
        ("libggml-htp-v73.so", "hexagon", 0x73, ""),  # llama.cpp comes with all versions
        ("libScale_HTP.so", "hexagon", 0x79, ""),
        ("libScale_HTP.so", "hexagon", 0x8081, "is for hexagon v81, and SM8750 has v79"),
        ("libcalculator_skel.so", "hexagon", 0x68, "is for hexagon v68, and SM8750 has v79"),
    ],
)
def test_the_machine_and_the_version_of_hexagon(
    tmp_path: Path, name: str, machine: str | None, flags: int, fault: str
) -> None:
    made = build_library(
        tmp_path / name, "int x;", machine=machine, flags=flags, options=LARGE_PAGES
    )
    faults = find_faults(bundle_of({name: made}), PHONE)
    assert [line.startswith(f"{name} {fault}") for line in faults] == ([True] if fault else [])


@pytest.mark.parametrize(
    ("api", "options", "abi", "fault"),
    [
        (35, LARGE_PAGES, "arm64-v8a", ""),
        (36, LARGE_PAGES, "arm64-v8a", "needs Android's API level 36, and the device has 35"),
        (35, NO_LIBC, "arm64-v8a", "is aligned to 4096 bytes, and the device's pages have 16384"),
        (35, LARGE_PAGES, "aarch64", "is for Android, and the device is not"),
        (35, (*LARGE_PAGES, "-Wl,--no-as-needed", "-lc"), "arm64-v8a", "is for Linux with glibc"),
    ],
)
def test_what_the_system_of_the_device_loads(
    tmp_path: Path, api: int, options: tuple[str, ...], abi: str, fault: str
) -> None:
    options = (*options, "-Wl,-z,noseparate-code")
    made = build_library(
        tmp_path / "libX.so", ANDROID_NOTE % api, machine="aarch64", options=options
    )
    faults = find_faults(bundle_of({"libX.so": made}, abi), replace(PHONE, abi=abi))
    assert [line.startswith(f"libX.so {fault}") for line in faults] == ([True] if fault else [])
    assert not find_faults(bundle_of({"libX.so": made})) or "for" in fault  # without a device


def test_needs_that_nothing_meets(tmp_path: Path) -> None:
    for name in ("libown.so", "libc++_shared.so", "liblog.so"):
        build_library(tmp_path / name, "int x;", options=(*NO_LIBC, f"-Wl,-soname,{name}"))
    options = [*LARGE_PAGES, "-L", str(tmp_path), "-Wl,--no-as-needed"]
    options += ["-lown", "-lc++_shared", "-llog"]
    made = build_library(tmp_path / "libX.so", "int y;", machine="aarch64", options=options)
    own = build_library(tmp_path / "own.so", "int x;", machine="aarch64", options=LARGE_PAGES)
    bundle = bundle_of({"libX.so": made, "libown.so": own})
    (fault,) = find_faults(bundle, PHONE)
    assert fault.startswith("libX.so needs libc++_shared.so, which is neither in the bundle")
    asked: list[str] = []

    def present(names: Collection[str]) -> Collection[str]:
        asked.extend(names)
        return names

    assert not find_faults(bundle, PHONE, present=present)
    assert asked == ["libc++_shared.so"]  # liblog.so is on every phone


def test_needs_of_what_programs_can_do_without(tmp_path: Path) -> None:
    link = {"libgone.so": (), "libimpl.so": ("-lgone",), "libbackend.so": ("-lgone",)}
    link |= {"alone": (), "program": ("-limpl",)}
    for name, libraries in link.items():
        options = (*NO_LIBC, "-L", str(tmp_path), f"-Wl,-soname,{name},--no-as-needed", *libraries)
        build_library(tmp_path / name, "int x;", options=options)
    plain = bundle_of({name: tmp_path / name for name in ("libimpl.so", "libbackend.so")}, "x86_64")
    for program, faulty in (("alone", []), ("program", ["libimpl.so"])):
        started = {program: DeployFile(tmp_path / program, executable=True)}
        faults = find_faults(plain.add(started))
        assert [fault.partition(" needs libgone.so")[0] for fault in faults] == faulty
    assert len(find_faults(plain)) == 2  # Python may load both


def test_files_that_are_no_libraries(tmp_path: Path) -> None:
    (tmp_path / "libX.so").write_text("<html>404")
    (tmp_path / "libY.so").write_bytes(b"\x7fELF\x02\x01")
    faults = find_faults(bundle_of({name: tmp_path / name for name in ("libX.so", "libY.so")}))
    assert [line.partition(" ")[0] for line in faults] == ["libX.so", "libY.so:"]


def test_parts_of_different_qnns(tmp_path: Path) -> None:
    builds = {"libQnnHtp.so": "2.51.0", "libQnnHtpV79Stub.so": "2.40.1", "libQnnSystem.so": ""}
    for name, build in builds.items():
        source = f'const char id[] = "\\0v{build}.260929181845";' if build else "int x;"
        build_library(tmp_path / name, source, machine="aarch64", options=LARGE_PAGES)
    assert find_build(tmp_path / "libQnnHtp.so") == (2, 51, 0)
    (fault,) = find_faults(bundle_of({name: tmp_path / name for name in builds}), PHONE)
    assert fault.startswith("libQnnHtpV79Stub.so is of QNN 2.40.1, and libQnnHtp.so of 2.51.0")


@pytest.fixture(scope="module")
def container(tiny_bundle: Path) -> GenAIContainer:
    return GenAIContainer.load(tiny_bundle)


@pytest.mark.needs("plugins.diagnosis")
def test_each_runtime_has_a_bundle_of_its_own(container: GenAIContainer) -> None:
    from plugins.diagnosis.graph_runtime import GraphModel

    genie, graph = (
        model.bundle("x86_64") for model in (GenieModel(container), GraphModel(container))
    )
    assert set(container.files) < set(genie.files) & set(graph.files)
    assert "libGenie.so" in genie.files.keys() - graph.files.keys()
    assert not find_faults(genie, container=container)
    assert not find_faults(graph, container=container)


def test_binaries_of_a_newer_qnn_and_of_another_soc(container: GenAIContainer) -> None:
    bundle = genie_bundle(container, "x86_64")
    assert not find_faults(bundle, container=container)
    toolchain = {**container.metadata.toolchain, "qnn_build": "v2.99.0.270929181845"}
    metadata = container.metadata.model_copy(update={"toolchain": toolchain})
    (fault,) = find_faults(bundle, container=replace(container, metadata=metadata))
    assert fault.startswith("the container was compiled by QNN 2.99.0, and libQnnHtp.so of 2.")
    name = container.genie_config.ctx_bins[0]
    info = OrtQnnToolchain().inspect(container.files[name])
    assert not find_faults(bundle, binaries={name: info})
    other = replace(info, soc_model=57, dsp_arch="v75", build_id="v2.99.0.270929181845")
    newer, foreign = find_faults(bundle, binaries={name: other})
    assert newer.startswith(f"{name} was compiled by QNN 2.99.0")
    assert foreign.startswith(f"{name} is for soc_model 57 (Hexagon v75), and SM8750 is 69 (v79)")


def test_graphs_that_take_more_vtcm_than_the_soc_has(container: GenAIContainer) -> None:
    target = container.metadata.target.model_copy(update={"name": "SM8550:emulator"})
    metadata = container.metadata.model_copy(update={"target": target})
    other = replace(container, metadata=metadata)
    device = replace(PHONE, abi="x86_64", hexagon="v73", soc="SM8550")
    check_fit(other, device)
    with pytest.raises(RuntimeChoiceError, match="take 8 MiB of VTCM, and SM8635 has 4"):
        check_fit(other, replace(device, soc="SM8635"))


def test_a_device_is_asked_for_its_own_libraries(
    virtual_device: Device, container: GenAIContainer, tmp_path: Path
) -> None:
    there = libraries_on(virtual_device)(["libc.so.6", "lib no.so", "$(reboot)"])
    assert set(there) == {"libc.so.6"}
    properties = virtual_device.properties()
    assert properties.page_bytes == 4096
    bundle = find_genie("x86_64", find_soc("SM8750"))
    check_bundle(bundle, virtual_device, properties, container)
    made = build_library(tmp_path / "libX.so", "int x;", machine="aarch64")
    added = bundle.add({"libX.so": DeployFile(made)})
    with pytest.raises(RuntimeChoiceError, match=r"libX\.so is for aarch64"):
        check_bundle(added, virtual_device, properties, container)
