"""The steps of the demo, each through the public surface of the package it shows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from buildlib.builder.build import BuildOutputs
from buildlib.builder.runner import StageRecord
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.genai import GenAIBuilderFactory
from buildlib.numerics.evaluation import onnx_perplexity
from harness.cli.arguments import WAIT_S
from harness.cli.device_lease import deploy_progress, lease_device, tell_running
from harness.console import progress as progress_bar
from harness.console import remarks
from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import ensure_server, stop_if_ours
from harness.devices.spec import find_type
from harness.errors import WrongUseError
from harness.paths import make_state_dir
from harness.pool.pool import trusted_users
from harness.results.store import ResultsStore
from harness.runtimes.base import GenerationResult
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.tokenizer import ContextLimit, cut_windows
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.perplexity import score_text
from harness.workloads.session import Session, SessionOptions
from reports.cli import report as write_report
from suites.models import tiny_llama

AR, CL, SPLITS = (1, 32), 192, 2
WINDOWS = 8
BENCH = Bench(prompt_tokens=64, new_tokens=16, repetitions=3, warmup=1)


@dataclass(frozen=True)
class BuildResult:
    """A container, and where its build left the models it was made from."""

    container: GenAIContainer
    outputs: BuildOutputs


class DemoProgress:
    """Shows the demo's steps as they happen: a bar on a terminal, one line a step elsewhere."""

    def __init__(self, total: int) -> None:
        self._progress = progress_bar(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._task = self._progress.add_task("", total=total)
        self._number = -1

    def step(self, text: str) -> None:
        """Begin a step; the one before is done."""
        self._number += 1
        self._progress.update(self._task, completed=self._number, description=text)
        total = self._progress.tasks[self._task].total or 0
        self._progress.console.print(
            f"[{self._number + 1}/{total:.0f}] {text}", markup=False, soft_wrap=True
        )

    def detail(self, text: str) -> None:
        """Print the progress of the step, or its result."""
        self._progress.update(self._task, description=text)
        self._progress.console.print(f"      {text}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


@contextmanager
def demo_lock() -> Iterator[None]:
    """Keep a second demo of this user away: it would use, and stop, the same devices."""
    lock = FileLock(make_state_dir() / "demo.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise WrongUseError("another demo is running: wait until it is done") from error
    try:
        yield
    finally:
        lock.release()


def build(soc: str, folder: Path, progress: DemoProgress) -> BuildResult:
    """Build the reference model for the emulator of a SoC, as far as the cache lacks it."""
    progress.step(f"build tiny_llama for {soc}:emulator with the QNN compiler")
    builder = GenAIBuilderFactory.create(tiny_llama.folder())
    builder.set_targets([f"{soc}:emulator"]).set_transformation_options(
        {
            "arn_cl_options.auto_regression_number": AR,
            "arn_cl_options.context_length": (CL,),
            "split_model.num_splits": SPLITS,
        }
    )

    def show(record: StageRecord) -> None:
        how = "from the cache" if record.reused else f"{record.seconds:.1f} s"
        progress.detail(f"{record.operation} {record.subject}: {how}")

    outputs = builder.plan().outputs(show)
    container = GenAIContainer.load(outputs.container).save(folder, exist_ok=True)
    return BuildResult(container, outputs)


def host_references(built: BuildResult, progress: DemoProgress) -> Mapping[str, float]:
    """Compute the perplexity on the host, float and quantized, over the devices' positions."""
    progress.step(
        f"perplexity on the host, float and quantized, over {WINDOWS} windows of held-out text"
    )
    config = load_config(tiny_llama.folder() / "config.json")
    windows = cut_windows(
        tiny_llama.heldout_text(),
        built.container.files["tokenizer.json"],
        ContextLimit(CL, max(AR)),
        WINDOWS,
    )
    scored = [window.scored for window in windows]
    outputs = built.outputs
    floats = {shape.ar: [path] for shape, path in outputs.float_models.items()}
    parts = {shape.ar: paths for shape, paths in outputs.qdq_parts.items()}
    return {
        "perplexity_float": onnx_perplexity(floats, config, scored),
        "perplexity_quantized_cpu": onnx_perplexity(parts, config, scored),
    }


@contextmanager
def adb_server() -> Iterator[AdbServer]:
    """Yield the adb server that runs, else one that ends with the demo unless others use it."""
    server = ensure_server(trusted_users=trusted_users())
    try:
        yield server
    finally:
        stop_if_ours(server)


def _device_name(soc: str) -> str:
    return f"demo-{soc.lower()}"


@contextmanager
def virtual_device(soc: str, server: AdbServer, progress: DemoProgress) -> Iterator[str]:
    """Yield the serial of a virtual device that stops with the demo; its files stay."""
    name = _device_name(soc)
    progress.step(f"start virtual device {name} and connect it to the adb server")
    with find_type("virtual").running(name, soc, server, progress.detail) as serial:
        yield serial


def measure(
    container: GenAIContainer,
    serial: str,
    store: ResultsStore,
    references: Mapping[str, float],
    progress: DemoProgress,
) -> None:
    """Deploy, bench and score one container on one device, into the store."""
    progress.step(f"deploy to {serial}, prefill and decode, perplexity")

    def show(number: int, total: int, result: GenerationResult) -> None:
        rate = result.metrics["prefill_tokens_per_s"]
        progress.detail(f"repetition {number + 1}/{total}: prefill {rate:.1f} tokens/s")

    options = SessionOptions(shown=deploy_progress, on_repetition=show, on_running=tell_running)
    with (
        lease_device(serial, wait_s=WAIT_S, purpose="the demo") as device,
        Session(device, GenieModel(container), options) as session,
    ):
        deployment = session.runtime.prepare()
        new_mib, reused = deployment.pushed_bytes / 2**20, deployment.reused_bytes / 2**20
        progress.detail(f"pushed {new_mib:.1f} MiB, {reused:.1f} MiB were there already")
        recording = Recording(lambda: store)
        BENCH.run(session, recording)
        result = score_text(
            session,
            tiny_llama.heldout_text(),
            recording,
            windows=WINDOWS,
            references=references,
        ).output
        progress.detail(
            f"perplexity {result.perplexity:.3f} on the device, "
            f"{references['perplexity_float']:.3f} in float on the host"
        )


def print_leftovers(socs: Sequence[str]) -> None:
    """Name the devices that stay."""
    names = " and ".join(map(_device_name, socs))
    remark = f"{names} are stopped; their files stay for the next demo (`qnnfarm device rm NAME`)"
    remarks().print(remark, markup=False, soft_wrap=True)


def report(db: Path, out: Path, *, json: bool) -> None:
    """Write the report and print its table, or its summary as JSON."""
    write_report(db=str(db), out=out, as_json=json)
