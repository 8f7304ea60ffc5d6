"""The check of a Genie, on the one that is installed."""

from pathlib import Path

import pytest

from buildlib.builder.speculative_config import LadeBuilderConfig, SpdBuilderConfig
from buildlib.container.genie_decoding import Spd
from buildlib.errors import InvalidOptionError
from buildlib.genai import GenAIBuilderFactory
from plugins.speculation.agreement import check_on_emulator, count_differing
from plugins.speculation.genie_check import CHECKED, check_genie, make_dialog, random_text
from suites.models import tiny_llama


def test_this_genie_gets_them_wrong(genie_checks: Path) -> None:
    """Once a wheel brings a Genie that passes, the refusals end with it, and so may this test."""
    for kind in CHECKED:
        found = check_genie(kind, genie_checks)
        assert found.differing > 0, f"{kind} is right with Genie {found.genie}"
        assert found.tokens == 12
        assert found.prompts in {1, 5 if kind == "lade" else 3}  # all, unless the first is wrong


@pytest.mark.variant
def test_a_draft_that_is_never_wrong_changes_no_text(genie_checks: Path, tmp_path: Path) -> None:
    """What the check finds wrong is not its own fault."""
    folder, config = make_dialog("spd", tmp_path, genie_checks)
    engine = config.dialog.target_engine
    itself = config.as_basic().with_type("spd", draft=engine, spd=Spd(draft_len=3))
    assert check_on_emulator(folder, itself, [random_text(0, 12)]).agrees


def test_they_are_refused_before_a_build(genie_checks: Path, tiny_bundle: Path) -> None:
    lookahead = LadeBuilderConfig(window=4, ngram=3, gcap=4)
    builder = GenAIBuilderFactory.create(tiny_llama.folder(), cache_root=genie_checks)
    builder.set_targets(["SM8750:emulator"]).set_options(
        {"arn_cl_options.auto_regression_number": [1, 32], "arn_cl_options.context_length": [192]}
    )
    for kind, how in (
        ("lade", lookahead),
        ("spd", SpdBuilderConfig(draft_container=tiny_bundle)),
        ("lade", lookahead.model_copy(update={"for_other_genie": True})),
    ):
        builder.speculative_config = how
        with pytest.raises(InvalidOptionError, match=rf"type {kind} are wrong .*use SSD or Eaglet"):
            builder.plan()
    builder.set_targets(["SM8750"]).plan()  # for a phone with another Genie
    builder.speculative_config = lookahead
    with pytest.raises(InvalidOptionError, match="for_other_genie builds it"):
        builder.plan()


def test_a_draft_has_no_table_on_the_host(tmp_path: Path, tiny_bundle: Path) -> None:
    builder = GenAIBuilderFactory.create(tiny_llama.folder(), cache_root=tmp_path)
    builder.set_targets(["SM8750:emulator"]).prepare_embedding_lut = True
    builder.speculative_config = SpdBuilderConfig(draft_container=tiny_bundle)
    with pytest.raises(InvalidOptionError, match="build both without --embedding-lut"):
        builder.plan()


def test_texts_are_compared_whole() -> None:
    plain = ["ab", "cd"]
    assert count_differing("ssd-q1", plain, ["ab", "cd"]) == 0
    assert count_differing("ssd-q1", plain, ["a", "cde"]) == 2
    assert count_differing("lade", plain, ["a", "cde"]) == 1
