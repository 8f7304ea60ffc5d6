"""Sources of a build: an ONNX export with encodings, or a checkpoint."""

import json
import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from buildlib.builder.calibration_text import DEFAULT_TEXT_USED, default_text, folder_text
from buildlib.builder.model_place import ModelPlace, find_model
from buildlib.builder.options import MhaConfig
from buildlib.builder.plan import quantized_bytes
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.architectures import SupportedLLMs, detect_architecture
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import (
    CALIBRATION_TEXT,
    CONFIG_FILE,
    ENCODINGS_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
)
from buildlib.container.chat_template import TOKENIZER_CONFIG, ChatTemplate, template_files
from buildlib.errors import InvalidOptionError, ModelFileError, ModelWarning
from buildlib.files import check_file
from buildlib.graph.files import external_tensors, load_model
from buildlib.quantize.techniques.spreading import describe_spreading

_NO_FILE = Path("config_dict")  # what messages call a configuration that was given as itself


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX export with external data beside it.

    Attributes:
        encodings: of its tensors; calibration adds the missing ones.
        config: text of its `config.json`.
        config_file: the path of that file, for messages.
        calibration_text: for tensors without encodings.
        chat_template: that of the folder with the tokenizer.
        canonical: the entry of the cache that it is, where stages have made it: canonical ONNX with
            encodings for all of it, which a build takes as it is.
    """

    name: str
    model: Path
    encodings: Path | None
    config: str
    config_file: Path
    tokenizer: Path
    calibration_text: str | None
    chat_template: ChatTemplate | None = None
    canonical: CacheEntry | None = None

    @property
    def folder(self) -> Path:
        """Folder of the model and its external data."""
        return self.model.parent

    def with_encodings(self, path: Path) -> "OnnxSource":
        """Return a copy with other encodings."""
        return replace(self, encodings=_require_file(path, self.folder), canonical=None)

    def inputs(self) -> dict[str, Path]:
        """Return every file that decides the build, by role."""
        data = {Path(tensor.path) for tensor in external_tensors(load_model(self.model))}
        files = {path.name: path for path in sorted(data)}
        files |= {self.model.name: self.model, TOKENIZER_FILE: self.tokenizer}
        generation = self.tokenizer.with_name(GENERATION_FILE)
        files |= {GENERATION_FILE: generation} if generation.is_file() else {}
        if self.encodings is not None:
            files[ENCODINGS_FILE] = self.encodings
        return files

    def weights(self) -> int:
        """Return the number of weights, at most as many as its files hold in half a byte each."""
        tensors = (
            value.const_value for value in load_model(self.model).graph.initializers.values()
        )
        files = [path.stat().st_size for path in self.inputs().values() if path.is_file()]
        return min(sum(tensor.size for tensor in tensors if tensor is not None), 2 * sum(files))

    def quantized_bytes(self) -> int:
        """Estimate the bytes of quantized weights."""
        return quantized_bytes(self.model)

    def texts(self) -> dict[str, str]:
        """Return texts that decide the build, by the names of their files."""
        calibration = self.calibration_text
        text = {} if calibration is None else {CALIBRATION_TEXT.as_posix(): calibration}
        return {CONFIG_FILE: self.config, **text, **_template_text(self.chat_template)}

    def text_files(self) -> list[Path]:
        """Return files that the texts are read from where they are not given."""
        usual = (self.config_file, self.folder / CALIBRATION_TEXT)
        paths = [path for path in usual if path.is_file()]
        return [*paths, *template_files(self.tokenizer.parent)]


@dataclass(frozen=True)
class CheckpointSource:
    """A Hugging Face checkpoint, and the text that calibrates its quantization.

    Attributes:
        place: of a model that has another name than its folder, or was read from a file.
    """

    folder: Path
    calibration_text: str
    chat_template: ChatTemplate | None = None
    place: ModelPlace | None = None

    @property
    def name(self) -> str:
        """Name of the model: by default that of its folder."""
        return self.folder.resolve().name if self.place is None else self.place.name

    def inputs(self) -> dict[str, Path]:
        """Return every file of the user's that decides the build, by name."""
        if self.place is not None and self.place.file is not None:
            return {self.place.file.name: self.place.file}
        paths = [self.folder / name for name in (CONFIG_FILE, TOKENIZER_FILE, GENERATION_FILE)]
        paths += sorted(self.folder.glob("*.safetensors*"))
        return {path.name: path for path in paths if path.is_file()}

    def weights(self) -> int:
        """Return the number of weights."""
        return sum(math.prod(ref.shape) for ref in Checkpoint.load(self.folder).tensors.values())

    def quantized_bytes(self) -> int:
        """Estimate the bytes of quantized weights: tables have 16 bits, tied ones 8 more."""
        config = Checkpoint.load(self.folder).config
        table = config.vocab_size * config.hidden_size
        return self.weights() + table * (2 if config.tie_word_embeddings else 1)

    def texts(self) -> dict[str, str]:
        """Return texts that decide the build, by the names of their files."""
        text = {CALIBRATION_TEXT.as_posix(): self.calibration_text}
        return text | _template_text(self.chat_template)

    def text_files(self) -> list[Path]:
        """Return files that the texts are read from where they are not given."""
        path = self.folder / CALIBRATION_TEXT
        return [*([path] if path.is_file() else []), *template_files(self.folder)]


ModelSource = OnnxSource | CheckpointSource


@dataclass(frozen=True)
class SourceFiles:
    """Files of a model that do not have their usual names in one folder.

    Attributes:
        config_text: replaces the file; messages still call it `config`.
    """

    tokenizer: Path | None = None
    config: Path | None = None
    config_text: str | None = None
    encodings: Path | None = None


def architecture_of(source: ModelSource) -> SupportedLLMs | None:
    """Return the family of a model by its configuration; None if unknown."""
    return detect_architecture(_configuration(source))


def positions_of(source: ModelSource) -> float | None:
    """Return the number of positions that a model was trained for; None if not configured."""
    config = _configuration(source)
    positions = config.get("max_position_embeddings")
    if type(positions) is not int:
        return None
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if not isinstance(scaling, dict):
            continue
        factor, kind = scaling.get("factor"), scaling.get("rope_type", scaling.get("type"))
        original = scaling.get("original_max_position_embeddings", positions)
        if not isinstance(factor, int | float) or not isinstance(original, int):
            continue
        if kind in {"linear", "yarn"}:  # some files tell those without it
            return max(positions, original * factor) if kind == "yarn" else positions * factor
    return positions


def layers_of(source: ModelSource) -> int | None:
    """Return the number of layers of a model; None if not configured."""
    layers = _configuration(source).get("num_hidden_layers")
    return layers if type(layers) is int else None


def is_spread(source: ModelSource) -> bool:
    """Return whether a pipeline has rotated or split the hidden states of a model."""
    return isinstance(source, OnnxSource) and bool(describe_spreading(source.model))


def _configuration(source: ModelSource) -> dict[str, object]:
    match source:
        case OnnxSource():
            path, text = source.config_file, source.config
        case CheckpointSource():
            path = source.folder / CONFIG_FILE
            text = _text_of(path, source.folder)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelFileError(path, "it holds no JSON object")
    return config


def check_start_points(config: MhaConfig, source: ModelSource) -> None:
    """Check that the ONNX has the operators that `m2s_additional_start_points` names."""
    names = [point.name for point in config.m2s_additional_start_points]
    if not names:
        return
    operators = set()
    if isinstance(source, OnnxSource):
        operators = {str(node.name) for node in load_model(source.model).graph}
    for name in names:
        if name not in operators:
            key = "mha2sha.m2s_additional_start_points"
            raise InvalidOptionError(key, f"{source.name} has no operator {name!r}", ())


def attached_source(path: Path, parent: ModelSource, encodings: Path | None) -> OnnxSource:
    """Return the source of another export of a model, with the configuration of `parent`."""
    match parent:
        case OnnxSource():
            tokenizer, config, text = parent.tokenizer, parent.config_file, parent.config
            files = SourceFiles(tokenizer, config, text, encodings)
        case CheckpointSource():
            own = parent.folder
            files = SourceFiles(own / TOKENIZER_FILE, own / CONFIG_FILE, None, encodings)
    source = find_source(path, parent.calibration_text, files)
    if not isinstance(source, OnnxSource):
        raise ModelFileError(path, "it holds no ONNX model to attach")
    return source


def find_source(
    model: str | os.PathLike[str],
    calibration_text: str | None,
    files: SourceFiles | None = None,
    *,
    calibrates: bool = True,
    cache_root: Path | None = None,
) -> ModelSource:
    """Find the source in a model folder, in that of an ONNX file, in a GGUF, or at the hub.

    Args:
        model: as `find_model` takes it.
        calibration_text: in place of the text in the folder.
        files: those that have other names or places.
        calibrates: whether a checkpoint, or an ONNX without encodings, that has no text gets the
            default one.
        cache_root: of what is read from a GGUF; by default the user's cache.

    Warns:
        ModelWarning: it got the default text.

    Raises:
        ModelFileError: no folder, or nothing in it that can be built.
        InputFileError: its calibration text is too large.
    """
    places = files or SourceFiles()
    place = find_model(model, cache_root=cache_root)
    path, folder = place.path, place.folder
    if not _is_utf8(folder.resolve()):
        reason = "its path is no UTF-8, which metadata and tokenizers need; rename it"
        raise ModelFileError(Path(ascii(str(path))[1:-1]), reason)
    onnx = path if path.is_file() else _onnx_in(folder)
    if onnx is not None:
        tokenizer = _require_file(places.tokenizer or folder / TOKENIZER_FILE, folder)
        encodings = _encodings_of(onnx, places.encodings)
        template = ChatTemplate.find(tokenizer.parent)
        text = calibration_text or folder_text(folder)
        if text is None and encodings is None and calibrates:
            text = _default_text(template, folder)
        return OnnxSource(
            name=place.name,
            model=onnx,
            encodings=encodings,
            config=_config_text(folder, places),
            config_file=places.config or (_NO_FILE if places.config_text else folder / CONFIG_FILE),
            tokenizer=tokenizer,
            calibration_text=text,
            chat_template=template,
        )
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        _require_file(folder / name, folder)
    if not any(folder.glob("*.safetensors")):
        reason = f"it holds neither an ONNX model such as {MODEL_FILE} nor model.safetensors"
        raise ModelFileError(folder, reason)
    if (folder / ENCODINGS_FILE).exists():
        reason = f"{ENCODINGS_FILE} is of an ONNX model, such as {MODEL_FILE}, which is missing"
        raise ModelFileError(folder, reason)
    template = ChatTemplate.find(folder)
    text = calibration_text or folder_text(folder)
    if text is None and calibrates:
        text = _default_text(template, folder)
    return CheckpointSource(folder, text or "", template, place)


def _default_text(template: ChatTemplate | None, folder: Path) -> str:
    warnings.warn(f"{folder.resolve().name}: {DEFAULT_TEXT_USED}", ModelWarning, stacklevel=2)
    return default_text(template, folder)


def _template_text(template: ChatTemplate | None) -> dict[str, str]:
    return {} if template is None else {TOKENIZER_CONFIG: template.to_json()}


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _onnx_in(folder: Path) -> Path | None:
    if (folder / MODEL_FILE).is_file():
        return folder / MODEL_FILE
    models = sorted(folder.glob("*.onnx"))
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:3])
        reason = f"it holds {len(models)} ONNX models ({names}); name one of them"
        raise ModelFileError(folder, reason)
    return models[0] if models else None


def _encodings_of(model: Path, given: Path | None) -> Path | None:
    """Return the given encodings, or those beside the model under one of the usual names."""
    if given is not None:
        return _require_file(given, model.parent)
    usual = (
        model.with_suffix(".encodings"),
        model.with_name(ENCODINGS_FILE),
        model.with_name(f"{model.stem}_encodings.json"),
    )
    return next((path for path in usual if path.is_file()), None)


def _config_text(folder: Path, places: SourceFiles) -> str:
    if places.config_text is not None:
        return places.config_text
    return _text_of(_require_file(places.config or folder / CONFIG_FILE, folder), folder)


def _text_of(path: Path, folder: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(folder, f"{path.name} cannot be read: {error}") from error


def _require_file(path: Path, folder: Path) -> Path:
    label = path.name if path.parent == folder else str(path)
    try:
        check_file(path)
    except FileNotFoundError:
        raise ModelFileError(folder, f"{label} is missing") from None
    except OSError as error:
        raise ModelFileError(folder, f"{label}: {error.strerror}") from error
    return path
