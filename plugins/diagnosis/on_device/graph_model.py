"""A model of context binaries, driven graph by graph through the QNN C API.

Prefill goes in calls of as many tokens as a graph takes (AR), decode one token a call, over one
KV cache. Each tensor of the cache has one buffer, laid out for the graph that is called: it is
rearranged in place when a graph of another AR or context length follows. Standard library only,
Python 3.8+.
"""

import array
import ctypes
import json
import math
import mmap
import os
import re
import struct
import time
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)  # fmt: skip

from buildlib.toolchains.qnn import api, structures
from buildlib.toolchains.qnn.contracts import Contract, find_contract

if TYPE_CHECKING:
    from device_scripts import genie_api
else:  # beside this file on the device
    import genie_api

_CODES = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "float32": "f", "float16": "H",
}  # fmt: skip
"""Codes of `array` and `memoryview` of stored types; half floats are kept as their bits."""
View = Any
"""A `memoryview` whose items are numbers."""
BOUNDS = {"b": (-128, 127), "B": (0, 255), "h": (-32768, 32767), "H": (0, 65535)}
_MASKED, _MASKED_HALF = -100.0, -65504.0
_LOG = api.LogCallback(lambda form, level, _time, values: genie_api.write_log(form, level, values))


class GraphPort:
    """An input or output of a graph.

    Attributes:
        code: of its values, as `array` has them.
        is_half: whether the values are bits of half floats.
        scale, offset: an integer q means (q + offset) * scale; scale 0 for plain numbers.
    """

    def __init__(self, tensor: structures.QnnTensor, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self.shape: Tuple[int, ...] = tuple(tensor.dimensions[: tensor.rank])
        kind = structures.DATA_TYPES.get(tensor.data_type, f"0x{tensor.data_type:04x}")
        if kind not in _CODES:
            raise genie_api.FatalError(f"{self.name} is of type {kind}, which is not supported")
        self.code = _CODES[kind]
        self.is_half = kind == "float16"
        self.count = math.prod(self.shape)
        quantize = tensor.quantize
        per_tensor = (quantize.definition, quantize.encoding) == (
            structures.ENCODING_DEFINED,
            structures.ENCODING_SCALE_OFFSET,
        )
        self.scale: float = quantize.scale if per_tensor else 0.0
        self.offset: int = quantize.offset if per_tensor else 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * array.array(self.code).itemsize

    def stored(self, value: float) -> Any:
        """Return a real number as it is stored: rounded onto the grid, and within it."""
        if self.is_half:
            return struct.unpack("<H", struct.pack("<e", value))[0]
        if not self.scale:
            return value if self.code == "f" else round(value)
        least, most = BOUNDS[self.code]
        return max(least, min(most, round(value / self.scale) - self.offset))

    def rounded_down(self, values: Iterable[float]) -> bytes:
        """Return real numbers as they are stored, rounded down onto the grid as by Genie 1.21."""
        if self.is_half:
            return array.array(self.code, map(self.stored, values)).tobytes()
        if not self.scale:
            return array.array(self.code, values).tobytes()
        least, most = BOUNDS[self.code]
        floors = (math.floor(value / self.scale) - self.offset for value in values)
        return array.array(self.code, (max(least, min(most, one)) for one in floors)).tobytes()

    @property
    def grid(self) -> Tuple[str, float, int]:
        """Meaning of stored values: code, scale and offset."""
        return self.code, self.scale, self.offset


class Graph:
    """One graph of a context binary.

    Attributes:
        ar: tokens of a call.
        cl: context length; None for a part without attention, which serves all.
    """

    def __init__(
        self,
        session: api.HtpSession,
        context: Any,
        raw: structures.GraphInfoV3,
        contract: Contract,
        part: int,
    ) -> None:
        self._session = session
        self.name: str = raw.name.decode()
        self._handle = session.graph(context, self.name)
        self._inputs = (structures.QnnTensor * raw.input_count)(*raw.inputs[: raw.input_count])
        self._outputs = (structures.QnnTensor * raw.output_count)(*raw.outputs[: raw.output_count])
        self.inputs = _ports(self._inputs, contract, part)
        self.outputs = _ports(self._outputs, contract, part)
        self.ar, self.cl = self._sizes(contract)

    def run(self) -> None:
        """Execute it on the memory that its ports point to."""
        self._session.execute(self._handle, self._inputs, self._outputs)

    def node_cycles(self) -> List[Tuple[str, int]]:
        """Execute it with a detailed profile, and return the cycles of each node, by its name."""
        return self._session.node_cycles(
            lambda profile: self._session.execute(
                self._handle, self._inputs, self._outputs, profile
            )
        )

    def _sizes(self, contract: Contract) -> Tuple[int, Optional[int]]:
        for name, port in self.inputs.items():
            if re.fullmatch(contract.mask, name):
                return port.shape[-2], port.shape[-1]
        lengths = {
            port.shape[-1 if re.fullmatch(contract.tokens, name) else -2]
            for name, port in self.inputs.items()
            if len(port.shape) in (2, 3)
        }
        if len(lengths) != 1:
            raise genie_api.FatalError(f"no input of graph {self.name} tells its AR")
        return lengths.pop(), None


def _ports(
    tensors: Iterable[structures.QnnTensor], contract: Contract, part: int
) -> Dict[str, GraphPort]:
    ports = [GraphPort(one, contract.port_name(one.name.decode(), part)) for one in tensors]
    return {port.name: port for port in ports}


class Cached(NamedTuple):
    """A tensor of the KV cache: `rows` times the columns of all tokens, of `unit` values each.

    Attributes:
        by_token: whether `new` has the rows of each token side by side.
    """

    past: GraphPort
    new: GraphPort
    rows: int
    unit: int
    by_token: bool = False

    @property
    def slots(self) -> int:
        """Columns of `past`."""
        return self.past.count // (self.rows * self.unit)


class Chain:
    """The graphs of all parts at one AR and context length, in the order of their calls."""

    def __init__(self, ar: int, cl: int, parts: Sequence[Graph], contract: Contract) -> None:
        self.ar = ar
        self.cl = cl
        self.parts = _in_order(parts)
        self.inputs: Dict[str, GraphPort] = {}
        self.outputs: Dict[str, GraphPort] = {}
        for part in self.parts:
            for name, port in part.inputs.items():
                first = self.inputs.setdefault(name, port)
                if first.grid != port.grid or first.shape != port.shape:
                    raise genie_api.FatalError(f"parts take {name} in two encodings or shapes")
            self.outputs.update(part.outputs)
        self.kv = list(self._caches(contract))
        new = {each.new.name for each in self.kv}
        names = [name for name in self.outputs if re.fullmatch(contract.logits, name)]
        logits = [self.outputs[name] for name in names if name not in new]
        if len(logits) != 1:
            raise genie_api.FatalError(f"the graphs of AR {ar} and CL {cl} give no logits")
        self.logits = logits[0]
        if self.logits.count != ar * self.logits.shape[-1]:
            raise genie_api.FatalError(f"{self.logits.name} has no row for each of {ar} tokens")

    def _caches(self, contract: Contract) -> "Iterator[Cached]":
        rest = list(self.outputs.values())
        for name, is_key, new in contract.caches(self.inputs):
            past = self.inputs[name]
            axis = len(past.shape) - (1 if is_key else 2)
            by_token = is_key and contract.keys_by_token
            shape = (*past.shape[:axis], self.ar, *past.shape[axis + 1 :])
            alike = [
                one
                for one in rest
                if (one.grid, one.shape) == (past.grid, shape[::-1] if by_token else shape)
                and new in (None, one.name)
            ]
            if not alike:
                raise genie_api.FatalError(f"no output has the new columns of {past.name}")
            rest.remove(alike[0])
            sizes = (math.prod(shape[:axis]), math.prod(shape[axis + 1 :]))
            yield Cached(past, alike[0], *sizes, by_token)

    def all_ports(self) -> Iterator[GraphPort]:
        """Yield the ports of all parts."""
        for part in self.parts:
            yield from part.inputs.values()
            yield from part.outputs.values()

    @property
    def slots(self) -> int:
        """Columns of the KV cache that a call sees before its own."""
        return self.kv[0].slots


def _in_order(parts: Sequence[Graph]) -> List[Graph]:
    """Sort parts so that each comes after those that make its inputs."""
    rest = list(parts)
    order: List[Graph] = []
    while rest:
        outputs = {name for part in rest for name in part.outputs}
        first = next((part for part in rest if not outputs & part.inputs.keys()), None)
        if first is None:
            raise genie_api.FatalError("the parts of the model take each other's outputs")
        rest.remove(first)
        order.append(first)
    return order


class Memory:
    """Buffers of all tensors by name; graphs that know a name share its buffer."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        ports = [port for chain in chains for port in chain.all_ports()]
        sizes: Dict[str, int] = {}
        for port in ports:
            sizes[port.name] = max(port.size, sizes.get(port.name, 0))
        self._buffers = {name: bytearray(size) for name, size in sizes.items()}
        self._kept = []
        for port in ports:
            place = (ctypes.c_char * sizes[port.name]).from_buffer(self._buffers[port.name])
            self._kept.append(place)
            port.tensor.memory_type = structures.MEMORY_RAW
            port.tensor.data = ctypes.addressof(place)
            port.tensor.data_size = port.size

    def of(self, port: GraphPort) -> View:
        """Return the values of a port, in the order of its last axis."""
        view: View = memoryview(self._buffers[port.name])
        return view.cast(port.code)

    def write(self, port: GraphPort, data: bytes) -> None:
        """Write all values of a port, as stored."""
        memoryview(self._buffers[port.name])[: port.size] = data


class KvBuffers:
    """Keys and values of all tokens so far, in one buffer for each tensor.

    Buffers are laid out for the graph that is called next; their other columns are masked.

    Attributes:
        n_past: tokens so far.
    """

    def __init__(self, memory: Memory, most: int) -> None:
        self._memory = memory
        self._most = most
        self.n_past = 0
        self._slots = 0

    def clear(self, chain: Chain) -> None:
        """Forget all tokens."""
        self.n_past, self._slots = 0, chain.slots
        for each in chain.kv:
            buffer = self._memory.of(each.past)
            buffer[:] = _zeros(each.past, len(buffer))

    def lay_out(self, chain: Chain, slots: Optional[int] = None) -> None:
        """Rearrange the buffers for a graph that sees so many columns: its own, or `slots`."""
        slots = chain.slots if slots is None else slots
        if slots == self._slots:
            return
        for past, _, rows, unit, _ in chain.kv:
            buffer, old, new = self._memory.of(past), self._slots * unit, slots * unit
            overlap = min(self.n_past * unit, old, new)
            empty = _zeros(past, new - overlap)
            # In the order in which no row is overwritten before it has moved.
            for row in range(rows) if new < old else reversed(range(rows)):
                columns = array.array(past.code, buffer[row * old : row * old + overlap].tobytes())
                buffer[row * new : (row + 1) * new] = columns + empty
        self._slots = slots

    def append(self, chain: Chain, count: int) -> None:
        """Take the first new columns of the outputs of a chain that was called."""
        if self.n_past + count > self._slots:  # the next graph sees more columns than this one
            self.lay_out(chain, self._most)
        first, slots = self.n_past, self._slots
        self.n_past += count
        count = min(count, slots - first)  # no graph sees a token that fills the context
        for past, new, rows, unit, by_token in chain.kv:
            target = self._memory.of(past)[: rows * slots * unit]
            source = self._memory.of(new)[: rows * chain.ar * unit]
            if unit == 1:
                for column in range(count):
                    values = slice(column * rows, (column + 1) * rows)
                    own = values if by_token else slice(column, None, chain.ar)
                    target[first + column :: slots] = source[own]
                continue
            for row in range(rows):
                to, since = (row * slots + first) * unit, row * chain.ar * unit
                target[to : to + count * unit] = source[since : since + count * unit]


def _zeros(port: GraphPort, count: int) -> "array.array[Any]":
    return array.array(port.code, [port.stored(0.0)]) * count


class Rotations:
    """Cosines and sines of positions, as `positional-encoding` of a Genie configuration has them.

    Frequencies after Su et al., RoFormer (arXiv 2104.09864); scalings `linear` after Chen et al.
    (arXiv 2306.15595), `llama3` as published with Llama 3.1, `longrope` after Ding et al. (arXiv
    2402.13753).

    Args:
        encoding: `positional-encoding` of one set of inputs.
        context: size of the dialog, by which `longrope` chooses its factors.
    """

    def __init__(self, encoding: Dict[str, Any], context: int) -> None:
        self.dim = int(encoding["rope-dim"])
        theta = float(encoding["rope-theta"])
        frequencies = [theta ** -(i / self.dim) for i in range(self.dim)]
        scaling = encoding.get("rope-scaling") or {"rope-type": "default"}
        self._frequencies = [
            frequency / divisor
            for frequency, divisor in zip(frequencies, _divisors(scaling, frequencies, context))
        ]

    def table(self, function: Callable[[float], float], port: GraphPort, count: int) -> bytes:
        """Return the stored values of the first `count` positions, `[count, dim]`."""
        values = [
            function(position * frequency)
            for position in range(count)
            for frequency in self._frequencies
        ]
        return port.rounded_down(values)


def _divisors(scaling: Dict[str, Any], frequencies: List[float], context: int) -> List[float]:
    """Return the divisor of each frequency for a scaling."""
    kind = scaling["rope-type"]
    if kind == "default":
        return [1.0] * len(frequencies)
    if kind == "linear":
        return [float(scaling["factor"])] * len(frequencies)
    if kind == "longrope":
        is_long = context > int(scaling["original-max-position-embeddings"])
        return [float(one) for one in scaling["long-factor" if is_long else "short-factor"]]
    if kind != "llama3":
        raise genie_api.FatalError(f"positions scaled by {kind} are not supported")
    low, high = float(scaling["low-freq-factor"]), float(scaling["high-freq-factor"])
    turn = int(scaling["original-max-position-embeddings"]) / (2 * math.pi)

    def divisor(frequency: float) -> float:
        turns = turn * frequency
        blend = (turns - low) / (high - low) if high > low else float(turns >= low)
        blend = max(0.0, min(1.0, blend))
        return 1.0 / (blend + (1.0 - blend) / float(scaling["factor"]))

    return [divisor(frequency) for frequency in frequencies]


class EmbeddingTable:
    """A table on the host, as `embedding` of a Genie configuration names it.

    Genie takes integers on the grid of the graph's input as they are, and rounds float32 down onto
    it (measured on Genie 1.21).

    Raises:
        genie_api.FatalError: the configuration or the file is of another kind.
    """

    def __init__(self, config: Dict[str, Any]) -> None:
        kind = config.get("datatype", "float32")
        codes = {"float32": "f", "ufixed8": "B", "ufixed16": "H"}
        if config.get("type") != "lut" or kind not in codes:
            raise genie_api.FatalError(f"embeddings of type {config.get('type')}, {kind}")
        grid = config.get("quant-param", {"scale": 0.0, "offset": 0})
        self._grid = (codes[kind], float(grid["scale"]), int(grid["offset"]))
        self._size = int(config["size"])
        self._map = map_file(str(config["lut-path"]))

    def rows(self, port: GraphPort, tokens: Sequence[int]) -> bytes:
        """Return the rows of tokens, as the port has them."""
        code, scale, offset = self._grid
        size = self._size * array.array(code).itemsize
        if port.shape[-1] != self._size or (max(tokens) + 1) * size > len(self._map):
            raise genie_api.FatalError("the embedding table does not fit the model")
        rows = b"".join(self._map[token * size : (token + 1) * size] for token in tokens)
        if self._same(port):
            return rows
        values = array.array(code, rows)
        real = values if code == "f" else [(value + offset) * scale for value in values]
        return port.rounded_down(real)

    def _same(self, port: GraphPort) -> bool:
        code, scale, offset = self._grid
        near = abs(port.scale - scale) <= 1e-6 * scale
        return (code, offset) == (port.code, port.offset) and near


def map_file(path: str) -> mmap.mmap:
    """Map a file, so that the system may drop its pages again."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise genie_api.FatalError(f"cannot read {path}: {error}") from error


class Settings(NamedTuple):
    """Model of a Genie configuration: its files, sizes and special tokens."""

    binaries: List[str]
    context: int
    vocabulary: int
    bos: int
    ends: FrozenSet[int]
    padding: int
    greedy: bool
    rotations: Dict[str, Rotations]
    table: Optional[EmbeddingTable]

    @classmethod
    def read(cls, path: str) -> "Settings":
        """Read a configuration, and refuse one that needs more than graphs."""
        try:
            dialog = json.loads(genie_api.read_file(path, "configuration"))["dialog"]
            return cls._of(dialog)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise genie_api.FatalError(f"{path} is no configuration: {error!r}") from error

    @classmethod
    def _of(cls, dialog: Dict[str, Any]) -> "Settings":
        engine, context = dialog["engine"], dialog["context"]
        if isinstance(engine, list):  # two models, of which the target can answer alone
            engine = next(one for one in engine if one.get("role") in ("target", "primary"))
        if engine.get("longcontext"):
            raise genie_api.FatalError("long contexts are Genie's alone")
        model, htp = engine["model"], engine["backend"].get("QnnHtp", {})
        positions = model.get("positional-encoding")
        if positions is None and "rope-theta" in htp:
            positions = {"rope-dim": htp["pos-id-dim"], "rope-theta": htp["rope-theta"]}
        if positions is None:
            positions = []
        if not isinstance(positions, list):
            positions = [positions]
        size, eos = int(context["size"]), context["eos-token"]
        ends = [int(one) for one in (eos if isinstance(eos, list) else [eos])]
        if "eot-token" in context:
            ends.append(int(context["eot-token"]))
        table, sampler = dialog.get("embedding"), dialog.get("sampler", {})
        return cls(
            binaries=[str(name) for name in model["binary"]["ctx-bins"]],
            context=size,
            vocabulary=int(context["n-vocab"]),
            bos=int(context["bos-token"]),
            ends=frozenset(ends),
            padding=ends[0],
            greedy=sampler.get("top-k") == 1 or sampler.get("temp") == 0,
            rotations={
                one.get("prefix", ""): Rotations(one, size)
                for one in positions
                if one.get("type", "rope") == "rope"
            },
            table=EmbeddingTable(table) if table else None,
        )


class ChainCall(NamedTuple):
    """A call of a chain; its outputs lie in memory until the next one.

    Attributes:
        first: position of its first token.
        tokens: their number, without padding.
        spans: of each graph, when it began and ended, in nanoseconds of `time.monotonic_ns`.
    """

    chain: Chain
    first: int
    tokens: int
    spans: List[Tuple[str, int, int]]


class LoadedModel:
    """A loaded model and its context.

    Args:
        packages: op packages to register first: path, provider and target.

    Raises:
        genie_api.FatalError: a file cannot be read, or the graphs are of no contract.
        RefusedError: a library or QNN refuses.
    """

    def __init__(
        self,
        settings: Settings,
        packages: Sequence[Tuple[str, str, str]] = (),
        stop: Optional[genie_api.Stop] = None,
        log_level: int = 1,
    ) -> None:
        genie_api.keep_to_one_cpu()
        self.settings = settings
        self._stop = stop or genie_api.Stop()
        files = [_binary(name) for name in settings.binaries]
        system = api.load_system(Path("libQnnSystem.so"))
        infos = [api.raw_binary_info(system, file)[0] for file in files]
        # A device knows its SoC; the emulator takes that of the binary.
        soc = infos[0].soc_model if os.uname().machine == "x86_64" else None
        session = api.HtpSession(
            Path("libQnnHtp.so"), soc, whole=False, log=_LOG, log_level=log_level
        )
        for path, provider, target in packages:
            session.register_op_package(path, provider, target)
        graphs = []
        for file, info in zip(files, infos):
            self._stop.check()
            context = session.context_from_binary(file)
            raw = [info.graphs[index] for index in range(info.graph_count)]
            graphs.append((context, raw))
        names = {
            tensor.name.decode()
            for _, raw in graphs
            for graph in raw
            for tensor in graph.inputs[: graph.input_count]
        }
        self.contract = find_contract(names)
        self.parts = [
            [Graph(session, context, one, self.contract, part) for one in raw]
            for part, (context, raw) in enumerate(graphs)
        ]
        self._kept = (files, system, session)
        self.chains = _chains(self.parts, self.contract)
        self.memory = Memory(self.chains)
        self.cache = KvBuffers(self.memory, max(chain.slots for chain in self.chains))
        self._tables: Dict[Tuple[str, Tuple[str, float, int]], bytes] = {}
        self._fillers: Dict[Chain, List[Tuple[GraphPort, Filler]]] = {}
        for chain in self.chains:
            makers = ((port, self._filler(chain, port)) for port in chain.inputs.values())
            self._fillers[chain] = [(port, fill) for port, fill in makers if fill is not None]
        self.reset()

    @property
    def context(self) -> int:
        """Tokens that its longest graphs can attend to, when the last one comes alone."""
        return max(chain.slots for chain in self.chains) + min(chain.ar for chain in self.chains)

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.clear(self.chains[0])

    def feed(self, tokens: Sequence[int]) -> Iterator[ChainCall]:
        """Append tokens to the context, in as many calls as they need; the caller iterates.

        Raises:
            genie_api.FatalError: the context has no room for them.
        """
        count = 0
        while count < len(tokens):
            self._stop.check()
            chain = self._choose(len(tokens) - count)
            chunk = tokens[count : count + chain.ar]
            first = self.cache.n_past
            self.cache.lay_out(chain)
            call_tokens = [*chunk, *[self.settings.padding] * (chain.ar - len(chunk))]
            for port, fill in self._fillers[chain]:
                self.memory.write(port, fill(first, call_tokens))
            spans = []
            for part in chain.parts:
                began = time.monotonic_ns()
                part.run()
                spans.append((part.name, began, time.monotonic_ns()))
            self.cache.append(chain, len(chunk))
            count += len(chunk)
            yield ChainCall(chain, first, len(chunk), spans)

    def logits(self, call: ChainCall, row: int) -> View:
        """Return the logits after a token of a call, as stored."""
        port = call.chain.logits
        size = port.shape[-1]
        return self.memory.of(port)[row * size : (row + 1) * size]

    def _choose(self, left: int) -> Chain:
        """Choose the smallest graph that takes all tokens that are left, else the largest.

        Of several context lengths, the shortest with room for the new tokens, too, is taken, as by
        Genie 1.21. Nothing follows a token that fills the longest.
        """
        n_past = self.cache.n_past
        fitting = [chain for chain in self.chains if chain.slots >= n_past]
        if not fitting or n_past + left > self.context:
            raise genie_api.FatalError(f"{n_past + left} tokens exceed the context")
        ars = sorted({chain.ar for chain in fitting})
        ar = next((one for one in ars if one >= left), ars[-1])
        by_length = [chain for chain in fitting if chain.ar == ar]  # as `chains` is sorted
        after = n_past + min(left, ar)
        return next((chain for chain in by_length if chain.slots >= after), by_length[-1])

    def _filler(self, chain: Chain, port: GraphPort) -> "Optional[Filler]":
        """Return the maker of an input; None for caches, zeros, and outputs of other parts."""
        contract, settings = self.contract, self.settings

        def matches(pattern: str) -> Any:
            return re.fullmatch(pattern, port.name)

        if matches(contract.tokens):
            return lambda _first, tokens: array.array(port.code, tokens).tobytes()
        if matches(contract.mask):
            return _mask_filler(port, chain.slots)
        if matches(contract.positions):
            return lambda first, _tokens: array.array(
                port.code, range(first, first + chain.ar)
            ).tobytes()
        table = settings.table
        if matches(contract.embeddings) and table is not None:
            return lambda _first, tokens: table.rows(port, tokens)
        rotation = matches(contract.rotation)
        if rotation and rotation["prefix"] in settings.rotations:
            return self._rotation_filler(settings.rotations[rotation["prefix"]], rotation, port)
        if matches(contract.past) or matches(contract.zero) or port.name in chain.outputs:
            return None
        raise genie_api.FatalError(
            f"nothing is known of input {port.name} of graphs of the contract {contract.name}"
        )

    def _rotation_filler(self, rotations: Rotations, match: Any, port: GraphPort) -> "Filler":
        if port.shape[-1] != rotations.dim:
            raise genie_api.FatalError(
                f"{port.name} is for {port.shape[-1]} frequencies, "
                f"and the configuration has {rotations.dim}"
            )
        function = math.cos if match["function"] == "cos" else math.sin
        count = self.context + max(chain.ar for chain in self.chains)  # padding goes beyond
        key = (port.name, port.grid)
        if key not in self._tables:
            self._tables[key] = rotations.table(function, port, count)
        table = self._tables[key]
        row = len(table) // count
        return lambda first, tokens: table[first * row : (first + len(tokens)) * row]


Filler = Callable[[int, Sequence[int]], bytes]


def _mask_filler(port: GraphPort, slots: int) -> Filler:
    """Open each row to all columns before the call, and to those of the call up to its own."""
    rows, columns = port.shape[-2:]
    least, most = BOUNDS.get(port.code, (_MASKED, 0.0))
    if port.is_half:
        least = port.stored(_MASKED_HALF)
    on_grid = port.scale or port.is_half
    is_open = array.array(port.code, [port.stored(0.0) if on_grid else most]).tobytes()
    is_closed = array.array(port.code, [least]).tobytes()

    def fill(first: int, _tokens: Sequence[int]) -> bytes:
        past = is_open * first + is_closed * (slots - first)
        return b"".join(
            past + is_open * (row + 1) + is_closed * (columns - slots - row - 1)
            for row in range(rows)
        )

    return fill


def _binary(path: str) -> Any:
    """Map a context binary as an array of ctypes."""
    content = map_file(path)
    return (ctypes.c_char * len(content)).from_buffer(content)


def _chains(parts: Sequence[Sequence[Graph]], contract: Contract) -> List[Chain]:
    """Join the graphs of all parts that have one AR and context length."""
    sizes = sorted({(one.ar, one.cl) for part in parts for one in part if one.cl is not None})
    chains = []
    for ar, cl in sizes:
        fitting = [[one for one in part if one.ar == ar and one.cl in (cl, None)] for part in parts]
        if all(fitting):
            members = [part[0] for part in fitting]
            chains.append(Chain(ar, cl, members, contract))
    if not chains:
        raise genie_api.FatalError("the parts have no AR and context length in common")
    return chains
