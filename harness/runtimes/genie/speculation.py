"""Dialogs that speculate: a comparison of their text with plain decoding's, by the same Genie."""

from collections.abc import Callable
from contextlib import suppress

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from buildlib.errors import ToolchainMissingError
from buildlib.paths import default_cache_root
from buildlib.speculative.agreement import (
    PROMPTS,
    SPECULATIVE,
    compared_dialogs,
    count_differing,
    recall,
)
from harness.errors import WrongUseError

Ask = Callable[[GenieConfig, str, int], str]
"""Answer of a new dialog on the device to a prompt, in so many tokens."""


def refuse_wrong_dialogs(config: GenieConfig, container: GenAIContainer) -> None:
    """Refuse a type of dialog that the emulator's Genie gets wrong, before a device is asked."""
    kind = config.dialog.type
    if kind not in ("spd", "lade") or not container.metadata.target.emulator:
        return
    from buildlib.builder.genie_check import check_genie, refusal

    with suppress(ToolchainMissingError):  # the emulator runs elsewhere
        record = check_genie(kind, default_cache_root())
        if not record.agrees:
            raise WrongUseError(f"{container.path} cannot run: {refusal(kind, record)}")


def compare_dialog(
    config: GenieConfig, container: GenAIContainer, genie: tuple[str, str], ask: Ask
) -> SpeculationRecord | None:
    """Say how a dialog's texts compare with plain decoding's; None if it does not speculate.

    The container's manifest knows it for the Genie that built it, the cache for those that ran it;
    another Genie is asked on its device.
    """
    kind = config.dialog.type
    if kind not in SPECULATIVE:
        return None
    refuse_wrong_dialogs(config, container)
    name, sha256 = genie
    basic, speculating, count = compared_dialogs(config)

    def compare() -> SpeculationRecord:
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
        record = recall(about, default_cache_root(), compare)
    if kind in ("spd", "lade") and not record.agrees:
        from buildlib.builder.genie_check import refusal

        raise WrongUseError(f"{container.path} cannot run: {refusal(kind, record)}")
    return record


def describe(found: SpeculationRecord | None) -> str:
    """Say how texts compare, in one line."""
    if found is None:
        return "not compared with plain decoding: the first run on a device does"
    return f"{found} (Genie {found.genie}, {found.tokens} tokens each)"
