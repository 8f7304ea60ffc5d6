"""Agreement of dialogs that speculate with plain decoding: greedy, both say the same.

A dialog and the plain dialog of its target answer the same prompts, and their texts are compared.
A result holds for one libGenie, and is kept by its hash.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from buildlib.cache.file_hashes import hash_files
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import GREEDY
from buildlib.container.manifest import TOKENIZER, SpeculationRecord
from buildlib.files import atomic_write_bytes
from buildlib.toolchains.base import emulated_s
from buildlib.toolchains.child_process import Step, run_step
from buildlib.toolchains.ort_qnn.wheel import find_libraries

PROMPTS = ("In the beginning", "The answer is", "1, 2, 3,")
_MOST_TOKENS = 24
_LIMIT_S = 450.0
_WORKER = "plugins.speculation.dialog_worker"


def compared_dialogs(config: GenieConfig) -> tuple[GenieConfig, GenieConfig, int]:
    """Return the plain dialog and the one that speculates, both greedy, and their tokens."""
    count = min(_MOST_TOKENS, config.context_length // 8)
    greedy = config.with_dialog(sampler=GREEDY)
    return greedy.as_basic().with_turns_of(count), greedy.with_turns_of(count), count


def recall(
    about: object, cache_root: Path, compare: Callable[[], SpeculationRecord]
) -> SpeculationRecord:
    """Return a comparison from the cache, or compare and keep it there.

    Args:
        about: JSON value of all that decides the result.
    """
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    path = cache_root / f"genie_{key[:32]}.json"
    try:
        return SpeculationRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        record = compare()
    atomic_write_bytes(path, record.model_dump_json().encode())
    return record


def count_differing(kind: str, plain: Sequence[str], speculated: Sequence[str]) -> int:
    """Count the prompts with different texts; `lade` goes on behind the last token asked for."""
    pairs = zip(plain, speculated, strict=True)
    return sum(not (text == base or (kind == "lade" and text.startswith(base)))
               for base, text in pairs)  # fmt: skip


def check_on_emulator(
    folder: Path,
    config: GenieConfig,
    prompts: Sequence[str] = PROMPTS,
) -> SpeculationRecord:
    """Compare a dialog with the plain dialog of its target, on the HTP emulator.

    Args:
        folder: with all files that the configuration names, for the emulator.
    """
    libraries = find_libraries()
    basic, speculating, count = compared_dialogs(config)
    dialogs = (basic, bound_lookahead(speculating, folder, prompts, count))
    request = {
        "folder": str(folder),
        "dialogs": [dialog.to_json() for dialog in dialogs],
        "prompts": list(prompts),
    }
    timeout_s = sum(dialog_limit_s(folder, dialog, len(prompts)) for dialog in dialogs)
    step = Step(_WORKER, "answer", folder, timeout_s, libraries.search_path)
    answer = run_step(step, json.dumps(request).encode())
    plain, speculated = answer["answers"]
    return SpeculationRecord(
        genie=answer["genie"],
        genie_sha256=hash_files([libraries.genie])[libraries.genie].sha256,
        prompts=len(prompts),
        tokens=count,
        differing=count_differing(config.dialog.type, plain, speculated),
    )


def dialog_limit_s(folder: Path, config: GenieConfig, prompts: int) -> float:
    """Return the seconds after which a dialog of short prompts on the emulator is ended."""
    names = {name for engine in config.dialog.engines for name in engine.model.ctx_bins}
    n_bytes = sum((folder / name).stat().st_size for name in names)
    tokens = config.dialog.max_num_tokens or config.context_length
    return _LIMIT_S + emulated_s(n_bytes, 2 * prompts * tokens)  # with the calls of a draft


def bound_lookahead(
    config: GenieConfig, folder: Path, prompts: Sequence[str], count: int
) -> GenieConfig:
    """Bound a dialog of type `lade`, which obeys the size of its context alone."""
    lade = config.dialog.lade
    if lade is None:
        return config
    from buildlib.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / TOKENIZER)
    ids = (tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts)
    longest = max(map(len, ids))
    size = 1 + longest + count + (lade.tokens_per_step or config.context_length)
    return config.with_dialog(context_size=min(size, config.context_length))
