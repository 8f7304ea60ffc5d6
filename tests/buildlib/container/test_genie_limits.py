"""What cannot run is found by its JSON pointer before anything runs."""

import json
from pathlib import Path

import pytest

from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_limits import find_limits
from plugins.diagnosis.genie_files import kind_of
from tests.buildlib.container.genie_configurations import EXTENSIONS, configurations
from tools.genie_table import BEGIN, END, needed_hardware

ON_EMULATOR = {
    "dialog kv-share": ["/dialog/type", "/dialog/engine/1/backend/type"],
    "QnnHtp spill-fill-bufsize": ["/dialog/engine/backend/QnnHtp/spill-fill-bufsize"],
    "QnnHtp direct-io": ["/dialog/engine/backend/QnnHtp/direct-io"],
    "QnnHtp shared-engine": ["/dialog/engine/backend/QnnHtp/shared-engine"],
    "QnnHtp kv-update-method NATIVE_KV": [],
    "QnnHtp enable-graph-switching": ["/dialog/engine/backend/QnnHtp/enable-graph-switching"],
    "QnnHtp skip-lora-validation": ["/dialog/engine/backend/QnnHtp/skip-lora-validation"],
    "longcontext keydiff": ["/dialog/engine/longcontext"],
    "LoRA bin-sections": ["/dialog/engine/model/binary/lora"],
    "QnnGpu": ["/dialog/engine/backend/type"],
    "QnnGenAiTransformer": ["/dialog/engine/backend/type"],
    "dialog basic": [],
    "LoRA v1": [],
    "longcontext sliding-window": [],
}


@pytest.mark.parametrize("name", ON_EMULATOR)
def test_limits_of_the_emulator(name: str) -> None:
    (values,) = (each.values for each in configurations() if each.name == name)
    config = GenieConfig.model_validate(values)
    assert [limit.pointer for limit in find_limits(config, emulator=True)] == ON_EMULATOR[name]


def test_the_table_of_the_documents_has_every_configuration(
    genie_checks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make genie-table` writes it; here it is held against what it is made of, without a run."""
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(genie_checks))
    text = (Path(__file__).parents[3] / "docs" / "genie-configurations.md").read_text("utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    written = {cells[1].strip(): cells[3].strip() for line in table if (cells := line.split("|"))}
    expected = {
        each.name: needed_hardware(each, kind_of(json.dumps(each.values).encode(), each.name))
        for each in (*configurations(), EXTENSIONS)
    }
    assert written == expected


def test_a_phone_lacks_libraries_alone() -> None:
    limited = {
        each.name
        for each in configurations()
        if "dialog" in each.values
        and find_limits(GenieConfig.model_validate(each.values), emulator=False)
    }
    assert limited == {
        "QnnGpu",
        "QnnGenAiTransformer",
        "LoRA QnnGenAiTransformer",
        "dialog kv-share",
    }
