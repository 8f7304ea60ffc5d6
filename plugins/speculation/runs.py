"""Dialogs that speculate: a comparison of their text with plain decoding's, by the same Genie."""

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from buildlib.errors import ToolchainMissingError
from buildlib.paths import default_cache_root
from harness.errors import WrongUseError
from harness.runtimes.genie.runtime import Ask
from plugins.speculation.agreement import (
    PROMPTS,
    compared_dialogs,
    count_differing,
    recall,
)
from plugins.speculation.genie_check import CHECKED, check_genie, refusal


def find_fault(kind: str) -> str:
    """See `DialogCheck.find_fault`."""
    if kind not in CHECKED:
        return ""
    try:
        record = check_genie(kind, default_cache_root())
    except ToolchainMissingError:  # the emulator runs elsewhere
        return ""
    return "" if record.agrees else refusal(kind, record)


def compare(
    config: GenieConfig, container: GenAIContainer, genie: tuple[str, str], ask: Ask
) -> SpeculationRecord:
    """Say how a dialog's texts compare with plain decoding's.

    The container's manifest knows it for the Genie that built it, the cache for those that ran it;
    another Genie is asked on its device.
    """
    kind = config.dialog.type
    name, sha256 = genie
    basic, speculating, count = compared_dialogs(config)

    def ask_both() -> SpeculationRecord:
        plain, speculated = (
            [ask(dialog, prompt, count) for prompt in PROMPTS] for dialog in (basic, speculating)
        )
        return SpeculationRecord(
            genie=name,
            genie_sha256=sha256,
            prompts=len(PROMPTS),
            tokens=count,
            differing=count_differing(kind, plain, speculated),
        )

    record = container.metadata.speculation
    own = container.genie_config.dialog.type
    if record is None or (record.genie_sha256, own) != (sha256, kind):
        about = (sha256, container.metadata.container_sha256, speculating.to_json())
        record = recall(about, default_cache_root(), ask_both)
    if kind in CHECKED and not record.agrees:
        raise WrongUseError(f"{container.path} cannot run: {refusal(kind, record)}")
    return record
