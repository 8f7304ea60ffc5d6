"""Recorded configurations: what transformers computes for them, for machines without it.

    python -m tests.buildlib.configurations.record PYTHON ...

draws configurations of every family as `drawing` does, asks the transformers of each PYTHON, and
writes those that it does not refuse to `tests/fixtures/configurations.npz`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.buildlib.configurations.comparison import Answer, Transformers
from tests.buildlib.configurations.drawing import FAMILIES, configurations

RECORDED = Path(__file__).parents[2] / "fixtures" / "configurations.npz"
_OF_EACH_FAMILY = 2


def record(python: str) -> list[tuple[dict[str, Any], Answer]]:
    """Return configurations that the transformers of an interpreter takes, with its answers."""
    kept: list[tuple[dict[str, Any], Answer]] = []
    with Transformers(python) as transformers, tempfile.TemporaryDirectory() as name:
        for family in FAMILIES:
            taken: list[tuple[dict[str, Any], Answer]] = []

            @seed(family)
            @settings(
                max_examples=60,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(config=configurations(family, (transformers.version,)))
            def draw(config: dict[str, Any]) -> None:
                if len(taken) < _OF_EACH_FAMILY and len(config) > 16:  # noqa: B023
                    answer = transformers.answer(Path(name), config)
                    if answer.raised is None:
                        taken.append((config, answer))  # noqa: B023

            draw()
            kept += taken
    return kept


def load() -> list[tuple[dict[str, Any], Answer]]:
    """Return the recorded configurations and answers."""
    with np.load(RECORDED) as stored:
        described, logits = json.loads(str(stored["described"])), stored["logits"]
    return [
        (config, Answer(None, shapes, rows))
        for (config, shapes), rows in zip(described, logits, strict=True)
    ]


def main() -> None:
    """Write the file."""
    kept = [pair for python in sys.argv[1:] for pair in record(python)]
    described = json.dumps([(config, answer.shapes) for config, answer in kept])
    logits = np.stack([answer.logits for _, answer in kept if answer.logits is not None])
    np.savez_compressed(RECORDED, described=np.array(described), logits=logits)


if __name__ == "__main__":
    main()
