"""`compile`: the DLCs of one part as one context binary.

Beside `<stem>.bin` stands `<stem>_cache_info.json`, the binary's own description: its graphs with
their tensors, and its target.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buildlib.builder.original_paths import original_paths
from buildlib.builder.parts import Part
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.graph.shape import GraphShape
from buildlib.toolchains.base import OpPackageLibrary, Toolchain
from buildlib.toolchains.compile_config import CompileConfig


@dataclass(frozen=True)
class CompilePart(CachedStage):
    """The context binary of one part, with the graphs of all its shapes.

    Attributes:
        converted: the part at each shape.
        config: how its graphs are compiled.
        binary: name of the file.
        op_packages: libraries of the graphs' own operations, and their SHA-256.
    """

    operation = "compile"
    compiles = True
    converted: Mapping[GraphShape, CacheEntry]
    part: Part
    config: CompileConfig
    binary: str
    toolchain: Toolchain
    op_packages: Mapping[OpPackageLibrary, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return f"part {self.part.number} of {self.part.count}"

    @property
    def dlcs(self) -> Sequence[Path]:
        """The part's DLCs in the order of its shapes."""
        return [
            entry.folder / f"{self.part.graph(shape)}.dlc"
            for shape, entry in self.converted.items()
        ]

    @property
    def source(self) -> Path:
        return self.dlcs[0]

    @property
    def options(self) -> Mapping[str, object]:
        return self.config.compiled_part().model_dump(mode="json")

    @property
    def inputs(self) -> tuple[str, ...]:
        packages = (f"{one.provider} {sha256}" for one, sha256 in self.op_packages.items())
        return (*super().inputs, *packages)

    def run(self, folder: Path) -> None:
        binary = folder / self.binary
        with original_paths(None, {binary: Path(binary.name)}):
            ports = {dlc.stem: ports for dlc in self.dlcs if (ports := self.part.ports(dlc))}
            packages = tuple(self.op_packages)
            info = self.toolchain.compile(self.dlcs, binary, self.config, packages, ports)
        described = json.dumps(dataclasses.asdict(info), indent=2) + "\n"
        (folder / f"{binary.stem}_cache_info.json").write_text(described, encoding="utf-8")
