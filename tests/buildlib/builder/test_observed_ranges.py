"""Ranges that a technique observes on its way serve as those of calibration."""

import json
from pathlib import Path

import pytest

from buildlib.builder.model_folder import calibration_windows
from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.complete_encodings import CompleteEncodings
from buildlib.builder.stages.optimize_weights import OptimizeWeights
from buildlib.cache.layout import CacheEntry
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encoding
from buildlib.graph.shape import GraphShape
from buildlib.quantize.options import QuantizationOptions

OPTIONS = QuantizationOptions(param_bitwidth=4, techniques=("gptq",))


@pytest.fixture(scope="module")
def changed(
    one_layer: Path, tiny_text: str, tmp_path_factory: pytest.TempPathFactory
) -> CacheEntry:
    """The least model after GPTQ, whose windows are those of calibration."""
    source, folder = CheckpointSource(one_layer, tiny_text), tmp_path_factory.mktemp("stages")
    given, done = (CacheEntry(name, folder / name, name, reused=False) for name in "ab")
    for entry in (given, done):
        entry.folder.mkdir()
    AuthorModel(source, {}, GraphShape(16, 96)).run(given.folder)
    OptimizeWeights(given, source, OPTIONS).run(done.folder)
    return done


def completed(
    entry: CacheEntry, text: str, into: Path, options: QuantizationOptions = OPTIONS
) -> dict[str, Encoding]:
    into.mkdir()
    CompleteEncodings(entry, CheckpointSource(entry.folder, text), options, entry).run(into)
    return load_encodings(into / "model.encodings").by_name()


def test_they_are_those_of_a_calibration(
    changed: CacheEntry, tiny_text: str, tmp_path: Path
) -> None:
    found = completed(changed, tiny_text, tmp_path / "found")
    (changed.folder / "ranges.json").rename(tmp_path / "ranges.json")
    expected = completed(changed, tiny_text, tmp_path / "expected")
    (tmp_path / "ranges.json").rename(changed.folder / "ranges.json")
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].scale == pytest.approx(one.scale, rel=1e-5), name
        assert found[name].offset == one.offset, name


def test_they_serve_the_same_text_and_whole_ranges_alone(
    changed: CacheEntry, tiny_text: str, tmp_path: Path
) -> None:
    """Told by ranges that no calibration finds."""
    path = changed.folder / "ranges.json"
    stored = path.read_text()
    data = json.loads(stored)
    data["ranges"]["logits"] = [-1000.0, 1000.0]
    path.write_text(json.dumps(data))
    step, narrow = 2000 / 65535, OPTIONS.model_copy(update={"activation_ranges": "percentile"})
    other = tiny_text[::-1]
    try:
        same = completed(changed, tiny_text, tmp_path / "same")
        assert same["logits"].scale == pytest.approx([step])
        for number, (text, options) in enumerate([(other, OPTIONS), (tiny_text, narrow)]):
            found = completed(changed, text, tmp_path / str(number), options)
            assert found["logits"].scale[0] < step / 10
    finally:
        path.write_text(stored)


@pytest.mark.parametrize(
    ("cl", "name", "length", "count", "calibrates"),
    [
        (4096, "gptq", 2048, 4, True),
        (1024, "gptaq", 1024, 8, True),
        (96, "seqmse", 96, 86, False),
        (4096, "adascale", 512, 16, False),
    ],
)
def test_windows_of_techniques(
    cl: int, name: str, length: int, count: int, *, calibrates: bool, tiny: Path, tmp_path: Path
) -> None:
    text = "".join(chr(0x100 + index * index % 300) for index in range(30_000))
    source = CheckpointSource(tiny, text)
    AuthorModel(source, {}, GraphShape(16, cl)).run(tmp_path)
    options = QuantizationOptions.model_validate({"param_bitwidth": 4, "techniques": [name]})
    windows = calibration_windows(tmp_path, text, quantization=options)
    assert [len(window) for window in windows] == [length] * count
    assert all(one in windows for one in calibration_windows(tmp_path, text)) is calibrates
