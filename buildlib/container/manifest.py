"""`metadata.json`: origin of a container, options to rebuild it, and the hash of every file.

Format history:
    1: first version.
    2: several context lengths, files in sub-folders, more kinds of parts, type of the container.
    3: `container_sha256` covers model, graphs and target beside the files. Containers of older
       formats keep theirs, over the files alone, so that their results stay together.
    4: `speculation`, and no `created_at`.
    5: `op_packages`, which the digest of a container that has some covers too.
    6: `contract`, which the digest covers if it is another than Genie's.
    7: `loss`.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from buildlib.container.op_packages import OpPackage, registrations
from buildlib.errors import ContainerError
from buildlib.validation import first_fault

GENIE_CONFIG: Final = "genie_config.json"
HTP_CONFIG: Final = "htp_backend_ext_config.json"
TOKENIZER: Final = "tokenizer.json"
METADATA: Final = "metadata.json"
ARCHIVE_SUFFIX: Final = ".genie.zip"
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_LONGEST = 1000
_LONGEST_STEM = 120  # file names end at 255 bytes, and what is unfinished has longer ones


def binary_name(model_name: str, part: int, parts: int) -> str:
    """Return the name of the context binary of a split; parts count from 1.

    A model is named after its folder, which may have a name that no file of a container can have.
    """
    return f"{archive_stem(model_name)}_part_{part}_of_{parts}.bin"


def file_name_problem(names: Iterable[str]) -> str | None:
    """Return why a name cannot be that of a file in a container, for the first bad name, or `None`.

    Names are relative paths of plain segments, so that no container reaches out of its folder,
    neither here nor on a device or in an archive.
    """
    files = set(names)
    for name in sorted(files):
        segments = name.split("/")
        if name == METADATA or len(name) > _LONGEST or not all(map(_SEGMENT.fullmatch, segments)):
            return f"{name!r} is no name for a file of a container"
        parents = {"/".join(segments[:depth]) for depth in range(1, len(segments))}
        if parents & files:
            return f"{min(parents & files)!r} is a file and a folder at once"
    return None


def archive_stem(model_name: str) -> str:
    """Return a model's name as a part of file names."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", model_name).lstrip(".-")[:_LONGEST_STEM] or "model"


def has_file(files: Iterable[str], name: str) -> bool:
    """Return whether a name is that of one of the files, or of a folder with some."""
    below = name.rstrip("/") + "/"
    return any(file == name or file.startswith(below) for file in files)


FORMAT_VERSION: Final = 7
MAX_NAME: Final = 200
"""Characters of a model's name."""
GENIE_CONTRACT: Final = "genie"
"""Contract of the graphs that Genie runs; see `buildlib.toolchains.qnn.contracts`."""
PRECISION: Final = "precision"
"""Key in `quantization` of the short text, as `W4A16`, and `W4A16KV16` with a cache of 16 bits."""
KV_BYTES: Final = "kv_bytes_per_token"
"""Key in `quantization` of the bytes that a token takes in the KV cache."""
RESCALED: Final = "rescaled"
"""Key in `quantization` of the layers whose keys and values were rescaled, and by how much."""
HIDDEN_STATES: Final = "hidden_states"
"""Key in `quantization` of what spread the massive channels of the hidden states, if anything."""
CLIPPED_ADAPTERS: Final = "clipped_adapters"
"""Key in `quantization` of the names of adapters that leave the ranges, with `, ` between them."""
T = TypeVar("T")
_MAX_BYTES = 16 * 1024 * 1024
_FILES_ALONE = 2
"""Last format whose digest covers the files alone."""
_DATED = 3
"""Last format with `created_at`, in which alone equal builds differed."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys: controls, separators of lines, bidirectional controls."""


def plain_name(text: str) -> str:
    """Return a name for a model from the name of its folder, which may be any."""
    return _CONTROLS.sub(" ", text)[:MAX_NAME].strip() or "model"


def _check_controls(text: str) -> str:
    if control := _CONTROLS.search(text):
        raise ValueError(f"has the control character U+{ord(control[0]):04X}")
    return text


Name = Annotated[str, AfterValidator(_check_controls)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Scalar = str | int | float | bool | None
PositiveInt = Annotated[int, Field(ge=1)]
PartKind = Literal[
    "binary", "tokenizer", "configuration", "embedding", "lora", "forecast_prefix", "op_package"
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class FileRecord(_Part):
    """One file of the container."""

    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=0)]
    kind: PartKind


class ModelRecord(_Part):
    """The model before it was compiled.

    Attributes:
        inputs: SHA-256 of the files that the container was built from, by name.
        quantization: how its tensors are stored, in words and numbers; under `PRECISION` the short
            form. Older containers have other keys.
        origin: id and commit of a model of the Hugging Face hub: `Qwen/Qwen3-0.6B@c1899de2`.
    """

    name: Annotated[Name, Field(min_length=1, max_length=MAX_NAME)]
    origin: Name | None = None
    architecture: Name
    parameters: Annotated[int, Field(ge=0)] | None = None
    inputs: Mapping[str, Sha256]
    quantization: Mapping[str, Scalar]


class GraphsRecord(_Part):
    """Graphs of the container.

    Attributes:
        auto_regression_numbers: tokens per graph call, one graph a part for each.
        context_length: the largest, which is that of the dialog.
        context_lengths: all, ascending; by default just that one.
        splits: number of parts, one context binary each.
    """

    auto_regression_numbers: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    context_length: PositiveInt
    context_lengths: tuple[PositiveInt, ...] = ()
    splits: PositiveInt

    @model_validator(mode="after")
    def _agrees(self) -> "GraphsRecord":
        lengths = tuple(sorted({*self.context_lengths, self.context_length}))
        if self.context_lengths and (
            self.context_lengths != lengths or lengths[-1] != self.context_length
        ):
            raise ValueError("context_lengths do not ascend to context_length")
        object.__setattr__(self, "context_lengths", lengths)  # frozen only for others
        return self


class TargetRecord(_Part):
    """Target of the binaries; `name` is the form that `buildlib.targets` parses."""

    name: Name
    soc_model: int
    dsp_arch: Name
    emulator: bool
    weight_sharing: bool


class SpeculationRecord(_Part):
    """Greedy texts of a dialog that speculates, compared with plain decoding's.

    Attributes:
        genie: version of the Genie that gave both.
        genie_sha256: of its library.
        prompts: number of prompts.
        tokens: of each answer.
        differing: number of prompts with different texts.
    """

    genie: Name
    genie_sha256: Sha256
    prompts: PositiveInt
    tokens: PositiveInt
    differing: Annotated[int, Field(ge=0)]

    @property
    def agrees(self) -> bool:
        """True if no text differs."""
        return self.differing == 0

    def __str__(self) -> str:
        differ = self.differing or "none"
        return f"{differ} of {self.prompts} texts differ from plain decoding's"

    @property
    def described(self) -> str:
        """Itself, with the Genie that it holds for."""
        return f"{self} (Genie {self.genie}, {self.tokens} tokens each)"


class LossRecord(_Part):
    """Loss of quantization: the quantized model on this host's CPU beside the model in float.

    Attributes:
        kl_divergence: mean over the tokens of a part of the calibration text, in nats.
        top1_agreement: part of the tokens at which both find the same token most probable.
        perplexity, perplexity_float: of the same tokens.
        tokens: number of them.
        kinds: KL divergence of each kind of tensors (weight, key, value, residual, activation)
            quantized alone; empty where the whole is small.
        remarks: what the bits do not hold, each a line with its remedy, the greatest loss first.
        cache_remark: why keys and values have 16 bits, where the build has chosen them.
    """

    kl_divergence: float
    top1_agreement: float
    perplexity: float
    perplexity_float: float
    tokens: PositiveInt
    kinds: Mapping[str, float] = {}
    remarks: tuple[str, ...] = ()
    cache_remark: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """All remarks."""
        return (*self.remarks, *([self.cache_remark] if self.cache_remark else []))

    def __str__(self) -> str:
        return (
            f"KL {self.kl_divergence:.3g} nats from float, top-1 {self.top1_agreement:.1%}, "
            f"perplexity {self.perplexity_float:,.2f} to {self.perplexity:,.2f} over {self.tokens} "
            "tokens of the calibration text"
        )


class ContainerMetadata(_Part):
    """`metadata.json`.

    Attributes:
        container_type: the class that loads it.
        toolchain: name and versions of everything that compiled.
        options: the builder's options, as dotted keys.
        contract: names by which its graphs take and give tensors.
        container_sha256: over model, graphs, target, contract, op packages, and the names, sizes
            and hashes of all files; equal containers have equal ones, whenever and wherever they
            were built.
        speculation: how the dialog's texts compare; None if they were not compared.
        loss: of quantization; None if there was no text to measure it on.
        op_packages: libraries that QNN registers before it loads the binaries, by their names here.
    """

    format_version: Literal[2, 3, 4, 5, 6, 7] = FORMAT_VERSION
    container_type: Literal["GenAIContainer"] = "GenAIContainer"
    model: ModelRecord
    graphs: GraphsRecord
    contract: Name = GENIE_CONTRACT
    target: TargetRecord
    toolchain: Mapping[str, str]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]
    files: Annotated[Mapping[str, FileRecord], Field(min_length=1)]
    container_sha256: Sha256
    speculation: SpeculationRecord | None = None
    loss: LossRecord | None = None
    op_packages: tuple[OpPackage, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> "ContainerMetadata":
        problem = file_name_problem(self.files)
        if problem:
            raise ValueError(problem)
        for one in registrations(self.op_packages):
            if one.file not in self.files or self.files[one.file].kind != "op_package":
                raise ValueError(f"op_packages name {one.file}, which is no op package in it")
        if self.container_sha256 != self._digest():
            raise ValueError("container_sha256 does not fit what it covers")
        return self

    def _digest(self) -> str:
        if self.format_version <= _FILES_ALONE:
            return content_digest(self.files)
        return container_digest(
            self.model, self.graphs, self.target, self.files, self.op_packages, self.contract
        )

    @property
    def size_bytes(self) -> int:
        """Of all files together, `metadata.json` aside."""
        return sum(record.size_bytes for record in self.files.values())

    def to_json(self) -> str:
        """Return text in the order of the fields."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def content_digest(files: Mapping[str, FileRecord]) -> str:
    """Compute the SHA-256 over names, sizes and hashes, in the order of the names."""
    lines = (f"{files[name].sha256} {files[name].size_bytes} {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def container_digest(
    model: ModelRecord,
    graphs: GraphsRecord,
    target: TargetRecord,
    files: Mapping[str, FileRecord],
    op_packages: Sequence[OpPackage] = (),
    contract: str = GENIE_CONTRACT,
) -> str:
    """Compute the SHA-256 over the identity of a container."""
    about = {"model": model, "graphs": graphs, "target": target}
    values: dict[str, object] = {name: part.model_dump(mode="json") for name, part in about.items()}
    if op_packages:
        values["op_packages"] = [package.model_dump(mode="json") for package in op_packages]
    if contract != GENIE_CONTRACT:
        values["contract"] = contract
    text = json.dumps({**values, "files": content_digest(files)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_metadata(folder: Path) -> ContainerMetadata:
    """Read a container's `metadata.json`, without checking its files.

    Raises:
        ContainerError: it is missing, no manifest, or of a later version of the project.
    """
    path = folder / METADATA
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to read a pipe would wait for a writer
            raise ContainerError(str(folder), f"{METADATA} is not a file: not a container")
        if status.st_size > _MAX_BYTES:
            raise ContainerError(str(folder), f"{METADATA} is larger than {_MAX_BYTES} bytes")
        text = path.read_bytes()
    except OSError as error:
        reason = f"{METADATA} cannot be read ({error.strerror}): not a container"
        if not folder.exists():
            reason = "there is no such folder"
        raise ContainerError(str(folder), reason) from error
    return parse_metadata(text, str(folder))


def is_container(folder: Path) -> bool:
    """Return whether a folder holds a container, whole or damaged, and nothing beside it."""
    try:
        names = {METADATA, *read_metadata(folder).files}
    except ContainerError:
        return False
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return all(path.relative_to(folder).as_posix() in names for path in paths)


def parse_metadata(text: bytes, folder: str) -> ContainerMetadata:
    """Parse the text of a `metadata.json`; errors call it `folder`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContainerError(folder, f"{METADATA} is not JSON") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ContainerError(folder, f"{METADATA} has no format_version: not a container")
    if version > FORMAT_VERSION:
        reason = f"has format {version}, this version reads up to {FORMAT_VERSION}; update qnnfarm"
        raise ContainerError(folder, reason)
    try:
        if version <= _DATED:
            values.pop("created_at", None)
        if version == 1:  # all that version 2 has on top has a default
            values["format_version"] = _FILES_ALONE
        text = json.dumps(values).encode()
        return ContainerMetadata.model_validate_json(text, strict=True)
    except ValidationError as error:
        fault = first_fault(error, ContainerMetadata)
        raise ContainerError(folder, f"{METADATA} {fault}") from error


def build_metadata(
    *,
    model: ModelRecord,
    graphs: GraphsRecord,
    target: TargetRecord,
    toolchain: Mapping[str, str],
    options: Mapping[str, Scalar | tuple[Scalar, ...]],
    files: Mapping[str, FileRecord],
    speculation: SpeculationRecord | None = None,
    loss: LossRecord | None = None,
    op_packages: tuple[OpPackage, ...] = (),
    contract: str = GENIE_CONTRACT,
) -> ContainerMetadata:
    """Return a manifest with its content digest; mappings are sorted: equal content, equal text."""
    sorted_model = model.model_copy(
        update={"inputs": _sorted(model.inputs), "quantization": _sorted(model.quantization)}
    )
    return ContainerMetadata(
        model=sorted_model,
        graphs=graphs,
        contract=contract,
        target=target,
        toolchain=_sorted(toolchain),
        options=_sorted(options),
        files=_sorted(files),
        container_sha256=container_digest(
            sorted_model, graphs, target, files, op_packages, contract
        ),
        speculation=speculation,
        loss=loss,
        op_packages=op_packages,
    )


def _sorted(values: Mapping[str, T]) -> dict[str, T]:
    return {key: values[key] for key in sorted(values)}
