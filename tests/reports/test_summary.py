"""Which runs are put together, and what the rows say."""

import itertools
import random
import re
from datetime import timedelta

import pytest

from harness.results.identity import Subject, describe_changes
from harness.results.llama_bench import backend
from harness.results.metrics import Measurement, find_metric
from harness.results.perplexity import PERPLEXITY, PERPLEXITY_FLOAT
from harness.results.records import Run
from reports import summary
from reports.document import to_document
from reports.summary import SummaryRow, find_matrices, perplexities, summarise, task_rows
from tests.reports.conftest import (
    START,
    Sample,
    changed,
    composed,
    emulator_runs,
    html_of,
    mixed_runs,
    speeds,
)


def rows(runs: list[Run]) -> tuple[SummaryRow, ...]:
    done = (run for run in runs if run.status == "done")
    return tuple(row for section in composed(done).sections for row in section.rows)


def test_hardware_and_emulator_never_meet() -> None:
    runs = [run for run in mixed_runs() if run.status == "done"]
    sections = composed(runs).sections
    assert [section.emulator for section in sections] == [False, True]
    for section in sections:
        behind = [run for row in section.rows for run in row.runs]
        behind += [run for run in runs for c in section.changes if run.id in c.series.run_ids]
        behind += [run for row in section.perplexities for run in row.runs]
        assert behind
        assert {run.device.emulator for run in behind} == {section.emulator}


def test_the_same_container_on_emulator_and_hardware_gives_two_rows() -> None:
    emulated = emulator_runs()[0]
    real = changed(emulated, id="f" * 32, device__emulator=False)
    assert len(rows([emulated, real])) == 2


@pytest.mark.parametrize(
    "difference",
    [
        {"container__sha256": "0" * 64},
        {"container__target": "SM8750"},
        {"device__soc": "SM8850"},
        {"device__model": "other"},
        {"provenance__host": "a faster host"},
        {"workload__prompt_tokens": 128},
        {"workload__max_new_tokens": 128},
        {"workload__depth_tokens": 128},
        {"labels": {"team": "camera"}},
    ],
    ids=str,
)
def test_what_differs_is_not_averaged(difference: dict[str, object]) -> None:
    run = emulator_runs()[0]
    assert Subject.of(run) == Subject.of(changed(run, id="f" * 32, device__serial="other"))
    assert len(rows([run, changed(run, id="f" * 32, device__serial="other")])) == 1
    assert len(rows([run, changed(run, id="f" * 32, **difference)])) == 2


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"provenance__library_versions": {"genie": "1.22"}}, "genie 1.21 → 1.22"),
        ({"workload__runner": "genie-t2t-run"}, "runner genie_t2t_run.py → genie-t2t-run"),
        ({"workload__sampler": {"greedy": False}}, "greedy True → False, seed 42 → none"),
    ],
    ids=str,
)
def test_a_row_has_the_newest_versions_and_settings_and_says_what_it_leaves_out(
    difference: dict[str, object], words: str
) -> None:
    run = emulator_runs()[0]
    newest = changed(run, id="f" * 32, **difference)
    (row,) = rows([run, changed(run, id="e" * 32), newest])
    assert row.runs == (newest,)
    assert row.remarks[0] == f"The row leaves out 2 runs before: {words}"


def test_phones_of_one_kind_are_averaged() -> None:
    run = emulator_runs()[0]
    changes = {"device__android_version": "16", "provenance__toolchain_versions": {}}
    (row,) = rows([run, changed(run, id="f" * 32, concurrent_sessions=3, **changes)])
    assert len(row.runs) == 2


def test_a_version_that_only_one_run_knows_keeps_perplexity_and_speed_together() -> None:
    bench, perplexity, *_ = emulator_runs()
    known = dict(bench.provenance.library_versions)
    unaware = {name: version for name, version in known.items() if name != "genie"}
    assert len(rows([changed(bench, provenance__library_versions=unaware), perplexity])) == 1
    contrary = {**known, "genie": "1.22"}
    assert len(rows([changed(bench, provenance__library_versions=contrary), perplexity])) == 2


def test_a_row_says_how_many_sessions_ran_at_once() -> None:
    bench = emulator_runs()[0]
    for counts, notes in (([1, 1], ()), ([1, 3, 2], ("1 to 3 sessions at once",))):
        runs = [
            changed(bench, id=f"{number:032x}", concurrent_sessions=count)
            for number, count in enumerate(counts)
        ]
        (row,) = rows(runs)
        assert row.notes == notes


def nights_of(loss: float, *, nights: int = 14, since: int = 11) -> list[Run]:
    """Two sessions each night, which lose a part of their speed from one night on."""
    phone = Sample("SM8750", emulator=False)
    source = random.Random(7)  # noqa: S311
    made = []
    for number in range(2 * nights):
        night = number // 2
        rate = 1700 * (1 - loss * (night >= since)) * source.gauss(1, 0.01)
        values = speeds([rate] * 4, [50 * source.gauss(1, 0.01)] * 4, [0.04] * 4, 1310)
        at = START + timedelta(days=night, minutes=number)
        made.append(phone.run(number, "bench", values, created_at=at))
    return made


def test_a_loss_over_nights_is_not_hidden_in_a_mean() -> None:
    (section,) = composed(nights_of(0.3)).sections
    (row,) = section.rows
    assert len(row.runs) == 6
    assert row.cells["prefill_tokens_per_s"].mean == pytest.approx(1190, rel=0.02)
    assert re.fullmatch(
        r"Prefill: -(29|30)\.\d% since 2026-12-01 \(3 nights\); the row leaves out the "
        r"11 nights before",
        row.remarks[0],
    )
    (steady,) = rows(nights_of(0))
    assert len(steady.runs) == 28
    assert not any("since" in remark for remark in steady.remarks)


def test_labels_name_a_row() -> None:
    bench = changed(emulator_runs()[0], labels={"team": "camera"}, label="a/phones/bench#2")
    (row,) = rows([bench])
    assert row.notes == ("team=camera", "a/phones/bench")


@pytest.mark.parametrize(
    ("prompt", "generated", "label"),
    [(64, 16, "pp64+tg16"), (64, 1, "pp64"), (2, 16, "tg16"), (None, None, "bench")],
)
def test_a_benchmark_is_named_by_what_it_measures(
    prompt: int | None, generated: int | None, label: str
) -> None:
    bench = emulator_runs()[0]
    run = changed(bench, workload__prompt_tokens=prompt, workload__max_new_tokens=generated)
    (row,) = rows([run])
    assert row.label == label
    assert ("prefill_tokens_per_s" in row.cells) is (prompt != 2)


def test_rows_are_a_matrix_of_each_metric() -> None:
    """Two phones by two models, at two depths; one phone has run one of the models at one depth."""
    made = [
        changed(
            Sample(soc, emulator=False, model=model).run(
                n, "bench", speeds([r] * 4, [r] * 4, [1 / r] * 4, 900 + n)
            ),
            workload__depth_tokens=depth,
        )
        for n, (soc, model, depth, r) in enumerate(
            (
                ("SM8650", "Llama", 0, 30.0), ("SM8650", "Llama", 512, 15.0),
                ("SM8750", "Llama", 0, 60.0), ("SM8750", "Llama", 512, 45.0),
                ("SM8750", "Qwen", 0, 20.0),
            )
        )
    ]  # fmt: skip
    found = {matrix.metric.key: matrix for matrix in find_matrices(rows(made))}
    assert set(found) == {
        "decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s", "peak_rss_bytes"
    }  # fmt: skip
    decode, latency = found["decode_tokens_per_s"], found["ttft_s"]
    assert decode.test == "pp64+tg16"
    assert decode.columns == tuple(itertools.product(("SM8650", "SM8750"), ("d0", "d512")))
    assert [name for (name, _), _ in decode.lines] == ["Llama W8A16", "Qwen W8A16"]
    (_, llama), (_, qwen) = decode.lines
    assert [cell and cell.part for cell in llama] == [0.5, 0.25, 1.0, 0.75]
    assert [cell and cell.part for cell in qwen] == [None, None, 1.0, None]
    assert [cell and cell.part for cell in latency.lines[0][1]] == [0.5, 0.25, 1.0, 0.75]
    assert find_matrices(rows(made[:4])) == (), "one model needs none"


def test_more_rows_than_twelve_are_folded_below_their_matrix() -> None:
    made = [
        Sample(f"SM{8650 + soc}", emulator=False, model=model).run(
            10 * soc + n, "bench", speeds([9.0 + soc] * 4, [9.0 + soc] * 4, [1.0] * 4, 900)
        )
        for n, model in enumerate(("Llama", "Qwen", "Phi"))
        for soc in range(5)
    ]
    folded = '<details class="quiet"><summary>{} rows with all metrics and remarks</summary>'
    many = html_of(made)
    assert folded.format(15) in many
    assert '<td class="number" data-label="SM8654" style="--part:100%">' in many
    assert "<summary>Decode, tokens/s, pp64+tg16</summary>" in many, "a test of all stands once"
    few = html_of([run for run in made if int(run.device.soc[2:]) < 8654])
    assert '<details class="quiet" open><summary>12 rows' in few


def test_many_tests_are_rows_of_a_matrix() -> None:
    made = [
        changed(
            Sample(soc, emulator=False, model="Llama").run(
                n, "bench", speeds([9.0] * 4, [9.0] * 4, [1.0] * 4, 900)
            ),
            workload__depth_tokens=64 * depth,
        )
        for n, (soc, depth) in enumerate(itertools.product(("SM8650", "SM8750"), range(7)))
    ]
    decode = next(iter(find_matrices(rows(made))))
    assert decode.columns == (("SM8650", ""), ("SM8750", ""))
    assert len(decode.lines) == 7
    depths = ("", *(f" @ d{64 * depth}" for depth in range(1, 7)))
    assert [name for name, _ in decode.lines] == [("Llama W8A16", f"pp64+tg16{d}") for d in depths]
    assert all(None not in cells for _, cells in decode.lines)


def test_warmups_are_in_no_mean() -> None:
    (row, *_) = rows([emulator_runs()[0]])
    cell = row.cells["decode_tokens_per_s"]
    assert cell.n == 3
    assert cell.mean == pytest.approx((17.21 + 17.35 + 17.11) / 3)
    assert cell.show(find_metric("decode_tokens_per_s")) == "17.22 ± 0.12"


def test_sessions_are_counted() -> None:
    found = {row.subject.target: row for row in rows(mixed_runs())}
    assert found["SM8750"].n == 6
    assert len(found["SM8750"].runs) == 2
    assert found["SM8750"].cells["decode_tokens_per_s"].sessions == 2


def test_speeds_of_texts_stand_in_only_where_there_is_no_benchmark() -> None:
    bench, _, generate, *_ = emulator_runs()
    assert [row.label for row in rows([bench, generate])] == ["pp64+tg16"]
    (row,) = rows([generate])
    assert row.label == "generate tg40"
    assert any("one repetition only" in remark for remark in row.remarks)
    assert "No warm-up" in row.remarks


def test_perplexity_joins_its_container() -> None:
    (row, *_) = [r for r in rows(emulator_runs()) if r.subject.soc == "SM8750"]
    device, in_float = row.show(PERPLEXITY), row.show(PERPLEXITY_FLOAT)
    assert device
    assert in_float
    assert (str(device), device.note) == ("25.565", "8 windows, 1,280 tokens")
    assert (str(in_float), in_float.note) == ("25.480", "device +0.33%")
    assert row.remarks == ()


def test_a_quick_perplexity_does_not_replace_a_thorough_one() -> None:
    bench, thorough = emulator_runs()[:2]
    definition = thorough.workload.perplexity
    assert definition is not None
    few = definition.model_copy(update={"windows": 2, "tokens": 320})
    only_device = tuple(m for m in thorough.measurements if m.metric == PERPLEXITY)
    at = thorough.created_at + timedelta(days=1)
    quick = changed(thorough, id="f" * 32, workload__perplexity=few, measurements=only_device)
    quick = changed(quick, created_at=at)
    for runs in ([bench, thorough, quick], [thorough, quick]):
        (row,) = rows(runs)
        assert row.scored is not None
        assert row.scored.scored == definition
        assert PERPLEXITY_FLOAT in row.cells
        told = "Perplexity is that over 8 windows, 1,280 tokens; a later one over 2 windows, 320 "
        assert f"{told}tokens is 25.565" in row.remarks
    assert row.name == "tiny_llama W8A16"


def test_a_perplexity_alone_has_a_row_too() -> None:
    (row,) = rows([emulator_runs()[1]])
    assert (row.label, row.n) == ("", 0)
    assert PERPLEXITY in row.cells


def test_perplexities_over_other_positions_stay_apart() -> None:
    run = emulator_runs()[1]
    definition = run.workload.perplexity
    assert definition is not None
    other = changed(
        run, id="f" * 32, workload__perplexity=definition.model_copy(update={"positions": "all"})
    )
    assert len(perplexities([run, other])) == 2
    assert len(perplexities([run, changed(run, id="f" * 32)])) == 1


def test_a_perplexity_far_from_its_reference_is_remarked() -> None:
    found = {row.subject.target: row for row in rows(mixed_runs())}
    assert any("+3.9% from the same model in float" in r for r in found["SM8750"].remarks)
    shaky = found["SM8650"].remarks
    assert "Decode: the standard deviation is 37% of the mean" in shaky
    assert any("the output was compared neither" in remark for remark in shaky)


def test_missing_repetitions_and_other_prompts_are_remarked() -> None:
    run = changed(emulator_runs()[0], workload__repetitions=5, workload__prompt_tokens=60)
    (row,) = summarise([run])
    assert "1 of 1 runs gave fewer repetitions than requested" in row.remarks
    assert "The prompt had 64 tokens, but 60 were requested" in row.remarks


def test_thousands_of_containers_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nightly build has a container of its own; each has to look at its own perplexity only."""
    bench, scored = emulator_runs()[:2]
    nights = [
        changed(run, id=f"{night:031x}{number}", container__sha256=f"{night:064x}")
        for night in range(50)
        for number, run in enumerate((bench, scored))
    ]
    looks = 0

    def counted(*sides: object, **options: object) -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        return describe_changes(*sides, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(summary, "describe_changes", counted)
    found = rows(nights)
    assert len(found) == 50
    assert all(PERPLEXITY in row.cells for row in found)
    assert looks <= 3 * len(nights)


def test_what_keeps_rows_apart_is_said_of_all_that_look_alike() -> None:
    bench = emulator_runs()[0]
    alike = [
        bench,
        changed(bench, id="1" * 32, provenance__host="another"),
        changed(bench, id="2" * 32, device__model="another"),
    ]
    words = {next(r for r in row.remarks if r.startswith("Separate from")) for row in rows(alike)}
    assert words == {"Separate from a similar row because of: host, device"}


def test_each_runtime_has_a_row_that_names_it() -> None:
    genie = emulator_runs()[0]
    sampler = {**genie.workload.sampler, "runtime": "graph"}
    graph = changed(genie, id="1" * 32, workload__sampler=sampler)
    found = {row.subject.runtime: row for row in rows([genie, graph])}
    assert found.keys() == {"genie", "graph"}
    assert ("graph" in found["graph"].notes, "graph" in found["genie"].notes) == (True, False)
    assert not any(r.startswith("Separate from") for row in found.values() for r in row.remarks)
    assert backend(graph) == f"{backend(genie)} graph"


def test_a_task_has_a_row_of_its_own_and_none_among_speeds() -> None:
    values = {"accuracy": 0.75, "accuracy_error": 0.05, "choice_agreement": 1.0}
    run = changed(
        emulator_runs()[0],
        id="e" * 32,
        kind="evaluate",
        workload__prompt="kjv_cloze",
        workload__dataset_sha256="a" * 64,
        measurements=tuple(Measurement(metric=key, value=value) for key, value in values.items()),
    )
    later = changed(run, id="f" * 32, workload__sampler={**run.workload.sampler, "rows": 9})
    page = composed([run])
    (section,) = page.sections
    assert section.rows == ()
    (row,) = section.tasks
    assert (row.label, str(row.show("accuracy"))) == ("kjv_cloze", "75.0 ± 5.0")
    assert row.show("prompts_strict") is None
    assert [metric.key for metric in section.task_columns] == ["accuracy", "choice_agreement"]
    assert to_document(page, "report.html")["tasks"]
    (newest,) = task_rows([run, later])
    assert [each.id for each in newest.runs] == [later.id]
    assert newest.remarks


def test_several_runtimes_stand_together_by_workload_under_their_names() -> None:
    """What llama-bench reports comes after its own warm-up."""
    sample, runs = Sample("SM8750", emulator=False), []
    measured = speeds([500.0] * 3, [30.0] * 3, [0.2] * 3, 180)
    for number, (prompt, runtime) in enumerate(
        [(64, "genie"), (512, "genie"), (64, "llama.cpp"), (512, "llama.cpp"), (64, "graph")]
    ):
        run = sample.run(number, "bench", measured)
        setting = {} if runtime == "genie" else {"runtime": runtime}
        runner = "llama-bench" if runtime == "llama.cpp" else "genie-t2t-run"
        run = changed(run, workload__sampler=setting, workload__prompt_tokens=prompt)
        runs.append(changed(run, workload__runner=runner, workload__warmup=0))
    found = rows(runs)
    assert [(row.label, row.notes[0]) for row in found] == [
        ("pp512+tg16", "genie"), ("pp512+tg16", "llama.cpp"),
        ("pp64+tg16", "genie"), ("pp64+tg16", "graph"), ("pp64+tg16", "llama.cpp"),
    ]  # fmt: skip
    unwarmed = {row.notes[0] for row in found if "No warm-up" in row.remarks}
    assert unwarmed == {"genie", "graph"}
    (alone, _) = rows(runs[:2])
    assert "genie" not in alone.notes


def test_a_decode_rate_of_hardware_has_its_share_of_the_memory_bandwidth() -> None:
    """Of a SM8750: 848 MB read 20 times a second are 16.96 of 84.8 GB/s."""
    values = {"decode_tokens_per_s": [40.0] * 2, "token_acceptance_rate": [2.0] * 2}

    def share(soc: str, size: int | None = 848_000_000, *, emulator: bool = False) -> float | None:
        run = Sample(soc, emulator=emulator).run(1, "bench", values)
        container = run.container.model_copy(update={"size_bytes": size})
        (row,) = summarise([run.model_copy(update={"container": container})])
        return row.bandwidth_share

    assert share("SM8750") == pytest.approx(0.2)
    assert share("SM8750", emulator=True) is None
    assert share("SM8750", None) is None
    assert share("SM7777") is None  # no public figure of its memory
