"""The builder's stages, each a plain function: what it reads, what it is told, the folder it fills.

export      checkpoint -> float ONNX + encodings
import      ONNX as others export it -> the one form that all stages behind it know
quantize    encodings for what has none; integer weights of a part
lora        adapters as inputs of the graph
embedding   the embedding table as a file of its own
arcl        float ONNX -> float ONNX at another (AR, CL)
transform   float ONNX -> its parts, cut at layer boundaries, single-head
convert     part + encodings -> QDQ ONNX and DLC
compile     the DLCs of one part -> context binary
package     binaries and configurations -> container (`buildlib.pipeline.package`)
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.embedding.config import EmbedDatatype
from buildlib.graph.shape import GraphShape
from buildlib.lora.config import LoraBuilderInputConfig
from buildlib.pipeline.error_names import naming
from buildlib.pipeline.options import MhaConfig, SplitModelConfig
from buildlib.pipeline.sources import CheckpointSource, OnnxSource
from buildlib.quantize.options import QuantizationOptions
from buildlib.targets import Target
from buildlib.toolchains.base import CompileConfig, Toolchain

MULTI_HEAD = "multi_head"
"""Folder in that of `transform` with the parts before their heads are taken apart."""

LORA_FILE = "genie_lora.json"
"""The engine's block for the adapters that lie beside it."""

EMBEDDING_FILE = "embedding.json"
"""An `EmbeddingConfig` whose path is relative to its folder."""


def export(
    source: CheckpointSource, shape: GraphShape, options: QuantizationOptions, folder: Path
) -> None:
    """Fill `folder` with ONNX, encodings of the bits in `options`, configuration and tokenizer."""
    from buildlib.quantize.export import export_checkpoint
    from buildlib.quantize.recipe import Bitwidths

    bits = Bitwidths.from_options(options)
    export_checkpoint(source.folder, source.calibration_text, folder, shape, bits)


def import_onnx(source: OnnxSource, shape: GraphShape | None, folder: Path) -> None:
    """Fill `folder` with canonical ONNX, encodings, configuration and tokenizer.

    The shape is for an export with symbolic sizes; others keep their own.
    """
    from buildlib.checkpoint.config import load_config
    from buildlib.encodings.files import load_encodings, save_encodings
    from buildlib.files import atomic_write_bytes
    from buildlib.graph.files import external_tensors, link_into, load_model
    from buildlib.graph.validation import check_cache_pairs, check_model, check_sizes, check_types
    from buildlib.importing.importer import ImportModel, check_rotation
    from buildlib.quantize.export import load_tokenizer

    copies = {
        folder / CONFIG_FILE: source.config_file,
        folder / MODEL_FILE: source.model,
    }
    model = load_model(source.model)
    check_model(model, source.model)
    load_tokenizer(source.tokenizer)
    atomic_write_bytes(folder / CONFIG_FILE, source.config.encode())
    with naming(source, copies):
        config = load_config(folder / CONFIG_FILE)
    atomic_write_bytes(folder / TOKENIZER_FILE, source.tokenizer.read_bytes())
    with tempfile.TemporaryDirectory(dir=folder, prefix=".source.") as scratch:
        placed = link_into(source.model, Path(scratch), MODEL_FILE)
        for path in {Path(tensor.path) for tensor in external_tensors(model)}:
            link_into(path, Path(scratch))
        copies[placed] = source.model
        if source.encodings is not None:
            given = save_encodings(load_encodings(source.encodings), Path(scratch) / ENCODINGS_FILE)
            copies[given] = source.encodings
        importing = ImportModel(shape, fixed_keep_theirs=True)
        with naming(source, copies):
            importing.run(placed, folder / MODEL_FILE)
    imported = load_model(folder / MODEL_FILE)
    check_cache_pairs(imported, source.model)
    check_sizes(imported, config, source.config_file)
    check_types(imported, source.model)
    check_rotation(importing.rope, config, source.config_file)


def complete(
    imported: Path, calibration_text: str | None, options: QuantizationOptions, folder: Path
) -> None:
    """Give the model in `imported` encodings for all of it, by calibration where it has none."""
    from buildlib.checkpoint.config import load_config
    from buildlib.encodings.files import load_encodings, save_encodings
    from buildlib.encodings.model import Encodings
    from buildlib.graph.files import link_into, load_model, save_model
    from buildlib.quantize.recipe import Bitwidths, complete_encodings

    config = load_config(imported / CONFIG_FILE)
    source = imported / MODEL_FILE
    windows = _windows(imported, calibration_text)
    encodings = imported / ENCODINGS_FILE
    nothing = Encodings()
    given = load_encodings(encodings) if encodings.is_file() else nothing
    bits = Bitwidths.from_options(options)
    done = complete_encodings(source, given, config, windows, bits)
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        link_into(imported / name, folder)
    save_encodings(done, folder / ENCODINGS_FILE)
    save_model(load_model(source), folder / MODEL_FILE)


def add_lora(
    prepared: Path, config: LoraBuilderInputConfig, calibration_text: str | None, folder: Path
) -> None:
    """Fill `folder` with the model in `prepared` with branches, and the adapters as files."""
    from buildlib.checkpoint.config import load_config
    from buildlib.encodings.files import save_encodings
    from buildlib.files import atomic_write_bytes
    from buildlib.graph.files import link_into, load_model
    from buildlib.lora.adapters import Adapters
    from buildlib.lora.branches import LoraBranches
    from buildlib.lora.calibrate import calibrate_adapters
    from buildlib.lora.config import LoraSet
    from buildlib.lora.projections import find_projections

    source, target = prepared / MODEL_FILE, folder / MODEL_FILE
    model = load_model(source)
    adapters = Adapters.load(LoraSet.load(config.lora_config_path), find_projections(model))
    windows = _windows(prepared, calibration_text)
    alpha = config.alpha_tensor_name
    LoraBranches(adapters.branches, alpha).run(source, target)
    decoder = load_config(prepared / CONFIG_FILE)
    mode = config.quant_updatable_mode
    encodings = calibrate_adapters(target, adapters, alpha, decoder, windows, mode)
    save_encodings(encodings, folder / ENCODINGS_FILE)
    adapters.write(folder)
    atomic_write_bytes(folder / LORA_FILE, adapters.genie(alpha).to_json().encode())
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        link_into(prepared / name, folder)


def extract_embedding(prepared: Path, datatype: EmbedDatatype, folder: Path) -> None:
    """Fill `folder` with the model in `prepared` without its embedding, and the table as a file."""
    from buildlib.embedding.config import TABLE_FILE
    from buildlib.embedding.extraction import EmbeddingExtraction
    from buildlib.embedding.table import write_table
    from buildlib.files import atomic_write_bytes
    from buildlib.graph.files import link_into

    table = write_table(prepared / MODEL_FILE, folder / TABLE_FILE, datatype)
    EmbeddingExtraction().run(prepared / MODEL_FILE, folder / MODEL_FILE)
    named = table.model_copy(update={"embed_path": Path(TABLE_FILE)})
    atomic_write_bytes(folder / EMBEDDING_FILE, named.model_dump_json(indent=2).encode())
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        link_into(prepared / name, folder)


def _windows(prepared: Path, text: str | None) -> list[list[int]]:
    """Calibration text as windows of tokens, as long as the context of the model in `prepared`."""
    from buildlib.checkpoint.config import load_config
    from buildlib.graph import interface
    from buildlib.graph.files import load_model
    from buildlib.quantize.export import text_windows

    shape = interface.model_shape(load_model(prepared / MODEL_FILE))
    if text is None or shape is None:
        return []
    config = load_config(prepared / CONFIG_FILE)
    return text_windows(prepared / TOKENIZER_FILE, text, shape.cl, config.bos_token_id)


def arcl(model: Path, shape: GraphShape, folder: Path) -> None:
    """Write the same model for another (AR, CL); weights stay shared."""
    from buildlib.checkpoint.config import load_config
    from buildlib.graph.shape import check_sliding_window
    from buildlib.passes.arcl import convert_arcl

    check_sliding_window(shape, load_config(model.with_name(CONFIG_FILE)).sliding_window)
    convert_arcl(model, shape, folder / MODEL_FILE)


def transform(
    model: Path, n_splits: int, options: SplitModelConfig, mha2sha: MhaConfig, folder: Path
) -> None:
    """Cut a model into its parts, `{shape}_{k}_of_{n}.onnx`, and their attention into heads.

    The parts as they are before the latter lie in `MULTI_HEAD`.
    """
    from buildlib.passes.mha2sha import convert_mha2sha
    from buildlib.passes.split import split_model

    parts = split_model(
        model,
        n_splits,
        folder / MULTI_HEAD if mha2sha.enabled else folder,
        split_embedding=options.split_embedding,
        split_lm_head=options.split_lm_head,
    )
    if mha2sha.enabled:
        for part in parts:
            with naming(None, {part: Path(part.name)}):
                convert_mha2sha(part, folder / part.name)


def weights(part: Path, folder: Path) -> None:
    """Write the integer weights of a part, which all its shapes share."""
    from buildlib.quantize.qdq import quantize_weights

    quantize_weights(part, folder)


def convert(
    part: Path, weights: Path, stem: str, target: Target, toolchain: Toolchain, folder: Path
) -> None:
    """Apply the encodings beside the part as QDQ and convert to a DLC."""
    from buildlib.encodings.files import load_encodings
    from buildlib.passes.base import ENCODINGS_SUFFIX
    from buildlib.quantize.qdq import apply_encodings

    encodings = load_encodings(part.with_suffix(ENCODINGS_SUFFIX))
    qdq = apply_encodings(part, encodings, folder / f"{stem}.qdq.onnx", weights)
    with naming(None, {qdq: Path(qdq.name)}):
        toolchain.convert(qdq, folder / f"{stem}.dlc", target)


def compile_part(
    dlcs: Sequence[Path], config: CompileConfig, toolchain: Toolchain, binary: Path
) -> None:
    """Compile the graphs of one part into one context binary."""
    with naming(None, {binary: Path(binary.name)}):
        toolchain.compile(dlcs, binary, config)
