"""Adapters of a container: a zero-padded tensor for each input of the graph.

A use case mixes adapters by laying their matrices side by side: A = [A1 A2], B = [w1 B1; w2 B2]
gives w1 A1 B1 + w2 A2 B2 at the sum of their ranks. The rank of a branch is the largest of all use
cases.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.builder.lora_config import LoraBuilderInputConfig, LoraSet, UseCase
from buildlib.container.genie_engine import Lora, LoraAdapter
from buildlib.errors import ModelFileError
from buildlib.files import atomic_write_bytes
from buildlib.quantize.techniques.base import Factors
from plugins.lora.branches import Branch, a_name, b_name
from plugins.lora.peft import LowRank, Matrix, Module, PeftAdapter, read_adapter
from plugins.lora.projections import FUSED, Projection, find_projections

LORA_FOLDER = "lora"


@dataclass(frozen=True)
class _Rows:
    """Some rows of an adapter's B, with the A that they share with the others."""

    matrices: LowRank
    first: int
    count: int


@dataclass(frozen=True)
class Adapters:
    """All adapters of a container, placed in one model.

    Attributes:
        branches: of the graph, in the order of its layers.
        names: of the use cases.
        factors: of the weights of the model, as `load` takes them.
    """

    branches: tuple[Branch, ...]
    cases: tuple[UseCase, ...]
    placed: Mapping[str, Mapping[Module, _Rows]]
    factors: Factors

    @classmethod
    def load(
        cls,
        lora: LoraSet,
        projections: Mapping[int, Mapping[str, Projection]],
        factors: Factors | None = None,
    ) -> "Adapters":
        """Read all adapters and fit them to a model.

        Args:
            factors: of weights by name, in a rescaled model; adapters are of the model before it.

        Raises:
            ModelFileError: an adapter is damaged; or it is another model's: it changes a module
                that the model does not have, or one of another size, or not all layers that its
                model had.
        """
        placed = {
            adapter.name: _place(adapter.path, read_adapter(adapter.path), projections)
            for adapter in lora.adapters
        }
        ranks: Counter[Module] = Counter()
        for case in lora.cases:
            of_case: Counter[Module] = Counter()
            for name in case.adapters:
                of_case.update({module: r.matrices.rank for module, r in placed[name].items()})
            ranks |= of_case
        branches = tuple(
            Branch(module, projections[module.layer][module.name], ranks[module])
            for module in sorted(ranks)
        )
        return cls(branches, lora.cases, placed, factors or {})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the use cases."""
        return tuple(case.name for case in self.cases)

    def tensors(self, name: str) -> dict[str, Matrix]:
        """Return A [in, rank] and B [rank, out] of every branch for a use case, by input."""
        (case,) = (case for case in self.cases if case.name == name)
        tensors: dict[str, Matrix] = {}
        for branch in self.branches:
            a = np.zeros((branch.projection.n_in, branch.rank), np.float32)
            b = np.zeros((branch.rank, branch.projection.n_out), np.float32)
            begin = 0
            for adapter, weight in case.adapters.items():
                rows = self.placed[adapter].get(branch.module)
                if rows is None:
                    continue
                half_a, half_b = rows.matrices.matrices()
                end = begin + rows.matrices.rank
                a[:, begin:end] = half_a.T
                b[begin:end] = weight * half_b[rows.first : rows.first + rows.count].T
                begin = end
            of_inputs, of_outputs = branch.projection.factors(self.factors)
            tensors[a_name(branch.module)] = a * of_inputs[:, None]
            tensors[b_name(branch.module)] = b * of_outputs
        return tensors

    def genie(self, alpha_name: str) -> Lora:
        """Return the block of the engine, for files as `write` puts them."""
        adapters = (LoraAdapter(name=name, path=f"{LORA_FOLDER}/{name}") for name in self.names)
        return Lora(lora_version=1, alpha_tensor_name=alpha_name, adapters=tuple(adapters))

    def write(self, folder: Path) -> dict[str, Path]:
        """Write `lora/<use case>/<input>.raw` under `folder`, float32, as Genie reads them.

        Returns:
            Every file, by its name relative to `folder`.
        """
        files: dict[str, Path] = {}
        for case in self.names:
            for tensor, values in self.tensors(case).items():
                name = f"{LORA_FOLDER}/{case}/{tensor}.raw"
                files[name] = folder / name
                atomic_write_bytes(files[name], values.tobytes())
        return files


def check_adapters(config: LoraBuilderInputConfig, model: ir.Model) -> None:
    """Check that the adapters of a builder's configuration fit a model."""
    Adapters.load(LoraSet.load(config.lora_config_path), find_projections(model))


def _place(
    path: Path,
    adapter: PeftAdapter,
    projections: Mapping[int, Mapping[str, Projection]],
) -> dict[Module, _Rows]:
    placed: dict[Module, _Rows] = {}
    for module, matrices in adapter.modules.items():
        modules = projections.get(module.layer, {})
        parts = _parts(module.name, modules)
        if not modules.keys() >= {*parts}:
            have = ", ".join(sorted(modules)) or "no such layer"
            raise ModelFileError(path, f"the model has no {module} (it has {have})")
        sizes = [modules[name].n_out for name in parts]
        n_in, n_out = modules[parts[0]].n_in, sum(sizes)
        own_in, own_out = matrices.a.shape[1], matrices.b.shape[0]
        if (own_in, own_out) != (n_in, n_out):
            reason = f"{module} maps {own_in} to {own_out}, in the model {n_in} to {n_out}"
            raise ModelFileError(path, reason)
        first = 0
        for name, size in zip(parts, sizes, strict=True):
            placed[Module(module.layer, name)] = _Rows(matrices, first, size)
            first += size
    for layer, name in itertools.product(projections, adapter.everywhere):
        modules = projections[layer]
        has_it = modules.keys() >= {*_parts(name, modules)}
        if has_it and Module(layer, name) not in adapter.modules:
            reason = f"it is another model's: it changes {name} of all layers, but not of {layer}"
            raise ModelFileError(path, reason)
    return placed


def _parts(name: str, modules: Collection[str]) -> tuple[str, ...]:
    """Return the modules of a layer that a module of the adapter is."""
    return (name,) if name in modules else FUSED.get(name, (name,))
