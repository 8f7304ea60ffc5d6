"""Quality of a container: its perplexity, stored or measured, against a bound or its references.

A bound names what it is measured over: a text, a number of windows, and the positions that the
runtime scores. A stored perplexity serves only if all of these are the same, and the libraries that
ran too; otherwise the device scores the text now. So a bound has one answer, whatever the database
holds.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import WrongUseError
from harness.results.identity import Subject
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_FLOAT,
    REFERENCES,
    PerplexityBound,
    describe_scored,
    find_perplexity_faults,
    last_values,
)
from harness.results.records import (
    GENIE,
    ContainerInfo,
    DeviceInfo,
    OutputCheck,
    PerplexityDefinition,
    Run,
)
from harness.results.store import ResultsStore, RunFilter
from harness.runtimes.base import Scores
from harness.words import pluralize
from harness.workloads.base import Recording
from harness.workloads.bench_prompt import bench_text
from harness.workloads.perplexity import float_perplexity, read_text, score_text
from harness.workloads.session import Session

DEFAULT_WINDOWS = 1
_CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer takes of English text, so that a text is never too short."""


@dataclass(frozen=True, slots=True)
class QualityCheck:
    """A bound of the perplexity, and the text that it is measured over.

    Attributes:
        text: a file; None for the built-in passage.
        windows: the first ones of the text.
        reference: the checkpoint that the host scores in float for a relative bound; None takes
            a stored value.
    """

    bound: PerplexityBound
    text: Path | None = None
    windows: int = DEFAULT_WINDOWS
    reference: str | None = None

    def judge(self, session: Session, store: ResultsStore) -> OutputCheck:
        """Judge the session's container, after measuring it if nothing comparable is stored.

        Raises:
            WrongUseError: a relative bound without any perplexity in float.
            HarnessError: the device could not score the text.
        """
        if self.bound.relative and self.text is None and self.reference is None:
            run = best_referenced(
                store,
                session.container_info,
                session.device_info,
                session.model.runtime.name,
                (PERPLEXITY_FLOAT,),
            )
            if run is None:
                raise WrongUseError(
                    f"--max-perplexity {self.bound} is relative to the model in float, which "
                    f"{store.location} does not have: give --reference CHECKPOINT_DIR, or store it "
                    "with `qnnfarm perplexity CONTAINER --text FILE --reference CHECKPOINT_DIR`"
                )
        else:
            run = self._stored_or_measured(session, store)
        return self.bound.check(last_values(run), describe(run))

    def _stored_or_measured(self, session: Session, store: ResultsStore) -> Run:
        text, sha256 = self._read(session)
        runtime = session.require(Scores)
        pieces = session.model.windows(text, self.windows)
        definition = PerplexityDefinition(
            positions=runtime.positions(),
            windows=len(pieces),
            tokens=sum(len(window.scored) for window in pieces),
        )
        versions = session.runtime.versions()
        needed = {PERPLEXITY, PERPLEXITY_FLOAT} if self.bound.relative else {PERPLEXITY}
        for run in _measured(
            store, session.container_info, session.device_info, session.model.runtime.name
        ):
            work, ran = run.workload, run.provenance.library_versions
            if (
                (work.dataset_sha256, work.perplexity) == (sha256, definition)
                and all(ran.get(name) == version for name, version in versions.items())
                and needed <= last_values(run).keys()
            ):
                return run
        references = {}
        if self.bound.relative:
            if self.reference is None:
                raise WrongUseError(
                    f"--max-perplexity {self.bound} is relative to the model in float, and "
                    f"{store.location} has none over {pluralize(len(pieces), 'window')} of "
                    f"{self.text}: give --reference CHECKPOINT_DIR"
                )
            info, folder = session.container_info, session.options.folder
            value = float_perplexity(self.reference, info, pieces, folder=folder)
            references[PERPLEXITY_FLOAT] = value
        scored = score_text(
            session,
            text,
            Recording(lambda: store),
            windows=self.windows,
            references=references,
            dataset_sha256=sha256,
        ).run
        if scored is None:
            raise AssertionError("a recorded run is stored")
        return scored

    def _read(self, session: Session) -> tuple[str, str]:
        """Return the text with its hash; for the built-in passage, the hash of one copy."""
        if self.text is not None:
            text = read_text(session.resolve(str(self.text)))
            return text, _sha256(text)
        passage = bench_text()
        characters = session.container_info.cl * (self.windows + 1) * _CHARACTERS_PER_TOKEN
        return passage * (characters // len(passage) + 1), _sha256(passage)


@dataclass(frozen=True, slots=True)
class ContainerQuality:
    """A check of the container from before the run, as an expectation of its output."""

    check: OutputCheck

    def evaluate(self, text: str) -> OutputCheck:
        """Give the container's check for every text but an empty one."""
        if not text:
            return OutputCheck(outcome="failed", reason="it is empty")
        return self.check


def stored_quality(
    store: ResultsStore, container: ContainerInfo, device: DeviceInfo, runtime: str = GENIE
) -> OutputCheck | None:
    """Check a container by its stored perplexity beside the host's references.

    The measurement over the most tokens counts, of equal ones the newest; None without any.
    """
    run = best_referenced(store, container, device, runtime)
    if run is None:
        return None
    values = last_values(run)
    faults = find_perplexity_faults(values, container.precision)
    if faults:
        reason = f"over {describe(run)}: {'; '.join(faults)}"
        return OutputCheck(outcome="failed", reason=reason)
    reason = f"perplexity {values[PERPLEXITY]:.3f} over {describe(run)} is near its host reference"
    return OutputCheck(outcome="passed", reason=reason)


def best_referenced(
    store: ResultsStore,
    container: ContainerInfo,
    device: DeviceInfo,
    runtime: str = GENIE,
    references: Collection[str] = REFERENCES,
) -> Run | None:
    """Find the stored perplexity beside a reference that says most.

    Args:
        references: any of these will do.
    """
    candidates = [
        run
        for run in _measured(store, container, device, runtime)
        if not last_values(run).keys().isdisjoint(references)
    ]
    return max(candidates, key=_scored_tokens, default=None)


def describe(run: Run) -> str:
    """Name the sample of a perplexity: `8 windows, 1,280 tokens of text 3f2a91c0`."""
    definition, sha256 = run.workload.perplexity, run.workload.dataset_sha256 or ""
    text = f"text {sha256[:12]}" if sha256 else "an unknown text"
    if sha256 == _sha256(bench_text()):
        text = "the built-in passage"
    first = definition is not None and definition.positions == "first_cl_minus_ar"
    which = " (the first CL - AR of each)" if first else ""
    return f"{describe_scored(definition)}{which} of {text}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _scored_tokens(run: Run) -> int:
    return run.workload.perplexity.tokens if run.workload.perplexity else 0


def _measured(
    store: ResultsStore, container: ContainerInfo, device: DeviceInfo, runtime: str
) -> Iterator[Run]:
    """Return the perplexities of a container on this kind of device, newest first.

    A run that failed for its bound has a right number too; one with an adapter has that of another
    model.
    """
    selection = RunFilter(
        kind="perplexity",
        container_sha256=container.sha256,
        soc=device.soc,
        emulator=device.emulator,
    )
    for run in reversed(store.list_runs(selection)):
        judged = run.status == "done" or run.check.outcome == "failed"
        own = Subject.of(run).of_answers and "lora" not in run.workload.sampler
        own = own and run.workload.runtime == runtime
        if judged and own and PERPLEXITY in last_values(run):
            yield run
