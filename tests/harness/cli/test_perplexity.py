"""`qnnfarm perplexity` beside the model that the container was built from."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import Lade, Spd, Ssd
from buildlib.container.writer import ContainerFile
from harness.devices.device import Device
from harness.errors import BAD, GOOD, NO_ANSWER
from harness.results.store import ResultsStore, RunFilter
from harness.runtimes.registry import open_model
from harness.workloads.perplexity import float_perplexity
from harness.workloads.quality import stored_quality
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run
from tests.optional import needs_transformers
from tests.repackaged import repackage
from tests.system import is_here

pytestmark = pytest.mark.timeout(900)
TEXT = tiny_llama.folder() / "text" / "heldout.txt"
SELF_SPECULATION = Ssd(
    forecast_token_count=4, branches=(3, 2), forecast_prefix=16, forecast_prefix_name="prefix"
)


def test_what_the_host_computed_is_what_benchmarks_are_checked_against(
    qnnfarm: Run,
    virtual_device: Device,
    small_bundle: Path,
    small_model: Path,
    tmp_path: Path,
) -> None:
    db, letters = tmp_path / "results.db", small_model / "text" / "calibration.txt"
    where = (small_bundle, "--device", virtual_device.serial, "--db", db)
    scored = ("--text", letters, "--windows", "2", "--reference", small_model)
    done = qnnfarm("perplexity", *where, *scored, "--json")
    assert done.returncode == GOOD, done.stderr
    assert "scoring 2 windows in float on this host" in done.stderr
    answer = json.loads(done.stdout)
    with ResultsStore.open(db) as store:
        (run,) = store.list_runs(RunFilter(kind="perplexity"))
    assert run.values("perplexity") == (answer["perplexity"],)
    assert run.values("perplexity_float") == (answer["perplexity_float"],)
    one, other = map(math.log, answer["windows"])
    error = answer["perplexity"] * abs(one - other) / 2  # sd / sqrt(2) of two values
    assert run.values("perplexity_error") == (answer["perplexity_error"],)
    assert answer["perplexity_error"] == pytest.approx(error)
    assert answer["perplexity_float"] != answer["perplexity"]  # which is quantized
    assert answer["perplexity_float"] == pytest.approx(answer["perplexity"], rel=0.03)
    bench = qnnfarm("bench", *where, "-p", "8", "-n", "2", "-r", "1", "-w", "0", "--no-gate")
    assert bench.returncode == GOOD, bench.stderr
    assert "is near its host reference" in bench.stdout


@needs_transformers
def test_the_reference_can_be_computed_by_transformers(tiny_bundle: Path) -> None:
    model, checkpoint = open_model(tiny_bundle), tiny_llama.folder()
    windows = model.windows(TEXT.read_text(), 2)
    by_onnx = float_perplexity(checkpoint, model.info, windows)
    found = float_perplexity(checkpoint, model.info, windows, "transformers")
    assert found == pytest.approx(by_onnx, rel=1e-5)


def test_another_model_is_a_bad_answer(
    qnnfarm: Run,
    virtual_device: Device,
    small_bundle: Path,
    small_model: Path,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    letters = small_model / "text" / "calibration.txt"
    other = make_checkpoint(tmp_path / "other", hidden_size=48)
    scored = ("--text", letters, "--windows", "1", "--reference", other)
    done = qnnfarm("perplexity", small_bundle, "--device", virtual_device.serial, *scored)
    assert done.returncode == BAD, done.stdout + done.stderr
    perplexity, beside = done.stdout.splitlines()
    assert " in 1 window, small_llama W8A16" in perplexity
    assert "±" not in perplexity  # of one window, whose spread is unknown
    assert beside.startswith("in float on this host ")
    assert "from the same model in float, more than the 3% of W8A16" in done.stderr


@pytest.fixture(scope="module")
def speculating(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Containers of the same binaries whose dialogs look ahead, and draft, by the type."""
    plain = GenAIContainer.load(small_bundle)
    engine = plain.genie_config.dialog.target_engine
    configs = {
        "lade": plain.genie_config.with_type("lade", lade=Lade(window=4, ngram=3, gcap=4)),
        "spd": plain.genie_config.with_type("spd", draft=engine, spd=Spd(draft_len=4)),
        "ssd-q1": plain.genie_config.with_type("ssd-q1", ssd=SELF_SPECULATION),
    }
    folder = tmp_path_factory.mktemp("speculating")
    unread = ContainerFile(plain.files["tokenizer.json"], "forecast_prefix")  # texts are scored
    extras = {"ssd-q1": {f"{SELF_SPECULATION.forecast_prefix_name}/kv-cache": unread}}
    return {
        kind: repackage(plain, config, folder / kind, extras.get(kind)).path
        for kind, config in configs.items()
    }


@pytest.mark.slow
@pytest.mark.genie_configuration("accuracy", "accuracy of a role")
def test_a_speculating_container_is_scored_as_its_target(
    qnnfarm: Run, virtual_device: Device, small_bundle: Path, speculating: dict[str, Path]
) -> None:
    where = ("--device", virtual_device.serial, "--text", TEXT, "--windows", "1", "--json")
    answers = {}
    for kind, folder in {"plain": small_bundle, **speculating}.items():
        done = qnnfarm("perplexity", folder, *where)
        assert done.returncode == GOOD, done.stderr
        answers[kind] = json.loads(done.stdout)["perplexity"]
    assert set(answers) == {"plain", "lade", "spd", "ssd-q1"}
    assert len(set(answers.values())) == 1, answers


@pytest.mark.variant
def test_the_draft_model_has_a_perplexity_of_its_own(
    qnnfarm: Run, virtual_device: Device, speculating: dict[str, Path], tmp_path: Path
) -> None:
    db = tmp_path / "results.db"
    where = ("--device", virtual_device.serial, "--db", db, "--text", TEXT, "--windows", "1")
    done = qnnfarm("perplexity", speculating["spd"], *where, "--role", "draft")
    assert done.returncode == GOOD, done.stderr
    assert done.stdout.startswith("perplexity of the draft model ")
    with ResultsStore.open(db) as store:
        (run,) = store.list_runs(RunFilter(kind="perplexity"))
        assert run.workload.perplexity is not None
        assert run.workload.perplexity.positions == "draft_first_cl_minus_ar"
        assert stored_quality(store, run.container, run.device) is None
    done = qnnfarm("perplexity", speculating["lade"], *where, "--role", "draft")
    assert done.returncode == NO_ANSWER
    assert "holds no draft model: its dialog is of type lade" in done.stderr


def test_drafting_is_refused(
    qnnfarm: Run,
    virtual_device: Device,
    speculating: dict[str, Path],
    genie_checks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(genie_checks))
    where = (speculating["spd"], "--device", virtual_device.serial)
    for command in (
        ("generate", *where, "--prompt", "And"),
        ("bench", *where, "--db", tmp_path / "r.db"),
    ):
        done = qnnfarm(*command)
        assert done.returncode == NO_ANSWER
        assert "dialogs of type spd are wrong with Genie" in done.stderr
        assert "use SSD or Eaglet" in done.stderr
    if not is_here("plugins.diagnosis"):
        return
    checked = qnnfarm("config", "check", speculating["spd"])
    assert checked.returncode == BAD
    assert "refused: /dialog/type: dialogs of type spd are wrong" in checked.stdout
    told = json.loads(qnnfarm("config", "check", "--json", speculating["spd"]).stdout)
    assert [each["accepted"] for each in told] == [False, True]
