"""The suites as users run them: `pytest --pyargs suites`, on a real virtual device."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.results.store import ResultsStore, RunFilter
from suites.models import tiny_llama
from suites.parameters import HARDWARE_LENGTHS, SuiteParameters, choose_lengths
from tests.builders import builder_for
from tests.suites.user_pytest import run_pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_suites_pass_on_the_reference_model(
    tmp_path: Path, virtual_device: Device, tiny_bundle: Path
) -> None:
    db = tmp_path / "results.db"
    done = run_pytest(
        tmp_path, "--pyargs", "suites", f"--device={virtual_device.serial}", "-v",
        f"--container={tiny_bundle}", f"--qnnfarm-db={db}", "--suite-param=soak_s=0",
        "--suite-param=repetitions=1", "--suite-param=warmup=0", "--suite-param=windows=1",
        "--suite-param=pp=64", "--suite-param=tg=3", "--suite-param=depth=32",
        "--suite-param=soak_dialogs=1", "--suite-param=turns=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"= 21 passed, \d+ skipped in ", done.stdout), done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [row[6].strip() for row in rows] == ["soak", "pp64", "tg3", "tg3 @ d32"]
    assert all(re.fullmatch(r"\s+[\d.]+( ± [\d.]+)? ", row[7]) for row in rows)
    assert ["±" in row[7] for row in rows] == [True, False, False, False], "one repetition each"
    with ResultsStore.open(db, create=False) as store:
        runs = store.list_runs()
    assert {run.status for run in runs} == {"done"}
    assert {run.label for run in runs} >= {"pp64", "tg3", "tg3 @ d32"}
    scored, steps = sorted(
        (run for run in runs if run.kind == "perplexity"),
        key=lambda run: bool(run.values("kl_divergence")),
    )
    assert steps.values("top1_agreement") >= (0.9,)
    (device,), (reference,) = scored.values("perplexity"), scored.values("perplexity_float")
    assert device == pytest.approx(reference, rel=0.03)


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
@pytest.mark.timeout(900)
def test_other_configurations_pass_with_six_graphs(
    tmp_path: Path, virtual_device: Device, build_cache: Path
) -> None:
    """Three ARs by two CLs, where the reference container has one CL."""
    container = builder_for(tiny_llama.folder(), build_cache, (1, 8, 16), (48, 64)).build()
    done = run_pytest(
        tmp_path, "--pyargs", "suites.test_configurations", f"--device={virtual_device.serial}",
        f"--container={container.path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "= 4 passed in " in done.stdout, done.stdout


@pytest.fixture
def in_process(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """A run that needs no process of its own, as it ends before a device is asked for."""
    options = ["-p", "harness.pytest_plugin", "-p", "no:xdist", "-W", "error"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # our packages, in this process
    return partial(pytester.runpytest_inprocess, *options, "--pyargs")


def test_a_suite_without_a_container_or_with_an_unknown_parameter(
    in_process: Callable[..., pytest.RunResult],
) -> None:
    done = in_process("suites", "-rs")
    done.assert_outcomes(skipped=29)
    done.stdout.fnmatch_lines(["*no container: give one with --container DIR*"])
    done = in_process("suites", "--suite-param", "soaks=1")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [text for text in done.outlines + done.errlines if "soaks" in text]
    assert line.startswith("ERROR: --suite-param: no suite knows 'soaks': checkpoint, depth")
    done.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.slow
def test_it_is_refused_once_by_several_workers(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-n2", "--pyargs", "suites", "--suite-param=pp=many")
    told = done.stdout
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, told
    (line,) = [text for text in told.splitlines() if "many" in text]
    assert line.startswith("ERROR: --suite-param: pp='many': it is a whole number"), told
    assert "INTERNALERROR" not in told


def test_lengths_are_those_of_the_target(
    in_process: Callable[..., pytest.RunResult], tiny_bundle: Path
) -> None:
    """An emulator is measured with short ones."""
    done = in_process(
        "suites.test_throughput", "--collect-only", "-q", f"--container={tiny_bundle}"
    )
    found = [line.rpartition("::")[2] for line in done.outlines if "::" in line]
    tests = ("test_prefill[128", "test_decode[8", "test_decode_at_depth[64")
    assert found == [f"{test}-{tiny_bundle.name}]" for test in tests]


@pytest.mark.parametrize(
    "texts",
    [{"pp": "0"}, {"pp": "a"}, {"pp": ""}, {"tg": "1,,2"}, {"soak_s": "nan"}, {"soak_s": "-1"},
     {"warmup": "½"}, {"repetitions": "0"}, {"turns": "1"}, {"checkpoint": "/nowhere"}],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(texts: dict[str, str]) -> None:
    with pytest.raises(pytest.UsageError, match=next(iter(texts))):
        SuiteParameters.read(texts)


def test_parameters_are_read_and_lengths_those_that_fit() -> None:
    assert SuiteParameters.read({"pp": "16,512"}) == SuiteParameters(pp=(16, 512))
    texts = {"soak_s": "2.5", "warmup": "0"}
    assert SuiteParameters.read(texts) == SuiteParameters(soak_s=2.5, warmup=0)
    assert choose_lengths(None, HARDWARE_LENGTHS.pp, 1000) == (128, 512)
    assert choose_lengths(None, HARDWARE_LENGTHS.pp, 100) == (64,)
    assert choose_lengths((7,), HARDWARE_LENGTHS.pp, 3) == (7,)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_suite_of_embeddings_passes_on_the_reference_encoder(
    tmp_path: Path, virtual_device: Device, encoder_bundle: Path
) -> None:
    """The cosine with float is at least 0.98 on 50 held-out sentences."""
    db = tmp_path / "results.db"
    done = run_pytest(
        tmp_path, "--pyargs", "plugins.encoders.test_suite", f"--device={virtual_device.serial}",
        f"--container={encoder_bundle}", f"--qnnfarm-db={db}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "= 1 passed in " in done.stdout, done.stdout
    with ResultsStore.open(db, create=False) as store:
        (stored,) = store.list_runs(RunFilter(kind="embed"))
        (least,) = (run for run in store.list_runs() if run.label == "least of 50 texts")
    assert len(stored.values("embed_s")) == len(stored.values("cosine_float")) == 50
    assert least.values("cosine_float") == (min(stored.values("cosine_float")),)
    assert min(stored.values("cosine_float")) >= 0.98
    assert "least of 50 texts of tiny_encoder" in done.stdout
