"""Which files a container needs beside it on a device: the runtime's libraries and the runner."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.targets import parse_target
from buildlib.toolchains.libraries import find_libraries
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.errors import RuntimeChoiceError

_RUNNER_FILES = ("genie_api.py", "genie_t2t_run.py", "genie_perplexity.py")


def check_fit(container: GenAIContainer, device: DeviceProperties) -> None:
    """Refuse a container that was compiled for something else: loading it has no defined result.

    Raises:
        RuntimeChoiceError: another ABI, or another Hexagon architecture than the device's.
    """
    target = parse_target(container.metadata.target.name)
    if device.abi != target.abi:
        built = f"the container is for {target}, which is {target.abi}"
        hint = f"{device.soc}:emulator" if device.abi == "x86_64" else device.soc or "its SoC"
        raise RuntimeChoiceError(
            device.serial,
            f"{built}, and the device is {device.abi or 'of no known ABI'}: build it for {hint}",
        )
    if device.hexagon is not None and device.hexagon != target.soc.dsp_arch:
        raise RuntimeChoiceError(
            device.serial,
            f"the container is for {target} (Hexagon {target.soc.dsp_arch}), and the device is a "
            f"{device.soc} ({device.hexagon}): build it for that",
        )


def device_files(container: GenAIContainer, device: DeviceProperties) -> Mapping[str, DeployFile]:
    """Everything a run needs on the device, by its name in the run folder.

    Raises:
        RuntimeChoiceError: there is no runner for the device's ABI.
        ToolchainMissingError: the libraries are not installed on the host.
    """
    if device.abi != "x86_64":
        reason = (
            f"Genie for {device.abi} comes with the QAIRT SDK, which this version of qnnfarm "
            "cannot deploy yet; virtual devices work without it (`qnnfarm device start`)"
        )
        raise RuntimeChoiceError(device.serial, reason)
    libraries = find_libraries().runtime(device.abi)
    scripts = resources.files("device_scripts")
    runners = {name: Path(str(scripts / name)) for name in _RUNNER_FILES}
    files = {**container.files, **libraries, **runners}
    return {name: DeployFile(path) for name, path in files.items()}
