"""Programs of ExecuTorch: what its own serializer wrote is read, and damage is one line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import InputFileError
from plugins.other_runtimes.executorch.program import ExecutorchProgram, read_artifact
from tests.plugins.other_runtimes.executorch import pte


@pytest.mark.parametrize(("path", "shared"), [(pte.SEGMENTS, False), (pte.INLINE, True)])
def test_a_program_is_read_as_its_serializer_wrote_it(
    path: Path, shared: bool, tmp_path: Path
) -> None:
    program = ExecutorchProgram.read(path)
    assert program.methods == ("kv_forward", "prefill_forward")
    assert program.constants["get_vocab_size"] == (1280,)
    assert program.constants["get_eos_ids"] == (2, 3)
    assert program.weight_sharing is shared
    (copy,) = program.extract(path, tmp_path)  # both methods call the same graphs
    assert copy.read_bytes() == pte.PLACEHOLDER


def test_another_binary_in_its_segment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(pte.program_with(b"other"))
    (copy,) = ExecutorchProgram.read(path).extract(path, tmp_path)
    assert copy.read_bytes() == b"other"


def test_tokens_of_a_tokenizer_come_before_the_constants(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    plain = tmp_path / "plain.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(plain))
    artifact = read_artifact(pte.SEGMENTS, tmp_path, plain)
    assert (artifact.bos, artifact.eos) == (1, (2, 3))
    turns = tmp_path / "turns.json"
    words = {"a": 0, "<|im_end|>": 5, "<|endoftext|>": 4}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(turns))
    artifact = read_artifact(pte.SEGMENTS, tmp_path, turns)
    assert (artifact.bos, artifact.eos) == (-1, (5, 4))


def replaced(old: bytes, new: bytes) -> bytes:
    data = pte.SEGMENTS.read_bytes()
    assert old in data
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot mmap an empty file"),
        (b"ET12", "begin with ET12"),
        (b"PK\3\4" * 30, "begin with ET12"),
        (replaced(b"QnnBackend", b"XnnBackend"), "it is for XnnBackend"),
        (replaced(b"\xcd\xab\x78\x56", b"\xcd\xab\x34\x12"), "begins with 0x1234ABCD"),
        (pte.SEGMENTS.read_bytes()[:-1], "ends after its"),
        (pte.program_with(b"x" * 64)[:-64], "ends after its"),
    ],
)
def test_what_is_no_program_for_qnn_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(data)
    with pytest.raises(InputFileError, match=said) as caught:
        ExecutorchProgram.read(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputFileError):
            ExecutorchProgram.read(path)


ORIGINALS = [pte.SEGMENTS.read_bytes(), pte.INLINE.read_bytes()]
WORDS = st.sampled_from([0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, 2**32 - 1)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(ORIGINALS)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data) - 4))
        data[place : place + 4] = draw(WORDS).to_bytes(4, "little")
    return bytes(data[: draw(st.integers(8, len(data)))])


@given(damaged())
def test_a_damaged_program_is_one_typed_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pte"
    path.write_bytes(data)
    try:
        program = ExecutorchProgram.read(path)
    except InputFileError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for start, size in program.binaries:
        assert 0 <= start <= start + size <= len(data)
