"""Files of other tools, in the formats that these document, become runs or are refused by line.

The sources of the formats stand in `harness/importing`.
"""

import json
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.cli.results import app
from harness.errors import HarnessError, HostFileError
from harness.importing.importer import Imported, ImportFacts, read_runs, store_runs, tools
from harness.results import frames
from harness.results.alerts import review_new
from harness.results.gate import judge_gate
from harness.results.history import read_series
from harness.results.records import Run
from harness.results.store import ResultsStore
from harness.results.verdicts import Verdict
from tests.system import needs

LATER = datetime(2026, 11, 20, tzinfo=UTC)
FILES = Path(__file__).parents[1] / "fixtures" / "imports"


OTHERS = pytest.mark.needs("plugins.other_runtimes")


def need_reader_of(name: str) -> None:
    """Skip where the reader of a file is of a plugin that is not here."""
    if not name.startswith("genie-"):
        needs("plugins.mllm" if name.startswith("mllm") else "plugins.other_runtimes")


def read(name: str, facts: ImportFacts | None = None) -> Imported:
    need_reader_of(name)
    return read_runs(FILES / name, facts)


def import_file(store: ResultsStore, path: Path, facts: ImportFacts | None = None) -> Imported:
    return store_runs(store, read_runs(path, facts))


@pytest.mark.parametrize("name", ["llama-bench.json", "llama-bench.jsonl"])
def test_llama_bench(name: str) -> None:
    found = read(name, ImportFacts(soc="SM8750"))
    assert found.tool == "llama-bench"
    prefill, decode = found.runs[:2]
    assert prefill.values("prefill_tokens_per_s") == (6863.1, 7147.55, 7136.37, 7115.79, 7237.21)
    assert decode.values("decode_tokens_per_s")[1] == 120.178
    assert (prefill.workload.prompt_tokens, prefill.workload.max_new_tokens) == (512, None)
    assert (decode.workload.prompt_tokens, decode.workload.max_new_tokens) == (None, 128)
    assert prefill.container.model == "Qwen2.5-7B-Instruct-Q4_K_M"
    assert prefill.container.size_bytes == 4677120000
    assert prefill.container.parameters == 7615616512
    assert prefill.created_at.isoformat() == "2025-04-24T11:58:50+00:00"
    assert prefill.provenance.toolchain_versions == {"llama.cpp": "8cf427ff (5163)"}
    assert prefill.workload.sampler["n_threads"] == 8
    assert prefill.device.soc == "SM8750"
    assert prefill.device.model is not None
    assert prefill.device.model.endswith("RTX 4080 (CUDA)")  # what computed is the device


@pytest.mark.parametrize(
    ("name", "speeds"),
    [
        ("llama-bench.csv", (7766.420235, 1861.346050, 2104.228072, 2470.742511)),
        ("llama-bench.sql", (19124.711548, 6581.677323, 6757.750114, 12994.295442)),
        ("llama-bench.md", (8422.77, 5988.04, 3509.66, 7594.46)),
    ],
)
def test_means_of_llama_bench(name: str, speeds: tuple[float, ...]) -> None:
    """The files are what Debian's llama-bench printed with `-p 16 -n 8 -pg 16,8 -d 0,8`."""
    found = read(name, ImportFacts(created_at=LATER))
    metrics = ("prefill_tokens_per_s", "decode_tokens_per_s", "total_tokens_per_s")
    cells = [
        (run.workload.prompt_tokens, run.workload.max_new_tokens, run.workload.depth_tokens)
        for run in found.runs
    ]
    tests = [(16, None), (None, 8), (16, 8)]
    assert cells == [(*test, depth) for depth in (None, 8) for test in tests]
    measured = [run.values(metrics[number % 3])[0] for number, run in enumerate(found.runs)]
    assert measured[:4] == pytest.approx(speeds, abs=1e-6)
    run = found.runs[0]
    assert run.provenance.toolchain_versions == {"llama.cpp": "Debian (11669)"}
    size, weights = run.container.size_bytes or 0, run.container.parameters or 0
    assert (size, weights) == pytest.approx((951552, 237888), rel=0.02)
    assert run.device.model == ("CPU" if name.endswith("md") else "AMD EPYC (CPU)")


ENCODINGS = {"UTF-8 with a mark": "utf-8-sig", "PowerShell": "utf-16"}


@OTHERS
@pytest.mark.parametrize("name", ["llama-bench.json", "llama-bench.jsonl", "llama-bench.csv"])
@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_noise_around_rows_and_byte_order_marks(tmp_path: Path, name: str, encoding: str) -> None:
    noise = "[INFO] ggml_cuda_init: found 1 CUDA devices:\n  Device 0: RTX, compute 8.9, VMM: yes\n"
    text = (FILES / name).read_text(encoding="utf-8")
    noisy = text.replace("  },\n", "  }load: done\n,\n").replace("\n{", f"\n{noise}{{")
    path = tmp_path / name
    path.write_text(f"{noise}{noisy}{noise}", encoding=encoding)
    assert measured_of(read_runs(path).runs) == measured_of(read(name).runs)


def measured_of(runs: Iterable[Run]) -> list[object]:
    return [(run.workload, run.origin and run.origin.sha256, run.measurements) for run in runs]


@OTHERS
def test_settings_that_one_night_sweeps_are_labels(tmp_path: Path) -> None:
    """A night later another setting is a fact of that night: its series goes on."""
    lines = (FILES / "llama-bench.jsonl").read_text(encoding="utf-8").splitlines()
    night = "2025-04-24T11:58:50Z"
    rows = [
        lines[0].replace('"n_threads": 8', f'"n_threads": {threads}').replace(night, when)
        for threads, when in ((8, night), (4, "2025-04-24T12:10:00Z"), (2, "2025-04-25T12:00:00Z"))
    ]
    path = tmp_path / "sweep.jsonl"
    path.write_text("\n".join([*rows, lines[1]]))
    labels = [dict(run.labels) for run in read_runs(path).runs]
    assert labels == [{"n_threads": "8"}, {"n_threads": "4"}, {}, {}]


def test_llama_bench_of_both_phases_behind_a_depth() -> None:
    both = read("llama-bench.jsonl").runs[2]
    assert both.values("total_tokens_per_s") == (500.0, 501.0)
    work = both.workload
    assert (work.prompt_tokens, work.max_new_tokens, work.depth_tokens) == (512, 128, 512)


def test_each_query_of_a_genie_profile_has_its_own_time() -> None:
    """A phone's clock counts from its start: the last query ended when the file was written."""
    first, second = read("genie-queries.json", ImportFacts(created_at=LATER)).runs
    assert first.values("init_s") == pytest.approx((1.124713,))
    assert second.values("init_s") == ()
    assert (LATER - first.created_at).total_seconds() == pytest.approx(60)
    assert (LATER - second.created_at).total_seconds() == pytest.approx(2)


Expected = tuple[dict[str, tuple[float, ...]], dict[str, object]]
FORMATS: dict[str, list[Expected]] = {
    "genie-profile.json": [
        (
            {"prefill_tokens_per_s": (1280.5,), "ttft_s": (0.0512,), "init_s": (1.22,)},
            {"container.model": "genie-profile", "workload.runner": "genie-t2t-run"},
        )
    ],
    "genie-queries.json": [
        ({"decode_tokens_per_s": (38.52,)}, {"workload.prompt_tokens": 823}),
        ({"decode_tokens_per_s": (17.5,)}, {"workload.prompt_tokens": 64}),
    ],
    "geniex-bench.json": [
        (
            {
                "ttft_s": (0.049758, 0.0474, 0.0521),
                "prefill_tokens_per_s": (102.1, 110.3, 98.0),
                "decode_tokens_per_s": (60.9, 62.5, 58.1),
            },
            {
                "workload.prompt_tokens": 42, "workload.max_new_tokens": 128,
                "container.model": "Qwen_Qwen3-0.6B-Q4_0", "device.model": "npu (llama_cpp)",
                "labels": {"cell": "Qwen3-0.6B-llama_cpp-npu"},
            },
        )
    ],
    "executorch-app.json": [
        (
            {"inference_s": (0.00125,), "init_s": (0.0335,)},
            {
                "container.model": "mv2", "container.precision": "q8",
                "device.model": "samsung SM-S921B, Android 14, qnn",
            },
        ),
        ({"decode_tokens_per_s": (38.5,), "elapsed_s": (4.0005,)}, {}),
    ],
    "executorch-database.json": [
        (
            {"inference_s": (0.00125, 0.0015), "init_s": (0.0335,)},
            {
                "created_at": datetime(2025, 7, 20, 8, 26, 40, tzinfo=UTC),
                "provenance.toolchain_versions": {"executorch": "abc123"},
                "device.model": "samsung_galaxy_s24, Android 14, qnn_q8",
            },
        ),
        ({"inference_s": (0.009,)}, {}),
    ],
    "ai-hub-profile.json": [
        (
            {
                "inference_s": (0.003652, 0.0037, 0.0041), "first_load_s": (1.374293,),
                "init_s": (0.277823,), "inference_peak_bytes": (39406752.0,),
            },
            {"workload.sampler": {"layers on CPU": 1, "layers on NPU": 1}},
        )
    ],
    # The rates are those that the log itself prints further down.
    "qnn-llama-runner.log": [
        (
            {
                "prefill_tokens_per_s": (553.571429,), "decode_tokens_per_s": (53.993251,),
                "init_s": (0.887,), "ttft_s": (0.056,),
            },
            {
                "container.model": "hybrid_llama_qnn", "workload.runner": "qnn_llama_runner",
                "workload.prompt_tokens": 31,
                "created_at": datetime(2025, 1, 7, 6, 21, 56, 307000, tzinfo=UTC),
            },
        )
    ],
    "etdump.txt": [({"inference_s": (0.0011259,), "init_s": (3.8477e-5,)}, {})],
    "etdump-box.txt": [({"inference_s": (0.00465,), "init_s": (0.0874802,)}, {})],
    "etdump.tsv": [({"inference_s": (9.88706e-05,), "init_s": (2.2762e-05,)}, {})],
    "qnn-executor-runner.log": [({"inference_s": (0.00365,), "init_s": ()}, {})],
    "mllm-llm-benchmark.log": [
        (
            {
                "prefill_tokens_per_s": (141.84618, 140.3595, 138.54239),
                "decode_tokens_per_s": (78.11022, 77.60929, 76.48289),
            },
            {
                "workload.prompt_tokens": 128, "workload.max_new_tokens": 64,
                "container.model": "qwen3-w4a32-kai",
                "provenance.toolchain_versions": {"mllm": "abc123def456"},
            },
        ),
        ({"ttft_s": (1.8005,)}, {"workload.prompt_tokens": 256}),
    ],
    "mllm-summary.log": [
        (
            {
                "prefill_tokens_per_s": (640.0,), "decode_tokens_per_s": (15.5,),
                "ttft_s": (0.101,),
            },
            {"workload.prompt_tokens": 64},
        )
    ],
    "mllm-npu-demo.log": [({"prefill_tokens_per_s": (102.256,)}, {})],
    "mllm-benchmark.csv": [
        (
            {
                "ttft_s": (0.44,), "prefill_tokens_per_s": (20.0,), "decode_tokens_per_s": (5.0,),
            },
            {
                "workload.prompt_tokens": 8, "workload.max_new_tokens": 4,
                "container.model": "qwen3", "workload.sampler": {"cache_length": 2048},
            },
        ),
        ({"prefill_tokens_per_s": (40.0,), "decode_tokens_per_s": ()}, {}),
    ],
    # A run of a 0.5B by Debian's 0.7.0 that was asked for one token, and one without warm-up.
    "llama-completion.log": [
        (
            {
                "init_s": (5.99028,), "ttft_s": (2.25163,), "prefill_tokens_per_s": (1.776491,),
                "decode_tokens_per_s": (), "generated_tokens": (1.0,),
            },
            {
                "workload.prompt_tokens": 4, "container.model": "Tiny-Q4_0",
                "container.precision": "Q4_0", "device.model": "Hexagon, HTP0",
                "provenance.toolchain_versions": {"llama.cpp": "52392291b (7404)"},
            },
        ),
        (
            {"init_s": (), "decode_tokens_per_s": (1672.727273,), "generated_tokens": (24.0,)},
            {"workload.prompt_tokens": 7},
        ),
    ],
    "llama-server.log": [
        (
            {"prefill_tokens_per_s": (100.0,), "decode_tokens_per_s": (25.0,)},
            {"workload.prompt_tokens": 20, "workload.max_new_tokens": 50},
        ),
        ({"prefill_tokens_per_s": (1024.0,)}, {"workload.max_new_tokens": 128}),
        ({"prefill_tokens_per_s": (30.5,), "decode_tokens_per_s": (7.5,)}, {}),
    ],
    # The first tells of no answer and no load in JSON, and of both in print.
    "executorch-printed.log": [
        (
            {
                "init_s": (2.968,), "decode_tokens_per_s": (10.0,), "ttft_s": (0.175,),
                "prefill_tokens_per_s": (131.428571,), "generated_tokens": (100.0,),
            },
            {
                "container.model": "hybrid_llama_qnn", "workload.prompt_tokens": 23,
                "created_at": datetime(2026, 5, 8, 16, 11, 59, 7000, tzinfo=UTC),
            },
        ),
        (
            {"decode_tokens_per_s": (6.352941, 6.0), "prefill_tokens_per_s": (64.0,)},
            {"container.model": "other"},
        ),
    ],
    "perf.yaml": [
        (
            {"decode_tokens_per_s": (23.5,), "ttft_s": (0.088,), "prefill_tokens_per_s": ()},
            {
                "container.model": "Tiny-3B", "container.precision": "w4a16",
                "device.serial": "Snapdragon 8 Elite QRD", "workload.runner": "genie",
                "labels": {"context_length": "4096"},
            },
        ),
        (
            {"decode_tokens_per_s": (27.25,), "prefill_tokens_per_s": (1600.0,)},
            {"labels": {"context_length": "512"}},
        ),
        ({"decode_tokens_per_s": (3.5,), "ttft_s": (0.373,)}, {"labels": {}}),
        (
            {"inference_s": (0.00125,), "inference_peak_bytes": (3 * 2.0**20,)},
            {
                "container.model": "Tiny-Encoder", "workload.runner": "qnn_dlc",
                "workload.sampler": {"compute_unit": "NPU", "layers on NPU": 103},
                "provenance.toolchain_versions": {"qairt": "2.43.0.260127150333_193827"},
            },
        ),
    ],
    "perf-2024.yaml": [
        (
            {"decode_tokens_per_s": (23.5,), "ttft_s": (0.088,)},
            {
                "created_at": datetime(2024, 10, 16, 0, 32, 42, 210701, tzinfo=UTC),
                "device.model": "Snapdragon 8 Elite QRD, Snapdragon® 8 Elite",
            },
        ),
        (
            {"inference_s": (0.088438,), "inference_peak_bytes": (4468197056.0,)},
            {"container.precision": "uint16"},
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_other_tools(name: str) -> None:
    runs = read(name).runs
    for run, (metrics, facts) in zip(runs, FORMATS[name], strict=True):
        for key, values in metrics.items():
            assert run.values(key) == pytest.approx(values), key
        assert {path: attrgetter(path)(run) for path in facts} == facts


def test_facts_of_the_user_come_before_those_of_the_file() -> None:
    (run,) = read("genie-profile.json", ImportFacts("llama", "W4A16", "phone-3")).runs
    assert (run.container.model, run.container.precision) == ("llama", "W4A16")
    assert run.device.serial == "phone-3"


def damaged(tmp_path: Path, name: str, old: str, new: str) -> Path:
    need_reader_of(name)
    text = (FILES / name).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("llama-bench.jsonl", "119.03", '"fast"', r"line 2: 'fast' is not a number"),
        ("llama-bench.jsonl", '"n_gen": 0, ', "", r"line 1: it lacks 'n_gen'"),
        ("llama-bench.jsonl", "[500.0, 501.0]", "[-1.0]", r"line 3: total_tokens_per_s cannot"),
        ("llama-bench.json", "\n]", "", r"line \d+: the array does not end"),
        ("llama-bench.json", "[\n  {", "[\n  (", r"line 3: it is no JSON"),
        ("llama-bench.csv", "AMD EPYC", "x\ry" * 50_000, r"line 2: it is no CSV: field larger"),
        ("llama-bench.csv", '"16","0","0",', '"16","0",', r"line 2: it has 41 values for 42 names"),
        ("llama-bench.sql", "'2048', '512'", "'2048'", r"line 46: it has 41 values for 42 names"),
        ("llama-bench.md", "pp16 ", "xy16 ", r"line 3: test 'xy16' is no pp, tg or both"),
        ("genie-queries.json", "num-generated-tokens", "x", r"line 1: a query lacks generated"),
        (
            "executorch-app.json",
            '"load_status","actualValue":0.0',
            '"load_status","actualValue":32',
            r"line 1: the job failed",
        ),
        (
            "executorch-database.json",
            '"model_load',
            '"FAILURE_REPORT", "x": "',
            r"line \d+: the job",
        ),
        ("genie-profile.json", '"toks/sec"', '"furlongs"', r"line 1: unreadable Genie profile"),
        ("qnn-llama-runner.log", '"first_token_ms":', '"x":', r"line 6: the report lacks 'first"),
        ("qnn-llama-runner.log", "1000}", "1000", r"line 6: the report cannot be read"),
        ("etdump.txt", "1.125900", "fast", r"line 6: 'fast' is no average time"),
        ("etdump.txt", "avg (ms)", "avg (cycles)", r"line 2: the table has no column avg"),
        ("mllm-llm-benchmark.log", "77.60929", "fast", r"line 33: Decode Speed is 'fast tokens"),
        ("mllm-benchmark.csv", "440,20,5,400", "147,6.7,1.7,1200", r"line 2: the first .* twice"),
        ("perf.yaml", "    components:", "    models:", r"line 1: its models are not as AI Hub"),
        ("perf.yaml", "  - context", "  \t- context", r"line 14: not valid YAML"),
    ],
)
def test_unreadable_files_are_refused_by_line(
    tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    with pytest.raises(HostFileError, match=said) as caught:
        read_runs(damaged(tmp_path, name, old, new))
    assert "\n" not in str(caught.value)


def test_the_rest_can_be_imported_without_it(tmp_path: Path) -> None:
    path = damaged(tmp_path, "llama-bench.jsonl", "119.03", '"fast"')
    found = read_runs(path, skip=True)
    assert (len(found.runs), found.refused) == (2, ((2, "'fast' is not a number"),))
    path.write_text('{"samples_ts": []}\n')
    with pytest.raises(HostFileError, match="line 1"):
        read_runs(path, skip=True)


@OTHERS
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("| model | t/s |\n", "it has no results that llama-bench writes"),
        ("....ED00", "it is an ETDump itself: import what"),
        ("hello", "no known tool writes this: --tool is one of genie, ai-hub"),
        ('[{"samples_ts": 1},', "line 1: it lacks"),
        ('{"components": [' + "[" * 100_000, "line 1"),
        ("event_block_name\n", "it has no results that etdump writes"),
    ],
)
def test_files_of_no_known_tool_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(HostFileError, match=said):
        read_runs(path)


@pytest.mark.parametrize(
    ("name", "old", "new", "metric"),
    [
        ("ai-hub-profile.json", '"warm_load_time": 277823', '"warm_load_time": 0', "init_s"),
        ("genie-profile.json", "1280.5", "0", "prefill_tokens_per_s"),
        ("llama-bench.jsonl", "[500.0, 501.0]", "[0, 0, 501.0]", "total_tokens_per_s"),
        ("mllm-llm-benchmark.log", "77.60929", "-nan", "decode_tokens_per_s"),
    ],
)
def test_what_took_no_time_was_not_measured(
    tmp_path: Path, name: str, old: str, new: str, metric: str
) -> None:
    """A load that a tool skipped, or an answer without tokens, does not refuse a night's log."""

    def measured(runs: Iterable[Run]) -> list[float]:
        return [value for run in runs for value in run.values(metric)]

    before, after = (
        measured(read(name).runs),
        measured(read_runs(damaged(tmp_path, name, old, new)).runs),
    )
    assert 0 < len(before) - len(after) <= 1
    assert all(after)


def test_a_file_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostFileError, match="none"):
        read_runs(tmp_path / "none")


@given(tool=st.sampled_from(tools()), rng=st.randoms(use_true_random=False))
def test_any_damage_is_survived(
    tmp_path_factory: pytest.TempPathFactory, tool: str, rng: random.Random
) -> None:
    text = bytearray(rng.choice(sorted(FILES.iterdir())).read_bytes())
    for _ in range(8):
        place = rng.randrange(len(text))
        text[place : place + rng.randrange(6)] = bytes([rng.randrange(256)])
    path = tmp_path_factory.mktemp("damaged") / "file"
    path.write_bytes(bytes(text))
    for chosen in (None, tool):
        try:
            assert read_runs(path, tool=chosen).runs
        except HarnessError as error:
            assert "\n" not in str(error)  # noqa: PT017


@OTHERS
def test_a_file_is_imported_once_and_kept(tmp_path: Path) -> None:
    with ResultsStore.open(tmp_path / "results.db") as store:
        first = import_file(store, FILES / "llama-bench.json", ImportFacts(labels={"phone": "x"}))
        again = import_file(store, FILES / "llama-bench.json")
        assert (len(first.runs), again.runs, again.known) == (2, (), 2)
        assert store.list_runs() == tuple(sorted(first.runs, key=lambda run: run.created_at))
        (kept,) = store.artifacts(first.runs[0].id)
        assert store.read_artifact(kept) == (FILES / "llama-bench.json").read_bytes()
    rows = frames(tmp_path / "results.db").repetitions
    assert set(rows["origin_tool"]) == {"llama-bench"}
    assert set(rows["origin_file"]) == {"llama-bench.json"}
    assert set(rows["labels.phone"]) == {"x"}


@pytest.mark.parametrize(
    ("name", "cut", "runs"),
    [("llama-bench.jsonl", 1, 3), ("llama-bench.csv", 3, 6), ("mllm-llm-benchmark.log", 38, 2)],
)
def test_of_a_file_that_grew_only_the_new_rows(
    tmp_path: Path, name: str, cut: int, runs: int
) -> None:
    """`llama-bench -o jsonl >> file`, imported each night."""
    need_reader_of(name)
    lines = (FILES / name).read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / name
    with ResultsStore.open(tmp_path / "results.db") as store:
        path.write_text("".join(lines[:cut]))
        before = import_file(store, path)
        path.write_text("".join(lines))
        after = import_file(store, path)
        assert after.known == len(before.runs) > 0
        assert len(before.runs) + len(after.runs) == runs == len(store.list_runs())
        (kept,) = store.artifacts(after.runs[0].id)
        grown = "".join(lines[after.lines[after.known] - 1 :])
        assert store.read_artifact(kept).decode() == grown


@OTHERS
def test_equal_figures_of_two_nights_are_two_runs(tmp_path: Path) -> None:
    """A table has no time: its second night may have the figures of the first."""
    text, path = (FILES / "llama-bench.md").read_text(encoding="utf-8"), tmp_path / "nights.md"
    with ResultsStore.open(tmp_path / "results.db") as store:
        for nights in (1, 2):
            path.write_text(text * nights)
            assert len(import_file(store, path).runs) == 6
        path.write_text(text)
        date = ImportFacts(created_at=LATER)
        assert [len(import_file(store, path, facts).runs) for facts in (None, date)] == [0, 6]


@pytest.mark.needs("plugins.mllm", "plugins.other_runtimes")
def test_the_command(tmp_path: Path) -> None:
    db = str(tmp_path / "results.db")
    files = [str(FILES / "llama-bench.json"), str(FILES / "mllm-summary.log")]
    arguments = ["import", *files, "--db", db, "--soc", "SM8750", "--label", "team=camera"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert f"2 runs with 10 measurements of llama-bench in {db}" in shown.output
    again = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert [each["runs"] for each in json.loads(again.stdout)["files"]] == [[], []]
    runs = frames(db).runs
    assert set(runs["soc"]) == {"SM8750"}


def test_one_bad_file_makes_no_database(tmp_path: Path) -> None:
    bad = damaged(tmp_path, "llama-bench.json", "[\n  {", "[\n  (")
    db = tmp_path / "results.db"
    with pytest.raises(HostFileError, match="line 3"):
        CliRunner().invoke(
            app,
            ["import", str(FILES / "etdump.txt"), str(bad), "--db", str(db)],
            catch_exceptions=False,
        )
    assert not db.exists()


@OTHERS
def test_layers_that_fall_to_the_cpu_are_a_loss_and_its_cause(tmp_path: Path) -> None:
    """A setting that changes with the speed does not end the history."""
    profile = json.loads((FILES / "ai-hub-profile.json").read_text())
    noise = random.Random(3)  # noqa: S311
    with ResultsStore.open(tmp_path / "results.db") as store:
        for number in range(16):
            slow = number >= 12
            summary = profile["execution_summary"]
            summary["all_inference_times"] = [3600 * (2 if slow else 1) * noise.gauss(1, 0.01)]
            units = ["NPU"] * (5 - 3 * slow) + ["CPU"] * (3 * slow)
            profile["execution_detail"] = [{"compute_unit": unit} for unit in units]
            path = tmp_path / f"{number}.json"
            path.write_text(json.dumps(profile))
            facts = ImportFacts(model="m", created_at=datetime(2026, 11, 1 + number, tzinfo=UTC))
            import_file(store, path, facts)
        _, series, _ = read_series(store)
        (alert,) = review_new(store)
        (cell,) = judge_gate(store, "2026-11-12", alerts=[alert]).cells
    (change,) = series.changes
    assert (alert.series, cell.verdict, cell.alerts) == (series.id, Verdict.REGRESSED, (alert,))
    assert (change.night, change.is_loss) == (12, True)
    assert series.differences(change) == ("layers on CPU none → 3", "layers on NPU 5 → 2")
