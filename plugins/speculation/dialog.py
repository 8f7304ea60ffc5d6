"""Dialogs that generate several tokens a step: Genie's blocks for a `speculative_config`.

`plugins.speculation.genie_check` tells whether a Genie gets lookahead and drafting right.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    LadeBuilderConfig,
    SpdBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.config_model import GenieBlock
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import Eaglet, Lade, Spd, Ssd
from buildlib.container.genie_engine import Engine
from buildlib.container.manifest import TOKENIZER
from buildlib.errors import InvalidOptionError
from buildlib.targets import Target
from buildlib.validation import first_fault

_OPTION = "speculative_config"
DRAFT_FOLDER = "draft"
PREFIX_FOLDER = "forecast-prefix"
_Block = TypeVar("_Block", bound=GenieBlock)
_TOKEN_MAP = f"{DRAFT_FOLDER}/draft_token_map.json"


@dataclass(frozen=True)
class Speculation:
    """A configuration with speculation, and the files that it adds.

    Attributes:
        files: by their names in the container.
    """

    genie_config: GenieConfig
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainDialog:
    """The dialog of a model before it speculates.

    Attributes:
        config: of its plain dialog.
        target: that its binaries are for.
        tokenizer: its file.
    """

    config: GenieConfig
    target: Target
    tokenizer: Path


def check_speculation(how: SpeculativeConfig, ars: Sequence[int], *, on_host: bool = False) -> None:
    """Check a configuration as far as possible before anything is built.

    Args:
        ars: of the graphs; the largest bounds how many tokens can be verified at once.
        on_host: whether tokens are looked up on the host.
    """
    ar = max(ars)
    match how:
        case LadeBuilderConfig():
            tokens = _block(Lade, how).tokens_per_step or 0
            _require(tokens <= ar, "window", _too_long(tokens, ar))
        case SpdBuilderConfig():
            # A longer draft than the target can verify hangs Genie.
            _require(how.draft_len < ar, "draft_len", _too_long(how.draft_len + 1, ar))
            reason = "Genie finds no table of a draft's own: build both without --embedding-lut"
            _require(not on_host, "draft_container", reason)
            reason = f"{how.draft_container} is not a folder: a draft is built, or trained, before"
            _require(how.draft_container.is_dir(), "draft_container", reason)
        case SsdBuilderConfig():
            _ssd(how)
            _require(how.tokens_per_step <= ar, "branches", _too_long(how.tokens_per_step, ar))
            _check_file(how.ssd_tensor_file, "ssd_tensor_file")
        case EagletBuilderConfig():
            tokens = how.max_tokens_target_can_evaluate or ar
            _require(tokens <= ar, "max_tokens_target_can_evaluate", _too_long(tokens, ar))
            _check_file(how.draft_model_path, "draft_model_path")
            if how.draft_token_map is not None:
                _check_file(how.draft_token_map, "draft_token_map")


def speculate(
    plain: PlainDialog,
    how: SpeculativeConfig,
    ars: Sequence[int],
    draft_bins: Sequence[str] = (),
    draft_vocab: int | None = None,
) -> Speculation:
    """Turn a plain dialog into one that speculates.

    Args:
        plain: the model, with one graph for each AR of `ars`.
        draft_bins: names in the container of an Eaglet draft's binaries.
        draft_vocab: tokens that it knows; None for those of the model.

    Raises:
        InvalidOptionError: as `check_speculation`, or the draft does not fit the model.
        ContainerError: the draft is no sound container.
    """
    check_speculation(how, ars)
    match how:
        case LadeBuilderConfig():
            return Speculation(plain.config.with_type("lade", lade=_block(Lade, how)))
        case SpdBuilderConfig():
            spd = _block(Spd, how)
            return _drafted(plain, how.draft_container, "spd", spd=spd)
        case SsdBuilderConfig():
            return Speculation(plain.config.with_type("ssd-q1", ssd=_ssd(how)))
        case EagletBuilderConfig():
            return _eaglet(plain.config, how, max(ars), draft_bins, draft_vocab)


def _ssd(how: SsdBuilderConfig) -> Ssd:
    return _block(Ssd, how, forecast_prefix_name=PREFIX_FOLDER)


def _eaglet(
    config: GenieConfig,
    how: EagletBuilderConfig,
    ar: int,
    draft_bins: Sequence[str],
    draft_vocab: int | None,
) -> Speculation:
    limit = how.max_tokens_target_can_evaluate or ar
    block = _block(Eaglet, how, max_tokens_target_can_evaluate=limit)
    draft = _with_binaries(config.dialog.target_engine, tuple(draft_bins))
    context = config.dialog.context
    n_known = draft_vocab or context.n_vocab
    path, files = how.draft_token_map, {}
    reason = f"the draft knows {n_known} tokens of {context.n_vocab}; name a file of their ids"
    _require(path is not None or n_known == context.n_vocab, "draft_token_map", reason)
    if path is not None:
        _check_token_map(path, n_known, context.n_vocab)
        files[_TOKEN_MAP] = path
        model = draft.model.model_copy(update={"draft_token_map": _TOKEN_MAP})
        draft = draft.model_copy(update={"model": model})
        context = context.model_copy(update={"draft_n_vocab": n_known})
    eaglet_config = config.with_type("eaglet", draft=draft, eaglet=block, context=context)
    return Speculation(eaglet_config, files)


def _check_token_map(path: Path, known: int, vocabulary: int) -> None:
    """Check that a file lists the id in the model's vocabulary of each token of the draft's."""
    try:
        ids = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        ids = None
    sound = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)
    reason = f"{path} is no JSON list of ids below {vocabulary}"
    _require(sound, "draft_token_map", reason)
    reason = f"{path} lists {len(ids or ())} ids; the draft knows {known} tokens"
    _require(len(ids or ()) == known, "draft_token_map", reason)


def _check_file(path: Path, key: str) -> None:
    _require(path.is_file(), key, f"there is no file {path}")


def _drafted(plain: PlainDialog, folder: Path, kind: str, **block: GenieBlock) -> Speculation:
    """Add a second engine, with its binaries in a folder of their own."""
    config = plain.config
    draft = GenAIContainer.load(folder)
    ours, theirs = config.dialog.context, draft.genie_config.dialog.context
    for key, mine, its in (
        ("target", str(plain.target), draft.metadata.target.name),
        ("context length", ours.size, theirs.size),
        ("vocabulary", ours.n_vocab, theirs.n_vocab),
        ("bos token", ours.bos_token, theirs.bos_token),
        ("eos token", ours.eos_token, theirs.eos_token),
    ):
        reason = f"{folder} has another {key} ({its}, the model {mine})"
        _require(mine == its, "draft_container", reason)
    same = _tokens(plain.tokenizer) == _tokens(draft.files[TOKENIZER])
    _require(same, "draft_container", f"{folder} has a tokenizer with other tokens than the model")
    reason = f"{folder} looks tokens up in a table of its own, and a dialog has one table"
    _require(draft.genie_config.dialog.embedding is None, "draft_container", reason)
    engine = draft.genie_config.dialog.target_engine
    files = {f"{DRAFT_FOLDER}/{name}": draft.files[name] for name in draft.genie_config.ctx_bins}
    draft_engine = _with_binaries(engine, tuple(files))
    return Speculation(config.with_type(kind, draft=draft_engine, **block), files)


def _tokens(tokenizer: Path) -> dict[str, int]:
    from buildlib.checkpoint.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer).get_vocab()


def _with_binaries(engine: Engine, names: tuple[str, ...]) -> Engine:
    model = engine.model.with_lora(None).with_ctx_bins(names)
    return engine.model_copy(update={"model": model})


def _block(kind: type[_Block], how: SpeculativeConfig, **values: object) -> _Block:
    """Make a block of Genie's of the fields of the same names; errors name the option."""
    names = kind.model_fields.keys() & type(how).model_fields.keys()
    try:
        return kind.model_validate({name: getattr(how, name) for name in names} | values)
    except ValidationError as error:
        fault = first_fault(error, kind)
        key = f"{_OPTION}.{fault.key}" if fault.key else _OPTION
        raise InvalidOptionError(key, fault.reason, ()) from error


def _too_long(tokens: int, ar: int) -> str:
    return f"it takes calls of {tokens} tokens; the largest AR is {ar}"


def _require(holds: bool, key: str, reason: str) -> None:  # noqa: FBT001  (the condition itself)
    if not holds:
        raise InvalidOptionError(f"{_OPTION}.{key}" if key else _OPTION, reason, ())
