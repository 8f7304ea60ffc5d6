"""ELF libraries that gcc makes, as readelf reads them, and hostile ones."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.elf import ElfInfo, read_elf
from buildlib.errors import InputFileError
from buildlib.paths import default_cache_root
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from tests.buildlib.op_packages import build_library
from tests.system import program

_MACHINES = {
    "Advanced Micro Devices X86-64": "x86_64",
    "AArch64": "aarch64",
    "QUALCOMM DSP6 Processor": "hexagon",
}


def exported(library: Path) -> set[str]:
    """Return the dynamic symbols that readelf says a library defines."""
    command = [str(program("readelf")), "-W", "--dyn-syms", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines]
    rows = [row for row in rows if len(row) == 8 and row[4] in {"GLOBAL", "WEAK"}]
    return {row[7].partition("@")[0] for row in rows if row[6] not in {"UND", "ABS"}}


def by_readelf(path: Path) -> ElfInfo:
    """Read a file by binutils: its names from the sections, which ours does not look at."""
    command = [str(program("readelf")), "-hldnW", str(path)]  # fails for lack of sections, too
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def word(pattern: str) -> str:
        match = re.search(pattern, text)
        return match[1] if match else ""

    aligned = [int(value, 16) for value in re.findall(r"(?m)^ +LOAD .* (0x[0-9a-f]+)$", text)]
    api = word(r"Android +0x[0-9a-f]+\s.*\s*description data: ((?:[0-9a-f]{2} ){4})")
    machine = _MACHINES[word(r"Machine: +(.*)")]
    return ElfInfo(
        machine,
        "v" + word(r"Flags: +0x([0-9a-f]+)") if machine == "hexagon" else None,
        int.from_bytes(bytes.fromhex(api), "little") if api else None,
        min((value for value in aligned if value > 1), default=0),
        word(r"\(SONAME\).*\[(.*)\]") or None,
        tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
        frozenset(),
    )


def test_libraries_and_programs_read_as_by_readelf() -> None:
    wheel = find_libraries()
    fetched = (default_cache_root() / "libraries").glob("*/*.so")  # the wheel for boards, if it is
    paths = [*wheel.folder.glob("*.so"), *wheel.support_folder.iterdir(), *fetched]
    assert len(paths) > 10
    for path in (*paths, Path(sys.executable).resolve()):
        assert read_elf(path, exports=False) == by_readelf(path), path
    library = wheel.folder / "libGenie.so"
    assert read_elf(library).exports == exported(library)


def test_androids_note_and_the_alignment_of_pages(tmp_path: Path) -> None:
    note = """
        __attribute__((section(".note.android.ident"), used, aligned(4)))
        static const struct { int name, size, type; char owner[8]; int api; char ndk[128]; }
        ident = {8, 132, 1, "Android", 35, "r28c"};
    """  # as the NDK's crtbegin_so.o has it
    options = ["-nostdlib", "-Wl,-z,max-page-size=16384,-soname,libown.so,--no-as-needed", "-lm"]
    library = build_library(tmp_path / "libX.so", note, options=options)
    info = read_elf(library, exports=False)
    assert info == by_readelf(library)
    assert (info.android_api, info.page_alignment, info.soname) == (35, 16384, "libown.so")
    assert info.needed == ("libm.so.6",)


@pytest.mark.parametrize("hash_style", ["sysv", "gnu", "both"])
@pytest.mark.parametrize("bits", [32, 64])
def test_exports_of_libraries_with_any_hash_table(
    tmp_path: Path, hash_style: str, bits: int
) -> None:
    source = "int first; int second(void){return first;} static int third(void){return 3;}"
    library = build_library(
        tmp_path / "libX.so", source, bits=bits, options=[f"-Wl,--hash-style={hash_style}"]
    )
    assert read_elf(library).exports >= {"first", "second"}
    assert read_elf(library).exports == exported(library)


@pytest.mark.parametrize(("flags", "version"), [(0x68, "v68"), (0x8075, "v75"), (0x81, "v81")])
def test_the_version_of_a_hexagon_library(tmp_path: Path, flags: int, version: str) -> None:
    library = build_library(tmp_path / "libX.so", "int x;", machine="hexagon", flags=flags)
    assert str(read_elf(library)) == f"hexagon {version}"


@pytest.mark.parametrize(
    "content", [None, b"", b"no ELF", b"\x7fELF", b"\x7fELF\x02\x02" + bytes(99)]
)
def test_files_that_are_no_libraries(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libX.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputFileError, match="No such file" if content is None else "ELF"):
        read_elf(path)


@pytest.fixture(scope="module", params=[32, 64])
def sound(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    library = tmp_path_factory.mktemp("elf") / "libX.so"
    return build_library(library, "int x; int f(void){return x;}", bits=request.param)


@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
    kept=st.floats(0, 1),
    early=st.booleans(),
)
def test_damaged_libraries_are_read_or_refused(
    sound: Path, changes: list[tuple[float, int]], kept: float, early: bool
) -> None:
    data = bytearray(sound.read_bytes())
    reach = 1024 if early else len(data)  # headers lie in front
    for place, value in changes:
        data[int(place * min(reach, len(data)))] = value
    damaged = sound.with_name("damaged.so")
    damaged.write_bytes(data[: int(kept * len(data)) + 1])
    try:
        info = read_elf(damaged)
    except InputFileError:
        return
    assert all(isinstance(name, str) for name in info.exports)
