"""Artifacts of other runtimes, and containers that are written from them.

Sizes, types and encodings are read from the graphs; all else comes from the files around them, or
from the user.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildlib.cache.file_hashes import hash_files
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import Context, DialogBlock, GenieConfig, Tokenizer
from buildlib.container.genie_engine import (
    Backend,
    Binaries,
    Engine,
    ModelBlock,
    PositionalEncoding,
    QnnHtp,
)
from buildlib.container.manifest import (
    HTP_CONFIG,
    GraphsRecord,
    ModelRecord,
    binary_name,
    plain_name,
)
from buildlib.container.writer import ContainerContents, ContainerFile, htp_config, write_container
from buildlib.embedding.config import TABLE_FILE, EmbeddingConfig
from buildlib.errors import InputFileError
from buildlib.targets import Soc, Target, catalog
from buildlib.toolchains.base import BinaryInfo, TensorInfo
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.qnn.contracts import find_contract


@dataclass(frozen=True, slots=True)
class ForeignArtifact:
    """A model of another runtime, as its files describe it; None where they do not.

    Attributes:
        source: file or folder that it is from.
        contract: of its graphs, by name.
        binaries: context binaries in the order of the parts.
        files: that identify it by their hashes, by their names in the manifest.
        bos: token before a text, -1 for none.
        eos: tokens that end an answer.
        weight_sharing: whether graphs of a binary share weights, which the emulator cannot run.
        table: for graphs that take embeddings.
        positions: of graphs that take cosines and sines.
    """

    source: Path
    name: str
    contract: str
    binaries: tuple[Path, ...]
    files: Mapping[str, Path]
    tokenizer: Path | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    architecture: str = "unknown"
    weight_sharing: bool | None = None
    toolchain: Mapping[str, str] = field(default_factory=dict)
    table: EmbeddingConfig | None = None
    positions: PositionalEncoding | None = None

    def special_tokens(self) -> tuple[Path, int, tuple[int, ...]]:
        """Return tokenizer, token before a text, and those that end an answer."""
        options = {
            "a tokenizer (--tokenizer FILE)": self.tokenizer is None,
            "the token before a text (--bos ID, -1 for none)": self.bos is None,
            "the tokens that end an answer (--eos ID)": not self.eos,
        }
        if self.tokenizer is None or self.bos is None or not self.eos:
            names = ", ".join(name for name, is_absent in options.items() if is_absent)
            raise InputFileError(str(self.source), f"it lacks {names}")
        return self.tokenizer, self.bos, self.eos


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Sizes that the graphs of a model agree on.

    Attributes:
        lengths: context lengths, ascending.
    """

    ars: tuple[int, ...]
    lengths: tuple[int, ...]
    vocabulary: int
    head_dim: int
    types: Mapping[str, str]
    vtcm_mb: int


def write_artifact(
    artifact: ForeignArtifact, dest: Path, *, target: Target | None = None, exist_ok: bool = False
) -> GenAIContainer:
    """Write an artifact as a container.

    Args:
        target: phone or emulator; by default the phone of the binaries' SoC.
    """
    tokenizer, *_ = artifact.special_tokens()
    toolchain = OrtQnnToolchain()
    infos = [toolchain.inspect(path) for path in artifact.binaries]
    try:
        shapes = _shapes(infos, artifact.contract)
        target = _check_target(infos, target, shares=bool(artifact.weight_sharing))
        _check_tokens(artifact, shapes.vocabulary)
    except ValueError as error:
        raise InputFileError(str(artifact.source), str(error)) from error
    name, parts = plain_name(artifact.name), len(infos)
    binaries = {
        binary_name(name, number, parts): path for number, path in enumerate(artifact.binaries, 1)
    }
    extensions = htp_config(target)
    extras = {}
    if artifact.table is not None:
        extras[TABLE_FILE] = ContainerFile(artifact.table.embed_path, "embedding")
    contents = ContainerContents(
        target=target,
        model=ModelRecord(
            name=name,
            architecture=plain_name(artifact.architecture),
            inputs={
                file: digest.sha256
                for file, digest in zip(
                    artifact.files, hash_files(artifact.files.values()).values(), strict=True
                )
            },
            quantization=shapes.types,
        ),
        graphs=GraphsRecord(
            auto_regression_numbers=shapes.ars,
            context_length=shapes.lengths[-1],
            context_lengths=shapes.lengths,
            splits=parts,
        ),
        genie_config=_dialog(artifact, shapes, tuple(binaries), target),
        # Binaries of unknown origin are taken for shared on phones, as most are.
        htp_config=extensions.without_sharing() if artifact.weight_sharing is False else extensions,
        tokenizer=tokenizer,
        binaries=binaries,
        toolchain={**artifact.toolchain, "QNN": infos[0].build_id},
        options={"target": str(target), "graphs.vtcm_size_in_mb": shapes.vtcm_mb},
        extras=extras,
        contract=artifact.contract,
    )
    return write_container(contents, dest, exist_ok=exist_ok)


def _shapes(infos: list[BinaryInfo], name: str) -> _Shapes:
    """Read the sizes of a model from its graphs."""
    graphs = [graph for info in infos for graph in info.graphs]
    contract = find_contract(tensor.name for graph in graphs for tensor in graph.inputs)
    if contract.name != name:
        raise ValueError(f"its graphs are of the contract {contract.name}, not of {name}")
    sizes: dict[int, set[int]] = {}
    caches: list[TensorInfo] = []
    grids: set[object] = set()
    for graph in graphs:
        inputs = {tensor.name: tensor for tensor in graph.inputs}
        past = [(inputs[one], is_key) for one, is_key, _ in contract.caches(inputs)]
        grids |= {(tensor.dtype, tensor.encoding) for tensor, _ in past}
        keys = [tensor for tensor, is_key in past if is_key and len(tensor.shape) > 1]
        for mask in graph.inputs:
            if keys and re.fullmatch(contract.mask, mask.name) and len(mask.shape) > 1:
                ar, slots = mask.shape[-2], keys[0].shape[-1]
                sizes.setdefault(ar, set()).add(ar + slots)
                caches.append(keys[0])
    logits = [
        tensor
        for graph in graphs
        for tensor in graph.outputs
        if re.fullmatch(contract.logits, tensor.name)
        and (contract.new is not None or (tensor.dtype, tensor.encoding) not in grids)
    ]
    if not sizes or not logits:
        raise ValueError(f"its graphs lack {'logits' if sizes else 'a mask'} of {name}")
    return _Shapes(
        ars=tuple(sorted(sizes)),
        lengths=tuple(sorted(sizes[min(sizes)])),
        vocabulary=logits[0].shape[-1],
        head_dim=caches[0].shape[-2],
        types={"keys": caches[0].dtype, "logits": logits[0].dtype},
        vtcm_mb=max(graph.vtcm_mb for graph in graphs),
    )


def _check_target(infos: list[BinaryInfo], target: Target | None, *, shares: bool) -> Target:
    models = {info.soc_model for info in infos}
    socs: list[Soc] = [soc for soc in catalog() if {soc.soc_model} == models]
    if not socs:
        numbers = ", ".join(map(str, sorted(models)))
        raise ValueError(f"its binaries are for soc_model {numbers}, which no SoC here has")
    target = target or Target(socs[0])
    if target.soc not in socs:
        names = " or ".join(soc.name for soc in socs)
        raise ValueError(f"its binaries are for {names}, not for {target.soc.name}")
    if target.emulator and shares:
        raise ValueError(
            "its graphs share weights, which the emulator cannot run: export it without sharing, "
            f"or import it for {target.soc.name}"
        )
    return target


def _check_tokens(artifact: ForeignArtifact, vocabulary: int) -> None:
    tokenizer, bos, eos = artifact.special_tokens()
    ids = load_tokenizer(tokenizer).get_vocab(with_added_tokens=True).values()
    last = max(ids, default=-1)
    if last >= vocabulary:
        raise ValueError(
            f"its graphs know {vocabulary} tokens, and {tokenizer} has the id {last}: it "
            "is the tokenizer of another model"
        )
    for option, tokens, least in (("--bos", (bos,), -1), ("--eos", eos, 0)):
        for token in tokens:
            if not least <= token < vocabulary:
                raise ValueError(
                    f"its graphs know {vocabulary} tokens, and {option} is {token}: give another"
                )


def _dialog(
    artifact: ForeignArtifact, shapes: _Shapes, ctx_bins: tuple[str, ...], target: Target
) -> GenieConfig:
    """Return the configuration that the graph runtime reads, in the form of Genie's."""
    _, bos, (first, *more) = artifact.special_tokens()
    config = GenieConfig(
        dialog=DialogBlock(
            context=Context(
                size=shapes.lengths[-1],
                n_vocab=shapes.vocabulary,
                bos_token=bos,
                eos_token=(first, *more) if more else first,
            ),
            tokenizer=Tokenizer(),
            embedding=artifact.table.genie() if artifact.table else None,
            engine=Engine(
                backend=Backend(qnn_htp=QnnHtp(kv_dim=shapes.head_dim), extensions=HTP_CONFIG),
                model=ModelBlock(
                    binary=Binaries(ctx_bins=ctx_bins), positional_encoding=artifact.positions
                ),
            ),
        )
    )
    return config.for_emulator() if target.emulator else config
