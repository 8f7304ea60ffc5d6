"""A `.pte` of ExecuTorch's QNN backend: methods, constants, and the context binaries in it.

Sources, all of https://github.com/pytorch/executorch (BSD-3-Clause): `schema/program.fbs` and
`extended_header.h` (the file), `backends/qualcomm/serialization/qc_compiler_spec.fbs` (options),
`backends/qualcomm/runtime/backends/QnnCustomProtocol.h` (header of a payload), and the runner of
`examples/qualcomm/oss_scripts/llama` (constants, tokens that end an answer).
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.errors import InputFileError
from buildlib.files import check_file
from buildlib.foreign.artifact import ForeignArtifact
from plugins.other_runtimes.executorch.flatbuffer import Buffer, Table, read_at

_MAGIC, _EXTENDED = b"ET12", b"eh00"
_BACKEND, _OPTIONS = "QnnBackend", "qnn_compile_spec"
_LONGEST_OPTIONS = 1 << 16
_PAYLOAD = 0x5678ABCD
_HEAD, _PADDED_HEAD = 4 + 8 + 8, 256
"""Bytes of magic, signature and size before a binary, and of those with their padding."""
_INT = 2
"""Of the union `KernelTypes`."""
_MOST_CONSTANTS = 64
"""Values of a method that returns constants."""
_CHUNK = 1 << 24
_ENDS = (
    "<|eot_id|>", "<|eot|>", "<|end_of_text|>", "<|end|>", "<|im_end|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "<|user|>",
)  # fmt: skip
"""Tokens that end an answer for the runner, before the constants of the file."""


@dataclass(frozen=True, slots=True)
class ExecutorchProgram:
    """Facts of a program.

    Attributes:
        methods: that QNN runs.
        constants: integers that methods without inputs return, such as `get_vocab_size`.
        binaries: where its context binaries begin and how long they are, in bytes of the file.
        weight_sharing: whether graphs of a binary share weights.
    """

    methods: tuple[str, ...]
    constants: Mapping[str, tuple[int, ...]]
    binaries: tuple[tuple[int, int], ...]
    weight_sharing: bool

    @classmethod
    def read(cls, path: Path) -> "ExecutorchProgram":
        """Read a file."""
        try:
            with _mapped(path) as data:
                return _read_program(data)
        except ValueError as error:
            raise InputFileError(str(path), f"it is no program of ExecuTorch: {error}") from error

    def extract(self, path: Path, folder: Path) -> tuple[Path, ...]:
        """Copy the context binaries into files of a folder, in the order of their calls."""
        copies = tuple(folder / f"{number}.bin" for number, _ in enumerate(self.binaries))
        with _mapped(path) as data:
            for copy, (start, size) in zip(copies, self.binaries, strict=True):
                with copy.open("wb") as sink:
                    for begin in range(start, start + size, _CHUNK):
                        sink.write(data[begin : min(begin + _CHUNK, start + size)])
        return copies


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        check_file(path)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            yield data
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error


def _read_program(data: Buffer) -> ExecutorchProgram:
    if data[4:8] != _MAGIC:
        raise ValueError(f"it does not begin with {_MAGIC.decode()}")
    base = read_at("<Q", data, 24) if data[8:12] == _EXTENDED else len(data)
    program = Table.root(data)
    inline = [delegate.span(0, 1) for delegate in program.tables(3)]
    segments = [(base + one.number(0, "<Q"), one.number(1, "<Q")) for one in program.tables(4)]
    methods: list[str] = []
    constants: dict[str, tuple[int, ...]] = {}
    others: set[str] = set()
    payloads: dict[tuple[int, int], bool] = {}
    for plan in program.tables(1):
        name = plan.text(0)
        delegates = list(plan.tables(7))
        for delegate in delegates:
            if delegate.text(0) != _BACKEND:
                others.add(delegate.text(0))
                continue
            place = delegate.table(1)
            holders, index = (segments if place.number(0, "<b") else inline), place.number(1, "<I")
            if index >= len(holders):
                raise ValueError(f"the method {name} has its data in a segment that is not there")
            payloads[holders[index]] = _shares_weights(data, delegate)
            methods.append(name)
        if not delegates:
            constants[name] = tuple(_integers(plan))
    if not payloads:
        for_ = f", it is for {', '.join(sorted(others))}" if others else ""
        raise ValueError(f"no method of it runs on {_BACKEND}{for_}")
    binaries = tuple(_binary(data, start, size) for start, size in payloads)
    if sum(size for _, size in binaries) > len(data):
        raise ValueError("its segments overlap")
    return ExecutorchProgram(tuple(methods), constants, binaries, any(payloads.values()))


def _integers(plan: Table) -> Iterator[int]:
    """Yield the integers among the values of a method that calls nothing."""
    if plan.span(2, 4)[1] <= _MOST_CONSTANTS:
        for value in plan.tables(2):
            if value.number(0, "<B") == _INT:
                yield value.table(1).number(0, "<q")


def _shares_weights(data: Buffer, delegate: Table) -> bool:
    for spec in delegate.tables(2):
        if spec.text(0) == _OPTIONS:
            start, size = spec.span(1, 1)
            backend = Table.root(data[start : start + min(size, _LONGEST_OPTIONS)]).table(1)
            return bool(backend.table(1).number(8, "<B"))
    return False


def _binary(data: Buffer, start: int, size: int) -> tuple[int, int]:
    """Return where the binary in a payload begins, and its length."""
    if start + size > len(data) or size < _HEAD:
        raise ValueError(f"a segment of {size} bytes at {start} ends after its {len(data)} bytes")
    magic = read_at("<I", data, start)
    if magic != _PAYLOAD:
        raise ValueError(
            f"its data for QNN begins with 0x{magic:08X}: export it ahead of time, without "
            "online_prepare"
        )
    length = read_at("<Q", data, start + 12)
    if not _HEAD <= size - length <= _PADDED_HEAD:
        raise ValueError(f"a payload of {size} bytes says that its binary has {length}")
    return start + size - length, length


def is_artifact(path: Path) -> bool:
    """Return whether it is a file of that name, or that begins as such a file."""
    if path.suffix == ".pte" or not path.is_file():
        return path.suffix == ".pte"
    with path.open("rb") as file:
        return file.read(8)[4:] == _MAGIC


def read_artifact(path: Path, folder: Path, tokenizer: Path | None) -> ForeignArtifact:
    """Read a `.pte`, whose binaries go into a folder.

    Tokens before a text and after an answer are those of the tokenizer, as for the runner; only
    where it has none are they the constants of the file, which say what fits Llama 2.
    """
    program = ExecutorchProgram.read(path)
    constants = program.constants
    first = constants.get("get_bos_id", ())
    eos = constants.get("get_eos_ids") or constants.get("get_eos_id", ())
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        ids = [loaded.token_to_id(token) for token in _ENDS]
        ends = tuple(number for number in ids if number is not None)
        first = tuple(loaded.encode("").ids[:1]) or ((-1,) if ends else first)
        eos = ends or eos
    return ForeignArtifact(
        path,
        name=path.stem,
        contract="executorch",
        binaries=program.extract(path, folder),
        files={path.name: path},
        tokenizer=tokenizer,
        bos=first[0] if first else None,
        eos=eos,
        weight_sharing=program.weight_sharing,
        toolchain={"toolchain": "executorch"},
    )
