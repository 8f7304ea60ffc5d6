"""A `config.json` means to us what it means to transformers, family by family.

Answers of transformers 4.57 and 5.23 to drawn configurations are kept as a file. Where torch and
transformers are installed, or `QNNFARM_REFERENCE` names a Python that has them, it is asked itself:
`make config-campaign REFERENCE=PYTHON` draws more than a thousand.
"""

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from buildlib.checkpoint.family_keys import read_tables
from tests.buildlib.configurations import record
from tests.buildlib.configurations.comparison import Transformers, compare
from tests.buildlib.configurations.drawing import FAMILIES, configurations

REFERENCE = os.environ.get("QNNFARM_REFERENCE") or (
    sys.executable if importlib.util.find_spec("transformers") else ""
)
CAMPAIGN = int(os.environ.get("QNNFARM_CONFIGURATIONS", "70"))
needs_transformers = pytest.mark.skipif(
    not REFERENCE, reason="transformers is not installed: pip install 'qnnfarm[reference]'"
)
_KINDS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def transformers() -> Iterator[Transformers]:
    with Transformers(REFERENCE) as child:
        yield child
    sys.stdout.write(f"\ntransformers {child.version}: {dict(_KINDS)}\n")


def draw(transformers: Transformers, family: str, count: int) -> None:
    """Compare drawn configurations of a family; a wrong one fails, as small as it can be made."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(config=configurations(family, (transformers.version, None)))
    def agree(config: dict[str, Any]) -> None:
        with TemporaryDirectory() as name:
            folder = Path(name)
            outcome = compare(folder, config, transformers.answer(folder, config))
        _KINDS[outcome.kind] += 1
        assert outcome.kind != "wrong", (outcome, config)

    agree()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.variant) for part in range(1, 4))]
)
def test_recorded_configurations_give_the_logits_of_transformers(part: int, tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    for index, (config, answer) in enumerate(record.load()[part::4]):
        folder = tmp_path / str(index)
        folder.mkdir()
        outcome = compare(folder, config, answer)
        assert outcome.kind != "wrong", (outcome, config)
        kinds[outcome.kind] += 1
    assert kinds["right"] >= 0.7 * kinds.total() > 0, kinds


@needs_transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configurations_give_the_logits_of_transformers(
    transformers: Transformers, family: str
) -> None:
    draw(transformers, family, 2)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_campaign_of_configurations(transformers: Transformers, family: str) -> None:
    draw(transformers, family, CAMPAIGN)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'qnnfarm[reference]'",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_defaults_are_those_of_the_installed_classes(family: str) -> None:
    import transformers

    from tools.family_defaults import class_keys

    table = read_tables()[int(transformers.__version__.partition(".")[0])][family]
    declared = class_keys(transformers.AutoConfig.for_model(family))
    known = {**table["ignored"], **table["keys"]}
    for key, default in declared.items():
        if key != "eos_token_id" or default is not None:  # GLM's class fills it in
            assert known[key] == default
