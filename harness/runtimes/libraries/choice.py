"""Choice of the source of Genie's libraries for a device."""

from buildlib.targets import Soc
from buildlib.toolchains.qairt import ROOT_VARIABLES
from harness.errors import GenieMissingError
from harness.runtimes.libraries.base import GenieLibraries
from harness.runtimes.libraries.sdk import ANDROID, LINUX, QairtSdk
from harness.runtimes.libraries.wheels import FetchedWheel, installed_wheel

_SET_SDK = f"set {ROOT_VARIABLES[0]} to an unpacked QAIRT SDK"


def find_genie(abi: str, soc: Soc) -> GenieLibraries:
    """Find Genie for devices of that ABI.

    A board takes the wheel of the compiler's version before the SDK, since a context binary may be
    read by a runtime that is as new as its compiler, and not by an older one.

    Args:
        abi: as the device calls it; Linux says `aarch64` where Android says `arm64-v8a`.

    Raises:
        GenieMissingError: it is not on this machine; says how to get it.
        ToolchainMissingError: the wheel that compiles is not installed.
    """
    match abi:
        case "x86_64":
            return installed_wheel()
        case "aarch64":
            found = FetchedWheel.of_the_compiler().find(soc)
            if found is None and (sdk := QairtSdk.from_environment(LINUX)):
                found = sdk.find(soc)
            advice = f"`qnnfarm libraries fetch` gets it from PyPI; or {_SET_SDK}"
        case "arm64-v8a":
            sdk = QairtSdk.from_environment(ANDROID)
            found = sdk.find(soc) if sdk else None
            advice = f"it comes with the QAIRT SDK alone: {_SET_SDK}"
        case _:
            found, advice = None, "there is none for that ABI"
    if found is None:
        raise GenieMissingError(soc.name, f"for {abi or 'no known ABI'}, {advice}")
    return found
