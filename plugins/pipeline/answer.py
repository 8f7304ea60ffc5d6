"""Generation of text by a pipeline: on a leased device by Genie, or on this host's loop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.console import EMULATOR, print_remark, print_text
from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool, host_devices
from harness.pool.requirement import Requirement
from harness.results.metrics import METRICS
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.chat import Chat
from harness.workloads.generate import Generate
from harness.workloads.session import Session, SessionOptions
from plugins.pipeline.host_model import HostModel

_WAIT_S = 60.0


@dataclass(frozen=True)
class GenerationAnswer:
    """A generated text, and what its generation measured.

    Attributes:
        text: without the prompt.
        metrics: by key of `harness.results.metrics`; none on this host.
        where: the device, or the kind of model on this host.
        emulator: whether it ran on an emulator, whose speed says nothing about hardware.
    """

    text: str
    where: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    emulator: bool = False

    def print(self) -> None:
        """Print the text on stdout, and where and how fast it was generated on stderr."""
        print_text(self.text)
        figures = [
            f"{METRICS[key].label.lower()} {METRICS[key].show(value)}"
            for key, value in self.metrics.items()
        ]
        print_remark(f"{self.where}{': ' if figures else ''}{', '.join(figures)}")
        if self.emulator:
            print_remark(EMULATOR)


@contextmanager
def leased_session(
    container: GenAIContainer, device: DeviceSpec | str | None, runner_s: float | None
) -> Iterator[Session]:
    """Lease a device, and open a session with a container that leaves nothing on it."""
    spec = DeviceSpec.parse(device) if isinstance(device, str) else device
    options = SessionOptions(runner_timeout_s=runner_s)
    purpose = f"a pipeline of {container.metadata.model.name}"
    with (
        host_devices() as devices,
        Pool.of([devices.resolve(spec)], devices=devices) as pool,
        pool.acquire(Requirement(), timeout_s=_WAIT_S, purpose=purpose) as lease,
        Session(lease.device, GenieModel(container), options) as session,
    ):
        yield session


def generate_on_device(session: Session, asked: Generate) -> GenerationAnswer:
    """Answer a prompt on a session's device."""
    asked.check(session.model)
    result = asked.run(session).output
    return GenerationAnswer(
        result.text, session.device_label, result.metrics, session.properties.emulator
    )


def generate_on_host(model: HostModel, asked: Generate, model_dir: Path) -> GenerationAnswer:
    """Answer a prompt greedily on the host loop, up to an end-of-sequence token."""
    encoder, prompt = load_tokenizer(model.tokenizer), str(asked.prompt)
    stop = frozenset(model.config.eos_token_ids)
    if asked.chat:
        turns = Chat.of(model_dir).turns([prompt], asked.system)
        ids: Sequence[int] = turns.ids[0]
        stop |= frozenset(() if turns.end_token is None else (turns.end_token,))
    else:
        ids = [*model.config.begin, *encode(encoder, prompt)]
    tokens = model.loop.greedy(ids, asked.max_tokens, stop)
    return GenerationAnswer(encoder.decode(tokens), f"this host, the {model.kind} model")
