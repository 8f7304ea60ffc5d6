"""Genie turns queries and keys by the factors of frequencies that it is told."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.container.genie_config import GenieConfig

if TYPE_CHECKING:
    from tests.buildlib.dialogs.conftest import GenieLab


def test_factors_of_each_frequency_are_the_scaling_that_they_stand_for(
    genie_lab: "GenieLab", plain_dialog: tuple[Path, GenieConfig]
) -> None:
    folder, config = plain_dialog

    def with_scaling(scaling: dict[str, Any]) -> str:
        values = json.loads(config.to_json())
        values["dialog"]["engine"]["model"]["positional-encoding"]["rope-scaling"] = scaling
        return genie_lab.ask(folder, GenieConfig.model_validate(values))

    factors = [3.0] * 12
    told = {"short-factor": factors, "long-factor": factors, "factor": 1.0}
    longrope = {"rope-type": "longrope", "original-max-position-embeddings": 192, **told}
    linear = with_scaling({"rope-type": "linear", "factor": 3.0})
    assert with_scaling(longrope) == linear
    assert linear != genie_lab.ask(folder, config)
