"""Speculating dialogs of the real Genie: greedy, they say what a plain dialog says."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildlib.container.genie_config import GenieConfig
from buildlib.graph.files import link_into
from buildlib.speculative.config import LadeBuilderConfig, PlainDialog, SpdBuilderConfig, speculate
from buildlib.targets import parse_target

if TYPE_CHECKING:
    from tests.buildlib.dialogs.conftest import GenieLab


def speaker(config: GenieConfig, bundle: Path) -> PlainDialog:
    return PlainDialog(config, parse_target("SM8750:emulator"), bundle / "tokenizer.json")


@pytest.mark.genie_configuration("dialog spd")
def test_a_drafted_dialog_says_the_same(
    genie_lab: "GenieLab",
    plain_dialog: tuple[Path, GenieConfig],
    plain_answer: str,
    tiny_bundle: Path,
) -> None:
    folder, config = plain_dialog
    how = SpdBuilderConfig(draft_container=tiny_bundle, draft_len=3)
    result = speculate(speaker(config, tiny_bundle), how, (1, 32))
    for name, path in result.files.items():
        link_into(path, (folder / name).parent)
    assert genie_lab.ask(folder, result.genie_config) == plain_answer


@pytest.mark.genie_configuration("dialog lade")
def test_lookahead_says_the_same(
    genie_lab: "GenieLab",
    plain_dialog: tuple[Path, GenieConfig],
    plain_answer: str,
    tiny_bundle: Path,
) -> None:
    """It ignores max-num-tokens and stop-sequence, so that only its beginning is waited for."""
    folder, config = plain_dialog
    how = LadeBuilderConfig(window=4, ngram=5, gcap=4)
    looking = speculate(speaker(config, tiny_bundle), how, (1, 32)).genie_config
    assert genie_lab.beginning(folder, looking, len(plain_answer)) == plain_answer
