"""Dialogs that speculate, on a device whose Genie is not the one that their container knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import Eaglet, Spd
from buildlib.container.writer import ContainerFile
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.runtimes.base import Conversation, ConversationRequest, Converses
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.runtime import GenieModel, GenieRuntime
from harness.workloads.generate import Generate
from harness.workloads.session import Session
from plugins.speculation.genie_check import CHECKED, make_dialog
from tests.repackaged import repackage

TEXT = "".join(chr(0x100 + token) for token in (5, 6, 7, 8, 9))
COMPARED = 2 * 3
"""Queries: both dialogs answer three prompts."""


@pytest.fixture(scope="module")
def checked_dialogs(
    genie_checks: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, GenAIContainer]:
    """Dialogs of the check of a Genie: `spd` and `lade`, wrong with Genie 1.21, and a `right` one.

    The latter drafts with the target itself, so nothing is rejected.
    """
    folder = tmp_path_factory.mktemp("dialogs")
    containers: dict[str, GenAIContainer] = {}
    for kind in CHECKED:
        (folder / kind).mkdir()
        files, config = make_dialog(kind, folder / kind, genie_checks)
        plain = GenAIContainer.load(files)
        draft = {f"draft/{path.name}": path for path in files.glob("draft/*")}
        extras = {name: ContainerFile(path, "binary") for name, path in draft.items()}
        containers[kind] = repackage(plain, config, folder / kind / "wrong", extras)
    engine = plain.genie_config.dialog.target_engine
    alone = plain.genie_config.with_type("spd", draft=engine, spd=Spd(draft_len=3))
    containers["right"] = repackage(plain, alone, folder / "right")
    return containers


@contextmanager
def on_a_phone(device: Device, container: GenAIContainer) -> Iterator[Session]:
    """Run a container as if it were for a phone, which this machine's Genie does not judge."""
    metadata = container.metadata
    target = metadata.target.model_copy(update={"emulator": False})
    with Session(device, GenieModel(container)) as session:
        assert isinstance(session.runtime, GenieRuntime)
        session.runtime._container = replace(
            container, metadata=metadata.model_copy(update={"target": target})
        )
        yield session


def queries(session: Session) -> int:
    assert isinstance(session.runtime, GenieRuntime)
    return session.runtime._queries


@pytest.mark.slow
def test_what_says_the_same_runs_and_is_asked_once(
    virtual_device: Device,
    checked_dialogs: dict[str, GenAIContainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path))
    turns = (TEXT, TEXT)  # which are no queries of their own
    for prompt, asked in ((TEXT, COMPARED + 1), (TEXT, 1), (turns, 0)):
        with on_a_phone(virtual_device, checked_dialogs["right"]) as session:
            found = Generate.of(prompt=prompt, max_tokens=4).run(session).output.speculation
            assert found is not None
            assert found.agrees
            assert queries(session) == asked


@pytest.mark.slow
def test_what_says_something_else_is_refused(
    virtual_device: Device,
    checked_dialogs: dict[str, GenAIContainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(tmp_path))
    for prompt, asked in (((TEXT, TEXT), COMPARED), (TEXT, 0)):
        with on_a_phone(virtual_device, checked_dialogs["spd"]) as session:
            with pytest.raises(WrongUseError, match="type spd are wrong with") as caught:
                Generate.of(prompt=prompt, max_tokens=4).run(session)
            assert "\n" not in str(caught.value)
            assert queries(session) == asked


def test_a_later_turn_with_a_draft_head_is_refused(
    virtual_device: Device, dialog_container: GenAIContainer, tmp_path: Path
) -> None:
    """Genie 1.21 keeps fewer columns of its prompt than it has, as a trace of two queries shows."""
    plain = dialog_container.genie_config
    engine = plain.dialog.target_engine
    block = Eaglet(
        eaglet_version=2, draft_len=3, n_branches=2, max_tokens_target_can_evaluate=16,
        draft_kv_cache=True,
    )  # fmt: skip
    config = plain.with_type("eaglet", draft=engine, eaglet=block)
    (tmp_path / "eaglet.json").write_text(config.to_json())
    settings = DialogSettings(genie_config=str(tmp_path / "eaglet.json"))
    whole, last = Conversation((TEXT, TEXT)), Conversation((TEXT,))
    with Session(virtual_device, GenieModel(dialog_container)) as session:
        for request in (
            ConversationRequest((whole,), 4, settings=settings),
            ConversationRequest((last,), 4, settings=settings, restore=tmp_path),
        ):
            with pytest.raises(WrongUseError, match="loses tokens of later turns"):
                session.require(Converses).converse(request)
