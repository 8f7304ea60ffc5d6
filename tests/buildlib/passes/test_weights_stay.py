"""No pass reads, copies or rewrites weights, which may exceed memory and disk."""

import json
from pathlib import Path

from tests.buildlib.passes.decoders import Kind, make_decoder
from tests.command_line import Started

_SCRIPT = """
import json, sys
from pathlib import Path
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.passes.split import split_model

def read_bytes():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])

source, out = map(Path, sys.argv[1:])
before = read_bytes()
for ar in (4, 1):
    model = convert_arcl(source, GraphShape(ar, 12), out / f"ar{ar}" / "model.onnx")
    for part in split_model(model, 3, out / f"parts{ar}", split_lm_head=True):
        convert_mha2sha(part, out / f"heads{ar}" / part.name)
mapped = "weights.bin" in Path("/proc/self/maps").read_text()
print(json.dumps({"read": read_bytes() - before, "mapped": mapped}))
"""


def test_more_weights_than_memory_and_disk_hold_are_neither_read_nor_copied(tmp_path: Path) -> None:
    kind = Kind(n_kv=2, group=2, head_dim=8, hidden=1 << 23, vocab=1 << 12, layers=2)
    model = make_decoder(tmp_path / "in", kind, sparse=True)
    weights = model.parent / "weights.bin"
    assert weights.stat().st_size > 1 << 38
    with Started("-c", _SCRIPT, model, tmp_path / "out") as run:
        said = json.loads(run.communicate(timeout=200)[0])
    assert not said["mapped"]
    assert said["read"] < 64 << 20  # the models themselves, and modules imported late
    assert weights.stat().st_blocks * 512 < 1 << 20  # still a hole: nothing was written to it
    copies = list((tmp_path / "out").rglob("weights.bin"))
    assert len(copies) == 6
    assert all(copy.samefile(weights) for copy in copies)
    assert weights.stat().st_nlink == 7
    others = [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".onnx"]
    assert len(others) == 2 + 6 + 6
    assert sum(path.stat().st_size for path in others) < 8 << 20
