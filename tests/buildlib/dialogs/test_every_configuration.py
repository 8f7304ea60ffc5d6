"""Configurations that need no model of their own, each run by the real Genie on the emulator.

Those of other models run in the tests that make these models; all carry the marker from which
`tools/genie_table.py` writes the table of docs/genie-configurations.md.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.embedding.config import TABLE_FILE
from buildlib.embedding.extraction import EmbeddingExtraction
from buildlib.embedding.table import write_table
from buildlib.graph.files import link_into
from tests.buildlib.container.genie_configurations import (
    DIALOGS,
    EXTENSIONS,
    HTP,
    POSITIONS,
    Changes,
    changed,
)
from tests.buildlib.dialogs.genie_lab import RUNNER, GenieLab, ask, run_genie

pytestmark = pytest.mark.slow

FEATURES = Path(__file__).with_name("genie_features.py")
SCALING = f"{POSITIONS}/rope-scaling"
WINDOW = {
    "version": 1, "type": "sliding-window", "reserved-tokens": 4,
    "sliding-window": {"version": 1, "window-size": 64},
}  # fmt: skip
AS_DOCUMENTED = (
    "dialog basic", "sampler basic", "sampler greedy", "sampler with token-penalty",
    "sampler of Genie's own defaults", "rope-scaling default", "rope-scaling linear",
    "rope-scaling llama3", "positional-encoding none", "QnnHtp data-alignment-size",
    "QnnHtp kv-update-method POINTER_SHIFT", "QnnHtp kv-update-method SHIFT_CONCAT",
    "QnnHtp kv-update-method SMART_MASK", "QnnHtp kv-update-method NATIVE_KV",
)  # fmt: skip
RUNS: dict[str, Changes] = {
    **{name: DIALOGS[name] for name in AS_DOCUMENTED},
    "context with eot, pad, n-embd, several eos": {
        "dialog/context/eos-token": [1, 2],
        "dialog/context/eot-token": 4,
        "dialog/context/pad-token": 1,
        "dialog/context/n-embd": 144,
    },
    "positions of QnnHtp": {
        POSITIONS: ..., f"{HTP}/pos-id-dim": 12, f"{HTP}/rope-theta": 10000.0,
    },
    "rope-scaling longrope": {
        SCALING: {
            "rope-type": "longrope",
            "factor": 1.0, "original-max-position-embeddings": 4096,
            "short-factor": [1.0] * 12, "long-factor": [2.5] * 12,
        }
    },
    "rope-scaling proportional": {
        SCALING: {"rope-type": "proportional", "factor": 1.0, "partial-rotary-factor": 1.0}
    },
    **{
        f"rope-scaling {kind}": {SCALING: {"rope-type": kind, "mrope-section": [4, 4, 4]}}
        for kind in ("qwen2vl-mrope", "qwen3vl-mrope")
    },
    "longcontext sliding-window": {
        "dialog/engine/longcontext": WINDOW, "dialog/context/size": 400,
    },
    "cache-groups": {
        "dialog/engine/cache-groups": [{"version": 1, "prefix": "past_"}],
    },
    "dialog multistream": {
        "dialog/type": "multistream",
        "dialog/multistream": {"version": 1, "n-streams": 2, "p-threshold": 0.0},
        "dialog/context/eos-token": [1, 13],
    },
}  # fmt: skip


CALLED = {"sampler custom": "custom_sampler", "standalone sampler": "applied_sampler"}
VECTORS = {
    "embedding callback float32": ("float32", "callback"),
    "embedding callback native": ("native", "callback"),
    "embedding callback ufixed16": ("ufixed16", "callback"),
    "embedding without type": ("float32",),
}


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.genie_configuration(name)) for name in names]


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("running")
    for path in GenAIContainer.load(tiny_bundle).files.values():
        link_into(path, place)
    return place


@pytest.mark.parametrize("name", named(RUNS))
def test_it_runs(name: str, folder: Path, tiny_bundle: Path) -> None:
    values: dict[str, Any] = json.loads(GenAIContainer.load(tiny_bundle).genie_config.to_json())
    values = changed(values, **{"dialog/max-num-tokens": 4}, **RUNS[name])
    (folder / "query.json").write_text(json.dumps(values))
    assert ask(folder, "-c", "query.json", "-p", "In the beginning God created")


@pytest.mark.genie_configuration("HTP backend extensions")
@pytest.mark.parametrize("broken", [False, True])
def test_the_file_of_extensions_is_read(folder: Path, tiny_bundle: Path, *, broken: bool) -> None:
    """Genie only warns of one that it cannot read."""
    values: dict[str, Any] = json.loads(GenAIContainer.load(tiny_bundle).genie_config.to_json())
    named = {"dialog/max-num-tokens": 2, "dialog/engine/backend/extensions": "extensions.json"}
    (folder / "query.json").write_text(json.dumps(changed(values, **named)))
    content = json.dumps(EXTENSIONS.values)
    (folder / "extensions.json").write_text(content[: -5 if broken else None])
    query = ("-c", "query.json", "-p", "In the beginning God created", "--log", "warn")
    done = run_genie(folder, RUNNER, *query)
    assert done.returncode == 0, done.stderr
    assert ("Failure in loading backend extensions" in done.stderr) == broken


@pytest.mark.parametrize("name", named(CALLED))
def test_a_program_calls_for_it(name: str, folder: Path) -> None:
    assert said(folder, CALLED[name]) == said(folder, "plain")


def said(folder: Path, *part: str) -> str:
    """The text of a part, among what Genie prints."""
    done = run_genie(folder, FEATURES, *part)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"text"'))
    text: str = json.loads(line)["text"]
    assert text
    return text


@pytest.fixture(scope="module")
def embedded(genie_lab: GenieLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model without its embedding, beside its table."""
    place = tmp_path_factory.mktemp("embedded")
    source = genie_lab.export / "model.onnx"
    EmbeddingExtraction().run(source, place / "embedded.onnx")
    config = genie_lab.compile(place / "embedded.onnx", place)
    table = write_table(source, place / TABLE_FILE, "uint16")
    (place / "genie_config.json").write_text(config.with_embedding(table.genie()).to_json())
    return place


@pytest.mark.parametrize("name", named(VECTORS))
def test_vectors_give_the_text_of_the_table(name: str, embedded: Path) -> None:
    assert said(embedded, "vectors", *VECTORS[name]) == said(embedded, "plain")
