"""Containers to run, and the devices that can run them."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_limits import find_limits
from buildlib.container.text_embedding import Configuration
from buildlib.targets import Target, find_soc, parse_target
from harness.devices.base import DeviceProperties
from harness.errors import RuntimeChoiceError, WrongUseError

_EMULATOR_ABI = "x86_64"
_HARDWARE_ABIS = ("arm64-v8a", "aarch64")  # Android's and Linux's name for one thing

_QNN_API = ("api.py", "contracts.py", "refusal.py", "structures.py")


def open_container(folder: Path) -> GenAIContainer:
    """Load a container that is to run, before any device is asked for."""
    container = GenAIContainer.load(folder)
    check_limits(container.configuration, str(container.path), target_of(container))
    return container


def check_limits(config: Configuration, path: str, target: Target) -> None:
    """Refuse a configuration that its target cannot run, though Genie's parser takes it."""
    limits = find_limits(config, emulator=target.emulator)
    if limits:
        raise WrongUseError(f"{path} cannot run: {'; '.join(map(str, limits))}")


def check_fit(container: GenAIContainer, device: DeviceProperties) -> None:
    """Refuse a container that was compiled for something else: loading it has no defined result."""
    target = target_of(container)
    check_limits(container.configuration, str(container.path), target)
    abis = (_EMULATOR_ABI,) if target.emulator else _HARDWARE_ABIS
    if device.abi not in abis:
        purpose = f"the container is for {target}, which is {abis[0]}"
        emulated = f"{device.soc or target.soc.name}:emulator"
        hint = emulated if device.abi == _EMULATOR_ABI else device.soc or "its SoC"
        raise RuntimeChoiceError(
            device.serial,
            f"{purpose}, and the device is {device.abi or 'of no known ABI'}: build it for {hint}",
        )
    if device.hexagon is not None and device.hexagon != target.soc.dsp_arch:
        raise RuntimeChoiceError(
            device.serial,
            f"the container is for {target} (Hexagon {target.soc.dsp_arch}), and the device is a "
            f"{device.soc} ({device.hexagon}): build it for that",
        )
    vtcm_mb = container.metadata.options.get("graphs.vtcm_size_in_mb")
    if device.hexagon is not None and isinstance(vtcm_mb, int):
        soc = find_soc(device.soc)
        if vtcm_mb > soc.vtcm_mb:
            raise RuntimeChoiceError(
                device.serial,
                f"the container's graphs take {vtcm_mb} MiB of VTCM, and {soc.name} has "
                f"{soc.vtcm_mb}: build it for {soc.name}",
            )


def target_of(container: GenAIContainer) -> Target:
    """Return the target that the container was built for."""
    return parse_target(container.metadata.target.name)


def qnn_api_files() -> Mapping[str, Path]:
    """Return the modules of QNN's C API that device scripts import, by name in the run folder."""
    qnn = resources.files("buildlib.toolchains.qnn")
    # The packages around the API have no code of their own there.
    folders = ("buildlib", "buildlib/toolchains", "buildlib/toolchains/qnn")
    files = {f"{folder}/__init__.py": Path(str(qnn / "__init__.py")) for folder in folders}
    return files | {f"{folders[-1]}/{name}": Path(str(qnn / name)) for name in _QNN_API}
