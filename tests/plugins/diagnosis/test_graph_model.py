"""The parts of the graph runtime that need no library: cache, positions, names."""

import array
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.graph.rope import rope_tables
from buildlib.toolchains.qnn.contracts import find_contract
from plugins.diagnosis.on_device import graph_model, graph_run
from suites.models import tiny_llama

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api

CL, HEADS, DIM = 24, 2, 3
SIDES = ("key", "value")
SHAPES = {
    (kind, length): (1, HEADS, DIM, length) if kind == "key" else (1, HEADS, length, DIM)
    for kind in SIDES
    for length in (4, 20)
}


class Port(graph_model.GraphPort):
    """A port without a tensor of a graph."""

    def __init__(self, name: str, shape: tuple[int, ...], code: str = "B") -> None:
        self.name, self.shape, self.code = name, shape, code
        self.count = math.prod(shape)
        self.is_half = False
        self.scale, self.offset = (0.0, 0) if code == "f" else (0.5, -128)


class Chain:
    """Graphs of one layer at one AR: ports, and the layout of its cache."""

    def __init__(self, ar: int, cl: int = CL) -> None:
        self.ar, self.cl, self.slots = ar, cl, cl - ar
        pairs = [
            ("key", (HEADS, 1, DIM, self.slots), (HEADS, 1, DIM, ar), HEADS * DIM, 1),
            ("value", (HEADS, 1, self.slots, DIM), (HEADS, 1, ar, DIM), HEADS, DIM),
        ]
        self.kv = [
            graph_model.Cached(Port(f"past_{kind}", past), Port(f"new_{kind}", new), rows, unit)
            for kind, past, new, rows, unit in pairs
        ]


class Memory:
    """Buffers as large as any chain needs."""

    def __init__(self) -> None:
        self._buffers = {
            name: array.array("B", bytes(HEADS * DIM * CL))
            for name in ("past_key", "past_value", "new_key", "new_value")
        }

    def of(self, port: graph_model.GraphPort) -> memoryview:
        return memoryview(self._buffers[port.name])

    def array(self, port: graph_model.GraphPort) -> npt.NDArray[np.uint8]:
        values = np.frombuffer(self._buffers[port.name], np.uint8)
        return values[: math.prod(port.shape)].reshape(port.shape)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(1, CL), (4, CL), (8, CL), (1, 12), (4, 12)]), st.integers(1, 8)
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_the_cache_survives_changes_of_graphs(
    calls: list[tuple[tuple[int, int], int]], random: Random
) -> None:
    """Whatever graphs follow each other, each sees all tokens so far, and zeros after them."""
    chains = {size: Chain(*size) for size in [(1, CL), (4, CL), (8, CL), (1, 12), (4, 12)]}
    memory = Memory()
    cache = graph_model.KvBuffers(memory, CL - 1)  # type: ignore[arg-type]
    cache.clear(chains[1, CL])  # type: ignore[arg-type]
    keys: list[npt.NDArray[np.uint8]] = []
    values: list[npt.NDArray[np.uint8]] = []
    for size, wanted in calls:
        chain = chains[size]
        count = min(wanted, chain.ar, CL - len(keys))
        if count < 1 or chain.slots < len(keys):
            continue
        cache.lay_out(chain)  # type: ignore[arg-type]
        (key, new_key, *_), (value, new_value, *_) = chain.kv
        seen_keys, seen_values = memory.array(key), memory.array(value)
        for place in range(chain.slots):
            is_past = place < len(keys)
            assert (seen_keys[:, 0, :, place] == (keys[place] if is_past else 128)).all()
            assert (seen_values[:, 0, place] == (values[place] if is_past else 128)).all()
        for port in (new_key, new_value):
            shape = memory.array(port).shape
            data = bytes(random.randrange(256) for _ in range(math.prod(shape)))
            memory.of(port)[: len(data)] = data
        keys += [memory.array(new_key)[:, 0, :, n].copy() for n in range(count)]
        values += [memory.array(new_value)[:, 0, n].copy() for n in range(count)]
        cache.append(chain, count)  # type: ignore[arg-type]
        assert cache.n_past == len(keys)


SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_positions_are_turned_as_the_graph_was_calibrated_for(
    scaling: dict[str, Any] | None,
) -> None:
    """Against the tables of the build, which transformers judges."""
    base = load_config(tiny_llama.folder() / "config.json").model_dump()
    config = DecoderConfig.model_validate({**base, "rope_scaling": scaling})
    encoding: dict[str, Any] = {"rope-dim": config.rotary_dim // 2, "rope-theta": config.rope_theta}
    if scaling is not None:
        encoding["rope-scaling"] = {k.replace("_", "-"): v for k, v in scaling.items()}
    port = Port("position_ids_cos", (1, 1, 1, config.rotary_dim // 2), "f")
    for function, table in zip((math.cos, math.sin), rope_tables(config, 100), strict=True):
        rotations = graph_model.Rotations(encoding, 100)
        ours = np.frombuffer(rotations.table(function, port, 100), np.float32)
        np.testing.assert_allclose(ours.reshape(table.shape), table, atol=1e-6)


@given(st.lists(st.integers(0, 65535) | st.integers(65500, 65535), min_size=1, max_size=40))
def test_the_lowest_id_of_the_largest_logit_is_chosen(logits: list[int]) -> None:
    for code in "HI":
        assert graph_run.greedy(memoryview(array.array(code, logits))) == logits.index(max(logits))


def test_unknown_scalings_are_refused() -> None:
    encoding = {"rope-dim": 4, "rope-theta": 1e4, "rope-scaling": {"rope-type": "qwen2vl-mrope"}}
    with pytest.raises(genie_api.FatalError, match="qwen2vl-mrope are not supported"):
        graph_model.Rotations(encoding, 100)


@dataclass
class Part:
    """A graph of two layers with the tensors of a contract."""

    inputs: dict[str, Port]
    outputs: dict[str, Port]


Shapes = Mapping[str, tuple[int, ...]]


def part(inputs: Shapes, outputs: Shapes) -> Part:
    ports = [{name: Port(name, shape) for name, shape in one.items()} for one in (inputs, outputs)]
    return Part(*ports)


def test_caches_are_paired_by_the_names_of_mllm() -> None:
    inputs = {f"past_{kind}_{n}": SHAPES[kind, 20] for kind in SIDES for n in (0, 1)}
    outputs = {f"present_{kind}_{n}": SHAPES[kind, 4] for n in (1, 0) for kind in SIDES}
    graph = part(inputs, {"logits": (1, 1, 4, 50), **outputs})
    contract = find_contract(inputs)
    assert contract.name == "mllm"
    chain = graph_model.Chain(4, CL, [graph], contract)  # type: ignore[list-item]
    names = {one.past.name: one.new.name for one in chain.kv}
    assert names == {name: name.replace("past", "present") for name in inputs}
    assert {(one.rows, one.unit) for one in chain.kv} == {(HEADS * DIM, 1), (HEADS, DIM)}


def test_caches_are_paired_by_encoding_and_order_where_names_of_executorch_do_not_tell() -> None:
    """Layers 0 and 2 have one encoding, so their order tells; layer 1 has another."""
    past = {f"input_{9 - n}_args_{n}@0": SHAPES["key", 20] for n in range(3)}
    past |= {f"input_{9 - n}_args_{n}@0": SHAPES["value", 20] for n in range(3, 6)}
    new = [f"output_aten_{n}@0" for n in (7, 19, 20, 31, 30, 40)]
    kinds = ("key", "value", "key", "value", "key", "value")
    outputs = {name: SHAPES[kind, 4] for name, kind in zip(new, kinds, strict=True)}
    graph = part(past, {**outputs, "output_aten_squeeze@0": (1, 4, 50)})
    graph.inputs["input_8_args_1@0"].scale = graph.outputs["output_aten_30@0"].scale = 0.25
    contract = find_contract(past)
    assert contract.name == "executorch"
    chain = graph_model.Chain(4, CL, [graph], contract)  # type: ignore[list-item]
    pairs = {one.past.name: one.new.name for one in chain.kv}
    numbers = {
        int(name.split("_")[3][:-2]): int(new.split("_")[2][:-2]) for name, new in pairs.items()
    }
    assert numbers == {0: 7, 1: 30, 2: 20, 3: 19, 4: 31, 5: 40}
    assert chain.logits.name == "output_aten_squeeze@0"


def test_a_cache_without_new_columns_is_refused() -> None:
    inputs = {"past_key_0": SHAPES["key", 20]}
    graph = part(inputs, {"logits": (1, 1, 4, 50), "present_key_1": SHAPES["key", 4]})
    with pytest.raises(genie_api.FatalError, match="no output has the new columns of past_key_0"):
        graph_model.Chain(4, CL, [graph], find_contract(inputs))  # type: ignore[list-item]


def test_graphs_of_no_contract_are_refused() -> None:
    with pytest.raises(ValueError, match="no input is a key/value cache by the names"):
        find_contract(["x", "cache_0"])


def test_a_float_table_is_rounded_down_onto_the_grid(tmp_path: Path) -> None:
    np.array([[0.49, -0.51], [1.0, 99.0]], np.float32).tofile(tmp_path / "table")
    config = {"type": "lut", "size": 2, "datatype": "float32", "lut-path": str(tmp_path / "table")}
    port = Port("inputs_embeds", (1, 1, 2))
    rows = graph_model.EmbeddingTable(config).rows(port, [0, 1])
    assert list(rows) == [128, 126, 130, 255]
