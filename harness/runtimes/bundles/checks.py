"""Faults of a bundle that a device would refuse, or that would fail there, before any push.

Sources of the rules: bionic's linker (AOSP `linker/linker_phdr.cpp`: alignment of segments), the
NDK's list of stable libraries (developer.android.com/ndk/guides/stable_apis), and for libraries
that only devices with a Snapdragon have, and those of its DSP, what QNN's are linked to.
"""

import functools
import mmap
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from buildlib.container.container import GenAIContainer
from buildlib.elf import ElfInfo, is_elf, read_elf
from buildlib.errors import InputFileError
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import RuntimeChoiceError
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.sources import ANDROID, EMULATOR

if TYPE_CHECKING:
    from buildlib.toolchains.base import BinaryInfo

_DSP_NAME = re.compile(r"(?:skel|_HTP|htp-v\d\d)\.so$", re.IGNORECASE)
"""Names of libraries for the DSP: skeletons, QNN's op packages, llama.cpp's."""
_ALWAYS_LOADED = re.compile(r"lib(?:Genie|Qnn)\w*\.so$|_(?:CPU|HTP)\.so$")
"""Names of libraries that no program is linked to: Genie's, QNN's and its op packages."""
_VERSION_IN_NAME = re.compile(r"v(\d\d)(?!\d)", re.IGNORECASE)
_BUILD = re.compile(rb"\0v(\d+)\.(\d+)\.(\d+)\.\d{6,14}\0")
_BUILD_TEXT = re.compile(r"v?(\d+)\.(\d+)\.(\d+)\b")
_PART = re.compile(r"libQnnHtp(?:V\d\d(?:Stub|Skel))?\.so")
_DSP_LIBRARIES = frozenset({"libc.so", "libgcc.so", "libc++.so.1", "libc++abi.so.1"})
_ANDROID_LIBRARIES = frozenset(
    f"lib{name}.so"
    for name in (
        "aaudio", "amidi", "android", "binder_ndk", "c", "camera2ndk", "dl", "EGL", "GLESv1_CM",
        "GLESv2", "GLESv3", "icu", "jnigraphics", "log", "m", "mediandk", "nativehelper",
        "nativewindow", "neuralnetworks", "OpenMAXAL", "OpenSLES", "stdc++", "sync", "vulkan", "z",
        "cdsprpc", "OpenCL",
    )
)  # fmt: skip
_LINUX_LIBRARIES = frozenset(
    {
        "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2", "libatomic.so.1", "libc.so.6",
        "libcdsprpc.so", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0",
        "librt.so.1", "libstdc++.so.6",
    }
)  # fmt: skip
_SEARCHED = (
    "/system/lib64 /vendor/lib64 /system_ext/lib64 /odm/lib64 "
    "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /lib/*-linux-gnu /usr/lib/*-linux-gnu"
)
_LISTING = f"""
for name in "$@"; do
  for folder in {_SEARCHED}; do [ ! -e "$folder/$name" ] || echo "$name"; done
done
"""

Present = Callable[[Collection[str]], Collection[str]]
"""Returns which libraries of these names a device has."""


def check_bundle(
    bundle: Bundle, device: Device, properties: DeviceProperties, container: GenAIContainer | None
) -> None:
    """Refuse a bundle that cannot run on a device."""
    faults = find_faults(bundle, properties, container, libraries_on(device))
    if faults:
        more = f" (and {len(faults) - 1} more: `qnnfarm bundle show`)" if len(faults) > 1 else ""
        raise RuntimeChoiceError(properties.serial, faults[0] + more)


def libraries_on(device: Device) -> Present:
    """Return a search for libraries in the folders of a device's loader."""

    def present(names: Collection[str]) -> Collection[str]:
        command = ["sh", "-c", _LISTING, "sh", *sorted(names)]
        return device.shell(command, check=False).stdout.split()

    return present


def find_faults(
    bundle: Bundle,
    device: DeviceProperties | None = None,
    container: GenAIContainer | None = None,
    present: Present | None = None,
    binaries: "Mapping[str, BinaryInfo]" = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the faults of a bundle, in one line each.

    Args:
        device: None if there is none yet; API level and size of pages are not checked then.
        container: the one in the bundle.
        present: asked for libraries that are neither in the bundle nor on every device.
        binaries: properties of the bundle's context binaries.
    """
    faults: list[str] = []
    sound: dict[str, ElfInfo] = {}
    for name, file in bundle.files.items():
        try:
            info = read_elf(file.path, exports=False) if is_elf(file.path) else None
        except InputFileError as error:
            faults.append(f"{name}: {error}; get it again")
            continue
        if info is None:
            if name.endswith(".so"):
                faults.append(f"{name} is no library, by its content ({file.path}): get it again")
        elif fault := _wrong_kind(name, info, bundle):
            faults.append(fault)
        else:
            sound[name] = info
            if device is not None and info.hexagon is None:
                faults += _too_new(name, info, device)
    faults += _unmet_needs(sound, bundle, present)
    faults += _versions(bundle, container, binaries)
    return tuple(faults)


def _wrong_kind(name: str, info: ElfInfo, bundle: Bundle) -> str | None:
    """Return why a library or program is for other processors or systems."""
    cpu = "x86_64" if bundle.abi == EMULATOR else "aarch64"
    machine = "hexagon" if _DSP_NAME.search(name) and bundle.abi != EMULATOR else cpu
    if info.machine != machine:
        return f"{name} is for {info}, and must be for {machine}: take the one for {bundle.abi}"
    if info.hexagon is not None:
        version = _VERSION_IN_NAME.search(name)
        soc = bundle.soc
        arch = f"v{version[1]}" if version else soc.dsp_arch if soc else None
        if arch in (None, info.hexagon):
            return None
        whose = "its name says" if version or soc is None else f"{soc.name} has"
        return f"{name} is for {info}, and {whose} {arch}: take the one for hexagon-{arch}"
    glibc, android = "libc.so.6" in info.needed, info.android_api is not None
    if glibc if bundle.abi == ANDROID else android:
        system = "Linux with glibc" if glibc else "Android"
        return f"{name} is for {system}, and the device is not: take the one for {bundle.abi}"
    return None


def _too_new(name: str, info: ElfInfo, device: DeviceProperties) -> Iterator[str]:
    """Return whether a device is too old for a library, or has larger pages."""
    if info.android_api is not None and device.sdk is not None and info.android_api > device.sdk:
        yield (
            f"{name} needs Android's API level {info.android_api}, and the device has "
            f"{device.sdk}: build it for android-{device.sdk}"
        )
    if device.page_bytes is not None and 0 < info.page_alignment < device.page_bytes:
        yield (
            f"{name} is aligned to {info.page_alignment} bytes, and the device's pages have "
            f"{device.page_bytes}: link it with -z max-page-size={device.page_bytes}"
        )


def _unmet_needs(
    infos: Mapping[str, ElfInfo], bundle: Bundle, present: Present | None
) -> Iterator[str]:
    """Return which libraries are needed and nowhere."""
    system = _ANDROID_LIBRARIES if bundle.abi == ANDROID else _LINUX_LIBRARIES
    names = {Path(name).name for name in bundle.files}
    unmet = [
        (name, needed)
        for name in _loaded(infos, bundle)
        for needed in infos[name].needed
        if needed not in names and needed not in (_DSP_LIBRARIES if infos[name].hexagon else system)
    ]
    candidates = {needed for name, needed in unmet if not infos[name].hexagon}
    there = present(candidates) if present and candidates else ()
    for name, needed in unmet:
        if needed not in there:
            yield (
                f"{name} needs {needed}, which is neither in the bundle nor known on the device: "
                f"add it with --push FILE:{needed}"
            )


def _loaded(infos: Mapping[str, ElfInfo], bundle: Bundle) -> list[str]:
    """Return the libraries and programs that a run loads for certain.

    Where native programs run, those are they, what they are linked to, and QNN's. They do without
    others that do not load, as llama.cpp does without a backend.
    """
    names = {Path(name).name: name for name in infos}
    programs = [name for name in infos if bundle.files[name].executable]
    unread = [*programs, *filter(_ALWAYS_LOADED.search, infos)] if programs else list(infos)
    order: dict[str, None] = {}
    while unread:
        name = unread.pop()
        if name not in order:
            order[name] = None
            unread += [names[needed] for needed in infos[name].needed if needed in names]
    return list(order)


def _versions(
    bundle: Bundle, container: GenAIContainer | None, binaries: "Mapping[str, BinaryInfo]"
) -> Iterator[str]:
    """Return which parts differ in their QNN, and which binaries are for another QNN or SoC."""
    parts = {name: find_build(f.path) for name, f in bundle.files.items() if _PART.fullmatch(name)}
    qnn = parts.get("libQnnHtp.so")
    for name, build in parts.items():
        if qnn and build and build != qnn:
            yield (
                f"{name} is of QNN {_dotted(build)}, and libQnnHtp.so of {_dotted(qnn)}: take both "
                "from one SDK"
            )
    makers = {name: info.build_id for name, info in binaries.items()}
    if container is not None:
        makers["the container"] = container.metadata.toolchain.get("qnn_build", "")
    for name, text in makers.items():
        match = _BUILD_TEXT.match(text)
        if qnn and match and (maker := tuple(map(int, match.groups()))) > qnn:
            yield (
                f"{name} was compiled by QNN {_dotted(maker)}, and libQnnHtp.so of {_dotted(qnn)} "
                "reads no newer ones: take newer libraries, or compile it with that QNN"
            )
    soc = bundle.soc
    for name, info in binaries.items():
        if soc and (info.soc_model, info.dsp_arch) != (soc.soc_model, soc.dsp_arch):
            yield (
                f"{name} is for soc_model {info.soc_model} (Hexagon {info.dsp_arch}), and "
                f"{soc.name} is {soc.soc_model} ({soc.dsp_arch}): build it for {soc.name}"
            )


def find_build(library: Path) -> tuple[int, ...] | None:
    """Return the version of QNN that a library of it holds as text; None without one."""
    try:
        state = library.stat()
        return _search_build(library, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError):  # such as an empty file
        return None


@functools.lru_cache(maxsize=64)  # each session of a process asks, and libraries are large
def _search_build(library: Path, size: int, mtime_ns: int) -> tuple[int, ...] | None:
    del size, mtime_ns
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        match = _BUILD.search(data)
        return None if match is None else tuple(map(int, match.groups()))


def _dotted(build: tuple[int, ...]) -> str:
    return ".".join(map(str, build))
