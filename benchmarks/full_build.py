"""The whole build of a model of Llama-3.2-1B's shape, timed: `python -m benchmarks.full_build`.

Random weights in float32, encodings as `random_encodings` makes them, AR 1 and 128 at CL 4096, 3
parts, weight-shared for a phone. Then the same again with nothing changed, and with one option of
the compiler changed. Time of each stage, peak memory of the process with all its children, sizes.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory_meter import MemoryMeter
from benchmarks.random_encodings import write_random_encodings
from benchmarks.random_llama import LLAMA_1B, make_random_llama
from buildlib.genai import GenAIBuilderFactory
from buildlib.graph.shape import GraphShape
from buildlib.pipeline.runner import StageRecord
from suites.models import tiny_llama

TOKENIZER = tiny_llama.folder() / "tokenizer.json"
AR, CL = 128, 4096
CHANGED_OPTION = {"graphs.optimization_type": 1}

LIMIT_S, LIMIT_BYTES, LIMIT_AGAIN_S = 360, 12 << 30, 1.0
GIB = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """One build."""

    seconds: float
    peak_bytes: int
    records: tuple[StageRecord, ...]
    binaries: tuple[Path, ...]

    @property
    def operations_run(self) -> tuple[str, ...]:
        """Stages that did not come from the cache."""
        return tuple(dict.fromkeys(r.operation for r in self.records if not r.reused))


def make_model(folder: Path, layers: int, bits: int) -> Path:
    """A model folder as the builder takes it."""
    began = time.monotonic()
    sizes = LLAMA_1B.copy()
    sizes["layers"] = layers
    model = make_random_llama(folder, shape=GraphShape(AR, CL), **sizes)
    write_random_encodings(model, bits)
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"model made in {time.monotonic() - began:.1f} s: {layers} layers, {size / GIB:.2f} GiB")
    return folder


def build(
    model: Path, cache: Path, target: str, splits: int, options: Mapping[str, object]
) -> Outcome:
    """Build through the public interface."""
    builder = GenAIBuilderFactory.create(model, cache_root=cache)
    builder.set_targets([target])
    builder.set_transformation_options(
        {
            "arn_cl_options.auto_regression_number": [1, AR],
            "arn_cl_options.context_length": [CL],
            "split_model.num_splits": splits,
        }
    )
    if options:
        builder.set_compilation_options(options)
    records: list[StageRecord] = []

    def on_stage(record: StageRecord) -> None:
        records.append(record)
        if not record.reused:
            print(
                f"  {record.operation:<10}{record.subject:<28}{record.seconds:7.1f} s", flush=True
            )

    began = time.monotonic()
    with MemoryMeter() as meter:
        container = builder.build(on_stage)
    seconds = time.monotonic() - began
    binaries = tuple(sorted(container.path.glob("*.bin")))
    return Outcome(seconds, meter.peak_bytes, tuple(records), binaries)


def report(outcome: Outcome) -> None:
    """Seconds of each operation, summed over what ran at once, and of the whole."""
    by_operation: dict[str, float] = defaultdict(float)
    for record in outcome.records:
        by_operation[record.operation] += record.seconds
    for operation, seconds in by_operation.items():
        print(f"  {operation:<38}{seconds:7.1f} s")
    print(f"  {'whole build':<38}{outcome.seconds:7.1f} s")
    print(f"  {'peak memory with children':<38}{outcome.peak_bytes / GIB:7.2f} GiB")
    for path in outcome.binaries:
        print(f"  {path.name:<38}{path.stat().st_size / GIB:7.2f} GiB")


def disk_bytes(folder: Path) -> int:
    """Bytes below a folder, a file with several names counted once."""
    files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def judge(checks: Iterable[tuple[str, bool]]) -> bool:
    """Print what holds and what does not."""
    results = list(checks)
    for text, holds in results:
        print(f"{'ok  ' if holds else 'MISS'} {text}")
    return all(holds for _text, holds in results)


def run(root: Path, args: argparse.Namespace) -> bool:
    """Build three times; whether all limits hold."""
    model = make_model(root / "model", args.layers, args.bits)
    cache = root / "cache"
    print(f"first build, W{args.bits}A16, {args.splits} parts, {args.target}")
    first = build(model, cache, args.target, args.splits, {})
    report(first)
    own = disk_bytes(root) - disk_bytes(model)
    print(f"  {'cache beyond the model':<38}{own / GIB:7.2f} GiB")
    print("nothing changed, in the same process")
    again = build(model, cache, args.target, args.splits, {})
    print(f"  {'whole build':<38}{again.seconds:7.2f} s")
    print(f"changed {', '.join(CHANGED_OPTION)}")
    changed = build(model, cache, args.target, args.splits, CHANGED_OPTION)
    print(f"  {'whole build':<38}{changed.seconds:7.1f} s")
    return judge(
        [
            (f"first build {first.seconds:.0f} s <= {LIMIT_S} s", first.seconds <= LIMIT_S),
            (
                f"peak {first.peak_bytes / GIB:.2f} GiB <= {LIMIT_BYTES / GIB:.0f} GiB",
                first.peak_bytes <= LIMIT_BYTES,
            ),
            (f"again {again.seconds:.2f} s <= {LIMIT_AGAIN_S} s", again.seconds <= LIMIT_AGAIN_S),
            (f"again runs nothing: {again.operations_run}", not again.operations_run),
            (
                f"changed option runs {changed.operations_run}",
                set(changed.operations_run) == {"compile", "package"},
            ),
        ]
    )


def main() -> int:
    """0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_1B["layers"])
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="of weights")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--target", default="SM8750")
    parser.add_argument("--folder", type=Path, help="work here, not in a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave model and cache there")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="qnnfarm-full-build-", dir=args.folder))
    try:
        return 0 if run(root, args) else 1
    finally:
        if args.keep:
            print(f"kept in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
