"""`qnnfarm inspect`: shows a container, a checkpoint, or one file of the many that are built."""

import dataclasses
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from buildlib.builder.build_options import BuildOptions, no_effects
from buildlib.builder.model_place import find_reader, find_snapshot, is_hub_model
from buildlib.cache.layout import SIDECAR
from buildlib.cache.records import read_files, read_info
from buildlib.checkpoint.architectures import detect_architecture
from buildlib.checkpoint.config import load_config, unread_keys
from buildlib.checkpoint.generation import load_generation
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE, read_json
from buildlib.checkpoint.tokenizer import (
    describe_trimming,
    load_tokenizer,
    read_tokenizer,
    words_around,
)
from buildlib.container.chat_template import ChatTemplate
from buildlib.container.container import GenAIContainer
from buildlib.container.dlc import DlcInfo, inspect_dlc, is_dlc
from buildlib.container.genie_decoding import SPECULATIVE
from buildlib.container.manifest import (
    KV_BYTES,
    METADATA,
    PRECISION,
    ContainerMetadata,
    is_container,
)
from buildlib.container.op_packages import registrations
from buildlib.errors import InputFileError
from buildlib.genai import builders
from buildlib.sizes import size_text
from buildlib.toolchains.base import BinaryInfo
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.validation import NoEffect
from harness.cli.arguments import Json
from harness.cli.tensors import (
    print_facts,
    print_tensors,
    read_binaries,
)
from harness.console import answers, print_json, print_rows

_Infos = Mapping[str, BinaryInfo | DlcInfo]


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="The folder of a container or of a checkpoint, a context binary, a DLC, a GGUF, "
            "or an entry of the cache."
        ),
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Show every tensor, not one line for equal ones.")
    ] = False,
    json: Json = False,
) -> None:
    """Show manifest, sizes, graphs, tensors, encodings and versions of something built.

    Of a checkpoint: the values that `config.json` gives, and its keys that are not read. Of a GGUF:
    its model, types, tokenizer and template, and whether it builds.

    Example: qnnfarm inspect CONTAINER_DIR
    """
    if not path.exists():
        raise InputFileError(str(path), "no such file or folder")
    path = find_snapshot(path) if is_hub_model(path) else path
    if (path / SIDECAR).is_file():
        _inspect_entry(path, every=tensors, json=json)
    elif (reader := find_reader(path)) is not None:
        reader.inspect(path, every=tensors, json=json)
    elif path.is_file():
        info = _read(path)
        if json:
            print_json({_kind(info): dataclasses.asdict(info)})
        else:
            _print_infos(answers(), {path.name: info}, every=tensors)
    elif (path / CONFIG_FILE).is_file() and not is_container(path):
        _inspect_checkpoint(path / CONFIG_FILE, json=json)
    elif (path / METADATA).exists():
        _inspect_container(path, every=tensors, json=json)
    else:
        reason = f"the folder has no {METADATA} (a container), {CONFIG_FILE} (a model) or {SIDECAR}"
        raise InputFileError(str(path), f"{reason} (an entry of the cache)")


def _inspect_checkpoint(config_file: Path, *, json: bool) -> None:
    data = read_json(config_file)
    unknown = isinstance(data, dict) and detect_architecture(data) is None
    others = (builder.read_config(config_file) for builder in builders()) if unknown else ()
    config = next((other for other in others if other is not None), None)
    if config is None:
        config = load_config(config_file).model_dump(mode="json", exclude_none=True)
    model, unread = unread_keys(config_file)
    about = _tokenizer_facts(config_file.with_name(TOKENIZER_FILE))
    acting = load_generation(config_file.parent).model_dump(mode="json", exclude_unset=True)
    if json:
        more = {"tokenizer": about, "generation": acting}
        print_json({"config": config, "class": model, "not_read": unread, **more})
        return
    facts = {f"tokenizer {key}": value for key, value in about.items()}
    facts |= {f"generation {key}": value for key, value in acting.items()}
    print_facts(answers(), {**config, **facts, f"not read by {model}": ", ".join(unread)})


def _tokenizer_facts(path: Path) -> dict[str, str]:
    """Say what a tokenizer puts around texts, and what of its file is switched off."""
    if not path.is_file():
        return {}
    tokenizer = load_tokenizer(path)
    before, after = words_around(tokenizer)
    trimming = describe_trimming(read_tokenizer(path))
    off = {"file": f"{trimming}: switched off, here and in the container"} if trimming else {}
    return {"puts before a text": before or "nothing", "after it": after or "nothing", **off}


def _inspect_container(path: Path, *, every: bool, json: bool) -> None:
    container = GenAIContainer.load(path)
    template = ChatTemplate.find(path)
    infos = read_binaries(container)
    if json:
        print_json(
            {
                "metadata": container.metadata.model_dump(mode="json"),
                "sizes_by_kind": container.sizes_by_kind,
                "without_effect": {
                    key: note.reason for key, note in _without_effect(container.metadata).items()
                },
                "chat_template": None if template is None else template.text,
                "binaries": {name: dataclasses.asdict(info) for name, info in infos.items()},
            }
        )
        return
    console = answers()
    _print_manifest(console, container, template)
    _print_infos(console, infos, every=every)


def _inspect_entry(folder: Path, *, every: bool, json: bool) -> None:
    info, described = read_info(folder), read_files(folder)
    infos = {n: _read(folder / n) for n in described.files if n.endswith((".bin", ".dlc"))}
    if json:
        print_json(
            {
                "entry": info.model_dump(mode="json") | described.model_dump(mode="json"),
                "graphs": {name: dataclasses.asdict(about) for name, about in infos.items()},
            }
        )
        return
    console = answers()
    facts = {
        "operation": info.operation,
        "subject": described.subject,
        "source": info.source,
        "created": info.created_at,
        **described.versions,
    }
    print_facts(console, facts)
    _print_files(console, {name: (file.size_bytes, "") for name, file in described.files.items()})
    _print_infos(console, infos, every=every)


def _read(path: Path) -> BinaryInfo | DlcInfo:
    return inspect_dlc(path) if is_dlc(path) else OrtQnnToolchain().inspect(path)


def _kind(info: BinaryInfo | DlcInfo) -> str:
    return "dlc" if hasattr(info, "members") else "binary"


def _print_manifest(
    console: Console, container: GenAIContainer, template: ChatTemplate | None
) -> None:
    metadata = container.metadata
    modified_at = (container.path / METADATA).stat().st_mtime
    target, graphs, model = metadata.target, metadata.graphs, metadata.model
    remarks = () if metadata.loss is None else metadata.loss.lines
    facts: dict[str, object] = {
        "model": f"{model.name} ({model.architecture})",
        "target": f"{target.name} (soc_model {target.soc_model}, {target.dsp_arch})",
        "weight sharing": "yes" if target.weight_sharing else "no",
        "AR": ", ".join(map(str, graphs.auto_regression_numbers)),
        "CL": ", ".join(map(str, graphs.context_lengths)),
        "parts": graphs.splits,
        "contract": metadata.contract,
        "SHA-256": metadata.container_sha256,
        "written": datetime.fromtimestamp(int(modified_at), UTC),
        "precision": container.precision,
        "loss": metadata.loss,
        **{f"loss {n}": remark for n, remark in enumerate(remarks, 1)},
        "KV cache": _kv_cache(container),
        "chat template": "none" if template is None else "yes",
        "proposed sampler": _sampler(container),
        **{
            f"stored {name}": value
            for name, value in model.quantization.items()
            if name not in {PRECISION, KV_BYTES}
        },
        **metadata.toolchain,
        **metadata.options,
        **{f"{key} has": str(note) for key, note in _without_effect(metadata).items()},
    }
    if not container.embeds and container.genie_config.dialog.type in SPECULATIVE:
        known = metadata.speculation
        facts["speculation"] = (
            "not compared with plain decoding" if known is None else known.described
        )
    for number, one in enumerate(registrations(metadata.op_packages), 1):
        facts[f"registers {number}"] = f"{one} sha256:{metadata.files[one.file].sha256[:16]}"
    print_facts(console, facts)
    _print_files(console, {part.name: (part.size_bytes, part.kind) for part in container.sizes})


def _without_effect(metadata: ContainerMetadata) -> dict[str, NoEffect]:
    """Return the options of a build that were set, and changed nothing."""
    compiler, defaults = metadata.toolchain.get("toolchain"), BuildOptions().as_options()
    notes, of_graphs = no_effects(), re.compile(r"^ar\d+\.|\[[^\]]*\]")
    named = ((key, of_graphs.sub("", key), value) for key, value in metadata.options.items())
    return {
        key: notes[plain]
        for key, plain, value in named
        if plain in notes
        and notes[plain].toolchain in {"", compiler}
        and value != defaults.get(plain)
    }


def _sampler(container: GenAIContainer) -> str | None:
    """Say how a program that opens the container's dialog by itself chooses tokens."""
    if container.embeds:
        return None
    sampler = container.genie_config.dialog.sampler
    penalty = sampler.token_penalty and sampler.token_penalty.repetition_penalty
    values = {"temp": sampler.temp, "top-k": sampler.top_k, "top-p": sampler.top_p}
    words = (
        ["greedy"]
        if sampler.is_greedy
        else [f"{key} {one:g}" for key, one in values.items() if one is not None]
    )
    return ", ".join([*words, *([f"repetition penalty {penalty:g}"] if penalty else [])])


def _kv_cache(container: GenAIContainer) -> str | None:
    """Say what the cache takes, and what a decode step reads: cache and weights."""
    n_bytes, length = container.kv_cache_bytes, container.metadata.graphs.context_length
    if n_bytes is None:
        return None
    step = n_bytes + container.sizes_by_kind["binary"]
    return (
        f"{size_text(n_bytes)} at CL {length}, {size_text(n_bytes // length)} a token; a decode "
        f"step reads it and the weights, up to {size_text(step)}"
    )


def _print_files(console: Console, files: Mapping[str, tuple[int, str]]) -> None:
    total = sum(size for size, _ in files.values())
    rows: list[list[Text | str]] = [
        [name, kind, size_text(size), f"{100 * size / total:.1f} %" if total else ""]
        for name, (size, kind) in files.items()
    ]
    rows.append([Text("together", "bold"), "", size_text(total), ""])
    console.print()
    print_rows(("file", "kind", "size", "share"), rows, right={"size", "share"}, console=console)


def _print_infos(console: Console, infos: _Infos, *, every: bool) -> None:
    for name, info in infos.items():
        console.print(f"\n{name}", style="bold", end="")
        console.print(f"  {size_text(info.size_bytes)}", end="")
        if isinstance(info, DlcInfo):
            console.print(" DLC")
            for dlc_graph in info.graphs:
                console.print(f"  {dlc_graph.name}", style="bold")
                for what, counts in (
                    ("operators", dlc_graph.operators),
                    ("weights", dlc_graph.weight_elements),
                ):
                    words = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
                    console.print(f"    {what}: {words}")
                print_tensors(console, dlc_graph.inputs, dlc_graph.outputs, every=every)
            continue
        console.print(
            f", soc_model {info.soc_model}, {info.dsp_arch}, QNN {info.build_id}, "
            f"HTP {info.backend_api_version}, format {info.blob_version}"
        )
        for graph in info.graphs:
            console.print(f"  {graph.name}", style="bold", end="")
            console.print(
                f"  VTCM {graph.vtcm_mb} MiB, "
                f"O{graph.optimization_level}, spill {size_text(graph.spill_fill_bytes)}"
            )
            print_tensors(console, graph.inputs, graph.outputs, every=every)
