"""The QAIRT SDK's libraries and programs for devices.

Its layout is that of the vendor's public documents: `lib/<platform>/` and `bin/<platform>/` of the
tutorial for Genie on Android (80-63442-10, `no_lora.html`) and of genie-t2t-run's sample code,
`lib/hexagon-v<arch>/unsigned/` of the former and of "Backend" (`QNN/general/backend.html`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from buildlib.targets import Soc
from buildlib.toolchains.qairt import sdk_root
from harness.errors import GenieMissingError
from harness.runtimes.libraries.base import GenieLibraries, cpu_libraries, hexagon_library

ANDROID, LINUX = "aarch64-android", "aarch64-oe-linux-gcc11.2"
_PROGRAMS = ("genie-t2t-run", "genie-app")
_ENCODER = "genie-t2e-run"


@dataclass(frozen=True, slots=True)
class QairtSdk:
    """An unpacked SDK, for devices of one of its platforms.

    Attributes:
        platform: as its folders are called, `ANDROID` or `LINUX`.
    """

    root: Path
    platform: str

    @classmethod
    def from_environment(
        cls, platform: str, environment: Mapping[str, str] = os.environ
    ) -> Self | None:
        """Return the SDK that the environment names, or None."""
        root = sdk_root(environment)
        return None if root is None else cls(root, platform)

    def find(self, soc: Soc) -> GenieLibraries:
        """Return the files that the SoC needs; for Android with the SDK's runners.

        Raises:
            GenieMissingError: names the first few files that are not there.
        """
        skel = hexagon_library(soc)
        files = {name: self.root / "lib" / self.platform / name for name in cpu_libraries(soc)}
        files[skel] = self.root / "lib" / f"hexagon-{soc.dsp_arch}" / "unsigned" / skel
        runners = _PROGRAMS if self.platform == ANDROID else ()
        folder = self.root / "bin" / self.platform
        programs = {name: folder / name for name in runners}
        if runners and (folder / _ENCODER).is_file():  # older SDKs have none
            programs[_ENCODER] = folder / _ENCODER
        needed = (*files.values(), *programs.values())
        missing = [str(path.relative_to(self.root)) for path in needed if not path.is_file()]
        if missing:
            more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
            raise GenieMissingError(
                soc.name, f"the SDK at {self.root} lacks {', '.join(missing[:3])}{more}"
            )
        return GenieLibraries(f"QAIRT SDK {self.root.resolve().name}", files, programs)
