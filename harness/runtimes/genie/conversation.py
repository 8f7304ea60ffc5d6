"""Conversations as scripts of `genie-app`, and their state as a folder on this host."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.files import atomic_write_bytes
from harness.devices.base import PullItem
from harness.errors import HostFileError, RuntimeOutputError, WrongUseError
from harness.runtimes.base import Conversation, ConversationRequest, Turn
from harness.runtimes.deployed import RunFolder

_STATE_FILE = "qnnfarm-state.json"
_RESTORED = "restored"
_ENGINE = "primary"
"""Genie's name of the engine that answers, in dialogs of every type."""
_MOST_FILES = 1000
_LARGEST_STATE = 4 << 30


@dataclass(frozen=True, slots=True)
class ConversationScript:
    """Script of `genie-app` for conversations: prompts travel in files, unchanged."""

    request: ConversationRequest
    config: GenieConfig

    name: ClassVar[str] = "script.txt"
    profile: ClassVar[str] = "conversation-profile.json"
    saved: ClassVar[str] = "saved"

    def inputs(self) -> dict[str, str | bytes]:
        """Return files that the script reads, and itself."""
        files: dict[str, str | bytes] = {self.name: self._text()}
        for number, conversation in enumerate(self.request.conversations):
            for index, turn in enumerate(conversation.turns):
                text = turn if isinstance(turn, str) else " ".join(map(str, turn))
                files[f"turn_{number}_{index}.txt"] = text
        return files

    def answers(self) -> tuple[tuple[tuple[str, Turn], ...], ...]:
        """Return files that the script writes, each with its turn, by conversation."""
        return tuple(
            tuple(
                (f"answer_{number}_{index}.txt", turn)
                for index, turn in enumerate(conversation.turns)
            )
            for number, conversation in enumerate(self.request.conversations)
        )

    def _text(self) -> str:
        lines = [
            "profile create profile",
            "dialog config create config query_config.json",
            "dialog config bind profile config profile",
            "dialog create dialog config",
        ]
        if self.request.restore is not None:
            lines.append(f"dialog restore dialog {_RESTORED}")
        for number, conversation in enumerate(self.request.conversations):
            lines += ["dialog reset dialog"] if number else []
            lines += self._lora(conversation)
            lines += [
                f"dialog {self._verb(turn, first=not index)} dialog "
                f"turn_{number}_{index}.txt answer_{number}_{index}.txt"
                for index, turn in enumerate(conversation.turns)
            ]
        if self.request.save is not None:
            lines.append(f"dialog save dialog {self.saved}")
        lines += [
            f"profile save profile {self.profile}",
            "dialog free dialog",
            "dialog config free config",
            "profile free profile",
        ]
        return "\n".join([*lines, ""])

    def _lora(self, conversation: Conversation) -> list[str]:
        alpha = alpha_tensor(self.config)
        lines = []
        for name, strength in (conversation.lora or {}).items():
            lines += [
                f"dialog applyLora dialog {_ENGINE} {shlex.quote(name)}",
                f"dialog setLoraStrength dialog {_ENGINE} {alpha} {strength!r}",
            ]
        return lines

    def _verb(self, turn: Turn, *, first: bool) -> str:
        if not isinstance(turn, str):
            return "tokenQuery"
        return "rewindQuery" if self.request.rewind and not first else "query"


def alpha_tensor(config: GenieConfig) -> str:
    """Return the name of the tensor that takes an adapter's strength."""
    lora = config.dialog.target_engine.model.lora
    return (lora.alpha_tensor_name if lora else None) or "alpha"


def write_state(folder: RunFolder, name: str, destination: Path, container: GenAIContainer) -> None:
    """Copy a saved dialog from the device into a new folder of this host."""
    device, path = folder.device, f"{folder.deployment.run_dir}/{name}"
    listing = device.shell(["ls", path], check=False)
    names = listing.stdout.split("\n")[:-1]
    if listing.exit_status != 0 or not names or len(names) > _MOST_FILES:
        raise RuntimeOutputError(device.serial, f"the runner saved no state in {name}")
    if any("/" in file or file in {".", ".."} or not file.isprintable() for file in names):
        reason = f"the runner saved files of impossible names in {name}"
        raise RuntimeOutputError(device.serial, reason)
    check_save(destination)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        device.pull_many([PullItem(f"{path}/{file}", destination / file) for file in names])
        record = {"format": 1, "container_sha256": container.metadata.container_sha256}
        # Last: without it there is no state.
        atomic_write_bytes(destination / _STATE_FILE, json.dumps(record).encode())
    except OSError as error:
        raise HostFileError(str(destination), error.strerror or str(error)) from error


def check_save(destination: Path) -> None:
    """Refuse a folder that has files already."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise HostFileError(str(destination), "it exists already: name a new folder to save into")


def read_state(folder: Path, container: GenAIContainer) -> Mapping[str, bytes]:
    """Read a state that `write_state` wrote: contents by their names in the run folder."""
    try:
        record = json.loads((folder / _STATE_FILE).read_bytes())
        owner = record["container_sha256"] if record["format"] == 1 else None
        files = {f.name: f for f in folder.iterdir() if f.is_file() and f.name != _STATE_FILE}
        if sum(file.stat().st_size for file in files.values()) > _LARGEST_STATE:
            raise WrongUseError(f"{folder} is too large for a saved dialog")
        contents = {f"{_RESTORED}/{name}": file.read_bytes() for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WrongUseError(f"{folder} is no saved dialog: `--save` makes one") from error
    if owner != container.metadata.container_sha256:
        raise WrongUseError(f"{folder} was saved with another container than {container.path}")
    return contents
