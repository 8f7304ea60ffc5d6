"""`qnnfarm inspect`: what is in a container, read from the container."""

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.table import Table

from harness.cli.arguments import ContainerDir, Json
from harness.cli.console import answers, print_json

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer
    from buildlib.toolchains.base import BinaryInfo


def inspect(
    container_dir: ContainerDir,
    json: Json = False,
) -> None:
    """Show a container's manifest, and what its binaries say: graphs, tensors, versions."""
    from buildlib.container.container import GenAIContainer
    from buildlib.toolchains.ort_qnn import OrtQnnToolchain

    container = GenAIContainer.load(container_dir)
    toolchain = OrtQnnToolchain()
    binaries = {
        name: toolchain.inspect(container.files[name]) for name in container.genie_config.ctx_bins
    }
    if json:
        print_json(
            {
                "metadata": container.metadata.model_dump(mode="json"),
                "binaries": {name: dataclasses.asdict(info) for name, info in binaries.items()},
            }
        )
        return
    _show(container, binaries)


def _show(container: "GenAIContainer", binaries: dict[str, "BinaryInfo"]) -> None:
    console = answers()
    metadata, target = container.metadata, container.metadata.target
    facts: dict[str, Any] = {
        "model": f"{metadata.model.name} ({metadata.model.architecture})",
        "target": f"{target.name} (soc_model {target.soc_model}, {target.dsp_arch})",
        "weight sharing": "yes" if target.weight_sharing else "no",
        "AR": ", ".join(map(str, metadata.graphs.auto_regression_numbers)),
        "CL": metadata.graphs.context_length,
        "SHA-256": metadata.container_sha256,
        "built": metadata.created_at,
    }
    facts |= metadata.toolchain
    for name, value in facts.items():
        console.print(f"[bold]{name:24}[/bold] {value}")
    files = Table("file", "bytes", "SHA-256", box=None, header_style="bold")
    for name, entry in metadata.files.items():
        files.add_row(name, f"{entry.size_bytes:,}", entry.sha256[:16])
    console.print()
    console.print(files)
    for name, info in binaries.items():
        console.print(
            f"\n[bold]{name}[/bold]  soc_model {info.soc_model}, {info.dsp_arch}, "
            f"QNN {info.build_id}, {info.size_bytes:,} bytes"
        )
        for graph in info.graphs:
            console.print(f"  {graph.name}: VTCM {graph.vtcm_mb} MiB, O{graph.optimization_level}")
            table = Table(
                "", "tensor", "shape", "type", "scale", "offset", box=None, header_style="dim"
            )
            for kind, tensors in (("in", graph.inputs), ("out", graph.outputs)):
                for tensor in tensors:
                    encoding = tensor.encoding
                    table.add_row(
                        f"    {kind}",
                        tensor.name,
                        "x".join(map(str, tensor.shape)),
                        tensor.dtype,
                        f"{encoding.scale:.4g}" if encoding else "",
                        str(encoding.offset) if encoding else "",
                    )
            console.print(table)
