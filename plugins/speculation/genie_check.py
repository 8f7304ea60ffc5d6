"""Check of a Genie: do its dialogs of types `spd` and `lade` give the text of plain decoding?

Genie 1.21 (QNN 2.51) keeps wrong rows in its KV cache where a draft is wrong, and says something
else. No list of versions tells that of another Genie: a random model answers some prompts in both
ways, with a random draft that is nearly always wrong. One wrong text is enough. That takes seconds,
once for a libGenie; the cache keeps the answer.
"""

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from buildlib.builder.build import Build, Sources
from buildlib.builder.build_options import BuildOptions
from buildlib.builder.options import ARnContextLengthConfig
from buildlib.builder.plan import BuildPlan
from buildlib.builder.sources import find_source
from buildlib.builder.speculative_config import (
    LadeBuilderConfig,
    SpdBuilderConfig,
    SpeculativeConfig,
)
from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.checkpoint.checkpoint import expected_tensors
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from buildlib.errors import InvalidOptionError
from buildlib.targets import Target, parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from plugins.speculation.agreement import check_on_emulator, recall
from plugins.speculation.dialog import PlainDialog, speculate

CHECKED = ("spd", "lade")
"""Types of dialogs that Genie 1.21 gets wrong."""
_REVISION = 3
"""Of the models and prompts below; another one checks again."""
_VOCABULARY = 1100
_ARS, _CL = (1, 16), 96
_ATTENTION = 4.0
"""Share of attention in the hidden states, so that a wrong row of the cache changes the text."""
_FIRST_LETTER = 0x100


def check_genie(kind: str, cache_root: Path) -> SpeculationRecord:
    """Compare a type of dialog with plain decoding, on the emulator with the installed Genie.

    Args:
        kind: the type.
        cache_root: where the answer is kept.

    Raises:
        ToolchainMissingError: this machine has no Genie.
        ToolchainError: a model does not compile, or Genie crashed.
    """
    libraries = find_libraries()
    hashes = hash_files((libraries.genie, libraries.htp), cache_root / MEMO_FILE)
    about = (_REVISION, kind, *(digest.sha256 for digest in hashes.values()))
    return recall(about, cache_root, partial(_check, kind, cache_root))


def require_agreement(how: SpeculativeConfig | None, target: Target, cache_root: Path) -> None:
    """Refuse a kind of speculation that changes the text with the installed Genie."""
    if not isinstance(how, SpdBuilderConfig | LadeBuilderConfig):
        return
    if how.for_other_genie and not target.emulator:
        return
    kind = "spd" if isinstance(how, SpdBuilderConfig) else "lade"
    record = check_genie(kind, cache_root)
    if not record.agrees:
        reason = refusal(kind, record)
        if not target.emulator:
            reason += "; for_other_genie builds it for a device with another Genie"
        raise InvalidOptionError("speculative_config", reason, ())


def refusal(kind: str, record: SpeculationRecord) -> str:
    """Return the reason against a type of dialog, with the alternative."""
    return (
        f"dialogs of type {kind} are wrong with Genie {record.genie}: {record}; use SSD or Eaglet"
    )


def _check(kind: str, cache_root: Path) -> SpeculationRecord:
    with tempfile.TemporaryDirectory(prefix="qnnfarm-genie-check-") as scratch:
        folder, dialog = make_dialog(kind, Path(scratch), cache_root)
        count = 5 if kind == "lade" else 3  # its guesses are random, and some do no harm
        texts = [random_text(seed, 12) for seed in range(count)]
        first = check_on_emulator(folder, dialog, texts[:1])
        return check_on_emulator(folder, dialog, texts) if first.agrees else first


def make_dialog(kind: str, folder: Path, cache_root: Path) -> tuple[Path, GenieConfig]:
    """Build a dialog of a random model with a random draft, for the emulator.

    Lookahead feeds the cache three calls of junk, which one token of an answer sees.

    Args:
        kind: its type.
        folder: an existing one, to fill.
        cache_root: where the models are kept, of which both types have the same target.

    Returns:
        The folder with its files, and its configuration.
    """
    target = parse_target("SM8750:emulator")
    model = _build(folder / "target", 0, target, _ARS, cache_root).save(folder / "dialog")
    how: SpeculativeConfig = LadeBuilderConfig(window=3, ngram=5, gcap=1)
    if kind == "spd":
        draft = _build(folder / "draft", 1, target, (1,), cache_root)
        how = SpdBuilderConfig(draft_container=draft.path, draft_len=3)
    plain = PlainDialog(model.genie_config, target, model.files[TOKENIZER_FILE])
    dialog = speculate(plain, how, _ARS)
    for name, path in dialog.files.items():
        (model.path / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, model.path / name)
    return model.path, dialog.genie_config


def random_text(seed: int, length: int) -> str:
    """Return so many random tokens of the models as text."""
    tokens = np.random.default_rng(seed).integers(3, _VOCABULARY, length)
    return "".join(chr(_FIRST_LETTER + int(token)) for token in tokens)


def _build(
    folder: Path, seed: int, target: Target, ars: tuple[int, ...], cache_root: Path
) -> GenAIContainer:
    """Build a random model with a letter for each token."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": _CL, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": _VOCABULARY,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    letters = {chr(_FIRST_LETTER + token): token for token in range(_VOCABULARY)}
    tokenizer = {
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated",
                          "invert": False},
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": chr(_FIRST_LETTER)},
    }  # fmt: skip
    (folder / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
    weights = _weights(CheckpointConfig.model_validate(config), seed)
    save_file(weights, folder / "model.safetensors")
    shapes = ARnContextLengthConfig(auto_regression_number=ars, context_length=(_CL,))
    options = BuildOptions(arn_cl_options=shapes)
    plan = BuildPlan(options, CompileConfig.for_target(target)).checked()
    source = find_source(folder, random_text(seed, 300))
    return Build(Sources(source), plan, cache_root, OrtQnnToolchain()).run()


def _weights(config: CheckpointConfig, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    draw = np.random.default_rng(seed).standard_normal
    weights = {}
    for name, shape in expected_tensors(config).items():
        scale = 1 / np.sqrt(shape[-1]) * (_ATTENTION if "o_proj" in name else 1)
        values = draw(shape) * (1 if "embed" in name else scale)
        weights[name] = (np.ones(shape) if "norm" in name else values).astype(np.float32)
    return weights
