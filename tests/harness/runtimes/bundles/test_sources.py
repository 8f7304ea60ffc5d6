"""Where Genie for a device comes from, and what is said where it comes from nowhere."""

from pathlib import Path

import pytest

from buildlib.targets import Soc, catalog, find_soc
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.registry import ROOT_VARIABLES
from harness.errors import GenieMissingError
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.sources import (
    FOLDERS_VARIABLE,
    PLATFORMS,
    fetched_wheel,
    find_genie,
    find_qnn,
    qnn_libraries,
)

PHONE = find_soc("SM8750")
BOARD = find_soc("QCS9075")
_SHARED = ("libGenie.so", "libQnnHtp.so", "libQnnSystem.so", "libQnnHtpNetRunExtensions.so")


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No SDK, and nothing fetched."""
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path / "cache"))
    for name in (*ROOT_VARIABLES, FOLDERS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def make_sdk(root: Path, socs: tuple[Soc, ...]) -> Path:
    """Empty files in the documented folders."""
    names = [f"lib/{platform}/{name}" for platform in PLATFORMS.values() for name in _SHARED]
    names += [f"lib/{platform}/libQnnHtpPrepare.so" for platform in PLATFORMS.values()]
    for soc in socs:
        stub, skel = (f"libQnnHtpV{soc.htp_arch}{half}.so" for half in ("Stub", "Skel"))
        names += [f"lib/{platform}/{stub}" for platform in PLATFORMS.values()]
        names += [f"lib/hexagon-{soc.dsp_arch}/unsigned/{skel}"]
    names += [f"bin/aarch64-android/{name}" for name in ("genie-t2t-run", "genie-app")]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def origin(bundle: Bundle) -> str:
    return bundle.files["libGenie.so"].origin


def programs(bundle: Bundle) -> set[str]:
    return {name for name, file in bundle.files.items() if file.executable}


def test_emulators_take_what_is_installed() -> None:
    found = find_genie("x86_64", PHONE)
    assert origin(found).startswith("onnxruntime-qnn ")
    wheel = find_libraries()
    support = {path.name for path in wheel.support_folder.iterdir()}
    assert set(found.files) == {*_SHARED, *support}  # the C++ runtime by what they need
    assert not programs(found)
    assert set(found.files) - set(find_qnn("x86_64", PHONE).files) == {
        "libGenie.so", "libQnnHtpNetRunExtensions.so",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("abi", "says"),
    [
        ("aarch64", "`qnnfarm libraries fetch` gets it from PyPI; or set QAIRT_SDK_ROOT"),
        ("arm64-v8a", "the QAIRT SDK: set QAIRT_SDK_ROOT"),
        ("riscv64", "none for that ABI"),
        ("", "no known ABI"),
    ],
)
def test_where_there_is_none_it_says_how_to_get_it(abi: str, says: str) -> None:
    with pytest.raises(
        GenieMissingError, match="no Genie and QNN to put on SM8750 devices"
    ) as caught:
        find_genie(abi, PHONE)
    assert says in str(caught.value)


@pytest.mark.parametrize("variable", ROOT_VARIABLES)
def test_phones_take_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    root = make_sdk(tmp_path / "qairt" / "2.39.0.250926", (PHONE,))
    monkeypatch.setenv(variable, str(root))
    found = find_genie("arm64-v8a", PHONE)
    assert origin(found) == "QAIRT SDK 2.39.0.250926"
    assert {*_SHARED, "libQnnHtpV79Stub.so", "libQnnHtpV79Skel.so"} < set(found.files)
    assert (
        found.files["libQnnHtpV79Skel.so"].path.parent == root / "lib" / "hexagon-v79" / "unsigned"
    )
    assert found.files["libGenie.so"].path.parent == root / "lib" / "aarch64-android"
    assert programs(found) == {"genie-t2t-run", "genie-app"}


def test_an_sdk_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_sdk(tmp_path / "sdk", (PHONE,))
    monkeypatch.setenv("QNN_SDK_ROOT", str(root))
    with pytest.raises(GenieMissingError, match=r"lacks libQnnHtpV73Stub\.so"):
        find_genie("arm64-v8a", BOARD)
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path / "gone"))
    with pytest.raises(GenieMissingError, match="and 6 more files: look into"):
        find_genie("arm64-v8a", PHONE)


def test_boards_take_the_wheel_of_the_compilers_version_before_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", str(make_sdk(tmp_path / "sdk", (BOARD,))))
    assert origin(find_genie("aarch64", BOARD)) == "QAIRT SDK sdk"
    version = find_libraries().version
    wheel = fetched_wheel(version)
    wheel.mkdir(parents=True)
    with pytest.raises(GenieMissingError, match=r"lacks .*libGenie\.so.*`qnnfarm libraries fetch`"):
        find_genie("aarch64", BOARD)
    skel = "libQnnHtpV73Skel.so"
    for name in (*_SHARED, "libQnnHtpPrepare.so", "libQnnHtpV73Stub.so", skel):
        (wheel / name).touch()
    found = find_genie("aarch64", BOARD)
    assert origin(found) == f"onnxruntime-qnn {version} for aarch64"
    assert found.files[skel].path == wheel / skel
    assert not programs(found)  # it has Python


def test_every_soc_is_looked_for_by_its_own_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of profiles come along where the SDK has them."""
    root = make_sdk(tmp_path / "sdk", catalog())
    monkeypatch.setenv("QNN_SDK_ROOT", str(root))
    for soc in catalog():
        skel = f"libQnnHtpV{soc.dsp_arch[1:]}Skel.so"
        found = find_genie("arm64-v8a", soc).files[skel].path
        assert found.parent.parent.name == f"hexagon-{soc.dsp_arch}"
    readers = {"libQnnHtpProfilingReader.so", "libQnnHtpV79CalculatorStub.so"}
    assert not readers & set(find_genie("arm64-v8a", PHONE).files)
    for name in readers:
        (root / "lib" / "aarch64-android" / name).touch()
    assert readers < set(find_genie("arm64-v8a", PHONE).files)


def test_named_folders_come_before_the_sdk_and_complete_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = make_sdk(tmp_path / "sdk", (PHONE,))
    monkeypatch.setenv("QNN_SDK_ROOT", str(sdk))
    qnn, genie = tmp_path / "qnn" / "arm64-v8a", tmp_path / "genie" / "arm64-v8a"
    own = ("libGenie.so", "libQnnHtpNetRunExtensions.so", "genie-t2t-run", "genie-app")
    for folder in (qnn, genie):
        folder.mkdir(parents=True)
    for name in (*_SHARED, *qnn_libraries("arm64-v8a", PHONE)):
        if name not in own:
            (qnn / name).touch()
    monkeypatch.setenv(FOLDERS_VARIABLE, f"{qnn.parent}:{genie.parent}")
    with pytest.raises(GenieMissingError, match=r"lacks libGenie\.so.*QNNFARM_LIBRARIES"):
        find_genie("arm64-v8a", PHONE)
    for name in own:
        (genie / name).touch()
    found = find_genie("arm64-v8a", PHONE)
    assert origin(found) == f"{qnn}:{genie}"
    assert found.files["libQnnHtp.so"].path == qnn / "libQnnHtp.so"
    assert found.files["libGenie.so"].path == genie / "libGenie.so"
    assert found.files["genie-t2t-run"].path == genie / "genie-t2t-run"
