"""A speculating dialog of the real Genie, on the reference model."""

from pathlib import Path

from buildlib.container.genie_config import GenieConfig
from buildlib.graph.files import link_into
from buildlib.speculative.agreement import check_on_emulator
from buildlib.speculative.config import PlainDialog, SpdBuilderConfig, speculate
from buildlib.targets import parse_target


def test_a_draft_that_is_never_wrong_changes_no_text(
    plain_dialog: tuple[Path, GenieConfig], tiny_bundle: Path
) -> None:
    """What the check of a Genie finds wrong is not the check's own fault."""
    folder, config = plain_dialog
    speaker = PlainDialog(config, parse_target("SM8750:emulator"), tiny_bundle / "tokenizer.json")
    how = SpdBuilderConfig(draft_container=tiny_bundle, draft_len=3)
    result = speculate(speaker, how, (1, 32))
    for name, path in result.files.items():
        link_into(path, (folder / name).parent)
    assert check_on_emulator(folder, result.genie_config, ["In the beginning"]).agrees
