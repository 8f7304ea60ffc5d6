"""Genie on a device: one container, one run folder, each query a process of its own."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import Sampler
from buildlib.container.manifest import SpeculationRecord
from buildlib.container.op_packages import registrations
from buildlib.speculative.agreement import bound_turns
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import RuntimeChoiceError, RuntimeOutputError, WrongUseError
from harness.results.records import Positions
from harness.runtimes.base import (
    Capability,
    Conversation,
    ConversationRequest,
    ConversationResult,
    Converses,
    DecodesSteps,
    EmbeddingResult,
    Embeds,
    Framing,
    Generates,
    GenerationRequest,
    GenerationResult,
    ModelRole,
    PerplexityResult,
    RuntimeOptions,
    Scores,
    StepLogits,
    StepWindow,
    Turn,
    Window,
)
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.python import NAMED
from harness.runtimes.bundles.sources import PROGRAMS
from harness.runtimes.container_model import ContainerRuntime
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.bundle import genie_bundle
from harness.runtimes.genie.configuration import (
    added_tokens,
    alpha_tensor,
    bound_answer,
    check_depth,
    config_of,
    dialog_limit,
    eos_tokens,
    framed,
)
from harness.runtimes.genie.conversation import ConversationScript, read_state, write_state
from harness.runtimes.genie.perplexity import parse_perplexity
from harness.runtimes.genie.profile import (
    complete_figures,
    find_early_end,
    lacks_figures,
    parse_clock,
    parse_figures,
    parse_profile,
    parse_trace,
)
from harness.runtimes.genie.prompt_embeddings import read_embeddings, row_bytes
from harness.runtimes.genie.speculation import compare_dialog
from harness.runtimes.genie.steps import STEP_RUNNER, STEP_SAMPLER, StepRun
from harness.runtimes.genie.text_encoder import EncoderRun
from harness.runtimes.run_folder import runner_command
from harness.runtimes.tokenizer import encode

_BEGIN = "[BEGIN]: "
_END = "[END]"


def generated_text(output: str, device: str) -> str:
    """Return the generated text between the marks.

    The prompt is echoed before the first mark and the model's text may itself hold marks, so the
    text runs from the first mark at the start of a line to the last end mark.

    Raises:
        RuntimeOutputError: the marks are not there: the runner printed something else.
    """
    start = output.rfind("\n" + _BEGIN)
    end = output.rfind(_END)
    if start < 0 or end < start:
        raise RuntimeOutputError(device, "the runner printed no [BEGIN]: ... [END]")
    return output[start + 1 + len(_BEGIN) : end]


def parse_ids(printed: str, config: GenieConfig, device: str) -> tuple[int, ...]:
    """Return the token ids that a runner printed."""
    if not _IDS.fullmatch(printed):
        reason = "the runner printed something else than token ids"
        raise RuntimeOutputError(device, reason)
    ids = tuple(int(word) for word in printed.split() if len(word) < 10)
    size = config.dialog.context.n_vocab
    if any(token >= size for token in ids):
        reason = f"the runner printed token {max(ids)}, outside the vocabulary of {size}"
        raise RuntimeOutputError(device, reason)
    return ids


_IDS = re.compile(r"[0-9 ]*")
_OUTPUT = "output.txt"
_SCORER = "genie_perplexity.py"
_ASKED_IN_WORDS = frozenset({"spd", "ssd-q1", "eaglet"})
_Program = Literal["genie-t2t-run", "genie-t2e-run", "genie-app"]
_OURS: Mapping[_Program, str] = MappingProxyType(
    {
        "genie-t2t-run": "genie_t2t_run.py",
        "genie-t2e-run": "genie_t2e_run.py",
        "genie-app": "genie_app.py",
    }
)


def _runner_of(program: _Program, bundle: Bundle) -> str:
    """Return the runner of a documented program: itself where it exists, else ours."""
    return program if program in bundle.files else _OURS[program]


def _query_of(request: GenerationRequest, rows: bytes | None) -> tuple[str, str, str | bytes]:
    """Return the name of the query's file, the flag that takes it, and its content."""
    if request.prompt is not None:
        return "prompt.txt", "--prompt_file", request.prompt
    if rows is not None:
        return "embeddings.raw", "--embedding_file", rows
    return "tokens.txt", "--tokens_file", " ".join(map(str, request.token_ids or ()))


def _refuse_turns(request: ConversationRequest, config: GenieConfig) -> None:
    """Refuse turns of dialogs that do not end, or that Genie 1.21 gets wrong from the second on."""
    kind = config.dialog.type
    later = request.restore is not None or any(len(one.turns) > 1 for one in request.conversations)
    if kind == "eaglet" and later:
        raise WrongUseError(
            "Genie loses tokens of later turns of dialogs of type eaglet, whose answers are wrong "
            "then: ask one prompt a dialog, or speculate by SSD"
        )
    if kind in {"lade", "multistream"}:
        raise WrongUseError(
            f"a dialog of type {kind} answers one prompt: it goes on to the end of its context, so "
            "that no turn can follow"
        )


def _lora_arguments(lora: Mapping[str, float], config: GenieConfig) -> list[str]:
    """Return options of a runner that apply adapters; Genie applies one at a time."""
    alpha = alpha_tensor(config)
    return [
        word
        for name, strength in lora.items()
        for word in ("--lora", f"{name},{alpha},{strength!r}")
    ]


class GenieRuntime(ContainerRuntime):
    """A container on a device, run by Genie; `Runtime` of all capabilities but `MeasuresSpeed`.

    Args:
        properties: what the device said of itself.
        options: with a trace only where the device has Python.

    Raises:
        RuntimeChoiceError: the container is not for this device.
        GenieMissingError: this machine has no Genie for it.
    """

    name: ClassVar[str] = "genie"
    bundle_of = staticmethod(genie_bundle)

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        container: GenAIContainer,
        options: RuntimeOptions | None = None,
    ) -> None:
        super().__init__(device, properties, container, options)
        bundle = self.bundle
        self._origin = bundle.files["libGenie.so"].origin
        self._has_python = PROGRAMS[0] not in bundle.files
        self._runners: Mapping[Capability, str] = {
            Generates: _runner_of("genie-t2t-run", bundle),
            Converses: _runner_of("genie-app", bundle),
            Embeds: _runner_of("genie-t2e-run", bundle),
            Scores: _SCORER,
            DecodesSteps: STEP_RUNNER,
        }
        log_level = self.options.log_level
        if log_level is None and self._has_python:
            log_level = "error"  # the SDK's program writes its log among Android's
        self._logging = ["--log", log_level] if log_level else []
        if self.options.trace and not self._has_python:
            reason = "the SDK's genie-t2t-run writes no trace: leave out --trace"
            raise RuntimeChoiceError(device.serial, reason)
        if container.metadata.op_packages and not self._has_python:
            reason = (
                "the SDK's genie-t2t-run registers no op packages, which the container has; ours "
                f"does, and needs Python: {NAMED}"
            )
            raise RuntimeChoiceError(device.serial, reason)
        self._trace = self.options.trace
        self._queries = 0
        self._compared: dict[str, SpeculationRecord | None] = {}

    def runner(self, capability: Capability) -> str:
        """See `Runtime.runner`."""
        return self._runners[capability]

    def versions(self) -> Mapping[str, str]:
        """Return the hashes of the libraries on the device; deploy first if needed."""
        return (
            {"Genie from": self._origin}
            | {
                file.name: f"sha256:{file.sha256[:16]}"
                for file in self.prepare().files
                if file.name in {"libGenie.so", "libQnnHtp.so"}
            }
            | self.pushed()
        )

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one query; the first of a dialog that speculates may compare it with plain decoding.

        Raises:
            WrongUseError: dialogs of this type are wrong with the device's Genie.
            PromptTooLongError: prompt and answer do not fit into the context.
            DeploymentCorruptError: the query arrived as another.
            RunnerError: the runner crashed, hung or refused.
            RuntimeOutputError: it answered what cannot be an answer.
        """
        config = framed(config_of(request.settings, self._container), request.framing)
        found = self._compare(config)
        return replace(self._query(request, config), speculation=found)

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """See `Generates.added_tokens`."""
        config = config_of(settings, self._container)
        return added_tokens(config, after_empty_answer=after_fill)

    def end_token(self, settings: DialogSettings, framing: Framing) -> int:
        """See `TakesChats.end_token`."""
        return eos_tokens(framed(config_of(settings, self._container), framing))[0]

    def _compare(self, config: GenieConfig) -> SpeculationRecord | None:
        def ask(dialog: GenieConfig, prompt: str, count: int) -> str:
            return self._query(GenerationRequest(count, prompt=prompt), dialog).text

        genie = (self._origin, self.sha256_of("libGenie.so") or "")
        kind = config.dialog.type
        if kind not in self._compared:
            self._compared[kind] = compare_dialog(config, self._container, genie, ask)
        return self._compared[kind]

    def _query(self, request: GenerationRequest, config: GenieConfig) -> GenerationResult:
        request = self._in_words(request, config)
        rows = None
        if request.embeddings is not None:
            rows = read_embeddings(request.embeddings, config, self._container)
        limit = dialog_limit(self._limit, config)
        prompt_tokens = self._count_tokens(request, config, rows)
        limit.check(prompt_tokens, request.max_new_tokens)
        config = bound_answer(config, limit, prompt_tokens, request.max_new_tokens)
        name, flag, content = _query_of(request, rows)
        inputs: dict[str, str | bytes] = {"query_config.json": config.to_json(), name: content}
        query = [flag, name]
        if request.fill_token_ids:
            check_depth(config)
            if not self._has_python:
                reason = "the SDK's genie-t2t-run runs one query: a prompt has no depth there"
                raise RuntimeChoiceError(self.device.serial, reason)
            inputs["fill.txt"] = " ".join(map(str, request.fill_token_ids))
            query += ["--fill_file", "fill.txt"]
        folder = self.folder()
        folder.send(inputs)
        self._queries += 1
        profile = f"profile-{self._queries}.json"  # none can be taken for that of another query
        clock = f"clock-{self._queries}.json"
        runner = self.runner(Generates)
        command = [*self._command(runner), "-c", "query_config.json", *query]
        command += ["--profile", profile, *self._logging]
        trace = f"trace-{self._queries}.json"
        command += ["--trace", trace] if self._trace else []
        command += _lora_arguments(request.settings.lora or {}, config)
        if self._has_python:
            command += ["--clock", clock]
        with self.sampling() as samples:
            outcome = folder.run(
                command, name=runner, timeout_s=self.options.runner_timeout_s, stdout=_OUTPUT
            )
        text = generated_text(folder.read(_OUTPUT), self.device.serial)
        profiled = folder.read(profile)
        figures = parse_figures(profiled, self.device.serial)
        several, asked = config.dialog.multistream is not None, request.max_new_tokens
        timed, clocked = None, dict[str, float]()
        unknown = lacks_figures(figures)
        if self._has_python and (unknown or figures["generated_tokens"] < asked):
            timed = parse_clock(folder.read(clock), self.device.serial)
            clocked = timed.metrics(prompt_tokens) if unknown else {}
        metrics = complete_figures(figures, clocked, self.device.serial)
        ids = None if request.token_ids is None else self._parse_ids(text)
        text = text if ids is None else self._decode(ids)
        traced = parse_trace(folder.read(trace), self.device.serial) if self._trace else ""
        generated, stops = metrics["generated_tokens"], bool(config.dialog.stop_sequence)
        return GenerationResult(
            text,
            metrics | outcome.memory,
            samples.series,
            profiled,
            traced,
            token_ids=ids,
            streams=tuple(text.rstrip("\n").split("\n")) if several else (),
            clocked=frozenset(metrics.keys() - figures.keys()),
            early_end=None if several else find_early_end(generated, asked, timed, stops=stops),
        )

    def _in_words(self, request: GenerationRequest, config: GenieConfig) -> GenerationRequest:
        """Ask dialogs that draft by text: Genie 1.21 fails token queries of them (-6)."""
        if request.token_ids is None or config.dialog.type not in _ASKED_IN_WORDS:
            return request
        words = self._words(request.token_ids, whole=request.framing is not None)
        return replace(request, prompt=words, token_ids=None)

    def _words(self, ids: Sequence[int], *, whole: bool) -> str:
        """Return words for token ids, of which whole ones must come back."""
        words = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        if whole and encode(self._tokenizer, words) != list(ids):
            raise WrongUseError(
                "dialogs that draft by text take words, and the tokenizer gives other tokens for "
                "those of this chat: chat with a container that does not speculate"
            )
        return words

    def embed(self, texts: Sequence[str], *, pooled: bool = True) -> EmbeddingResult:
        """Embed texts.

        Raises:
            ContainerError: the container holds no text encoder.
            RuntimeChoiceError: the device has neither Python nor a program that embeds.
            RunnerError: the runner crashed, hung or refused.
            RuntimeOutputError: what it left cannot be embeddings of these texts.
        """
        config = self._container.embedding_config.with_output(pooled=pooled)
        runner = self.runner(Embeds)
        if not self._has_python and runner.endswith(".py"):
            reason = f"the SDK has no genie-t2e-run for it, and ours needs Python: {NAMED}"
            raise RuntimeChoiceError(self.device.serial, reason)
        folder = self.folder()
        run = EncoderRun(
            self.device, folder, runner, self.options.runner_timeout_s, tuple(self._logging),
            trace=self._trace,
        )  # fmt: skip
        return run.embed(texts, config)

    def converse(self, request: ConversationRequest) -> ConversationResult:
        """Hold conversations, by the runner of `genie-app` scripts.

        Raises:
            WrongUseError: as `generate`; dialogs of this type have one turn, or a state is of
                another container.
            DeploymentCorruptError: a turn arrived as another.
            RunnerError: Genie refused, crashed or hung.
            RuntimeOutputError: an answer is missing.
        """
        config = framed(config_of(request.settings, self._container), request.framing)
        _refuse_turns(request, config)
        compared = self._compare(config)
        if config.dialog.type in _ASKED_IN_WORDS:
            whole = request.framing is not None
            spoken = (self._spoken(each, whole=whole) for each in request.conversations)
            request = replace(request, conversations=tuple(spoken))
        config = bound_turns(config, request.max_new_tokens)
        script = ConversationScript(request, config)
        folder = self.folder()
        state: Mapping[str, bytes] = {}
        if request.restore is not None:
            state = read_state(request.restore, self._container)
        folder.send({"query_config.json": config.to_json(), **script.inputs(), **state})
        runner = self.runner(Converses)
        command = [*self._command(runner), "-s", script.name]
        if self._has_python:  # options of ours
            command += [*self._logging, *(["--trace", "trace.json"] if self._trace else [])]
        with self.sampling() as samples:
            outcome = folder.run(command, name=runner, timeout_s=self.options.runner_timeout_s)
        answers = [
            [self._answer(folder.read(name), turn) for name, turn in named]
            for named in script.answers()
        ]
        texts = tuple(tuple(text for text, _ in each) for each in answers)
        ids = tuple(tuple(token_ids for _, token_ids in each) for each in answers)
        if request.save is not None:
            write_state(folder, script.saved, request.save, self._container)
        profiled = folder.read(script.profile)
        metrics = parse_profile(profiled, self.device.serial) | outcome.memory
        traced = parse_trace(folder.read("trace.json"), self.device.serial) if self._trace else ""
        end = find_early_end(metrics["generated_tokens"], request.max_new_tokens, None)
        return ConversationResult(
            texts, metrics, profiled, samples.series, traced, compared, early_end=end, token_ids=ids
        )

    def _spoken(self, conversation: Conversation, *, whole: bool) -> Conversation:
        """Return a conversation with words in place of token ids; see `_in_words`."""
        turns = conversation.turns
        words = (
            turn if isinstance(turn, str) else self._words(turn, whole=whole) for turn in turns
        )
        return replace(conversation, turns=tuple(words))

    def positions(self, role: ModelRole = "target") -> Positions:
        """Name the positions that Genie scores."""
        return "draft_first_cl_minus_ar" if role == "draft" else "first_cl_minus_ar"

    def _limit_of(self, role: ModelRole) -> ContextLimit:
        return self._draft_limit if role == "draft" else self._limit

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows by Genie's accuracy API, a fresh process for each.

        Raises:
            WrongUseError: the container has no such adapter.
            RuntimeChoiceError: the device has no Python: of the SDK's programs none scores texts
                in a way that is documented.
            RunnerError: the runner crashed, hung too often or refused.
            RuntimeOutputError: it scored something else than was sent.
        """
        self._require_python(_SCORER)
        adapters: list[str] = []
        if lora:
            config = config_of(DialogSettings(lora=lora), self._container)
            adapters = _lora_arguments(lora, config)
        names = [f"window_{number:04}.txt" for number in range(len(windows))]
        inputs = {name: window.text for name, window in zip(names, windows, strict=True)}
        folder = self.folder()
        config = self._container.genie_config
        if config.dialog.type == "ssd-q1":  # converted by Genie, it keeps its prefix in the context
            config = config.as_basic()
        folder.send({**inputs, "query_config.json": config.to_json()})
        command = [*self._command(_SCORER), "-c", "query_config.json"]
        command += ["--ar", str(self._limit_of(role).prefill_ar), "--role", role, *adapters]
        command += [*self._logging, *(["--trace", "traces.jsonl"] if self._trace else [])]
        command += ["--out", "perplexity.json", "--window-files", *names]
        timeout_s = self.options.runner_timeout_s * len(windows)
        folder.run(command, name=_SCORER, timeout_s=timeout_s, stdout=_OUTPUT)
        text = folder.read("perplexity.json")
        result = parse_perplexity(text, windows, self.device.serial, self.positions(role))
        if not self._trace:
            return result
        lines = folder.read("traces.jsonl").splitlines()
        traces = tuple(parse_trace(line, self.device.serial) for line in lines)
        return replace(result, traces=traces)

    def decode_steps(self, windows: Sequence[StepWindow]) -> StepLogits:
        """Decode texts step by step, with the tokens of the text whatever the logits say.

        A dialog that speculates is decoded as a plain one of its target.

        Raises:
            RuntimeChoiceError: the device has no Python, and the SDK has no program for this.
            RunnerError: the runner crashed, hung or refused.
            RuntimeOutputError: it left other logits than those of these steps.
        """
        self._require_python(STEP_RUNNER)
        most = max(len(window.following) for window in windows)
        for window in windows:
            self._limit.check(window.bos + len(window.prompt), len(window.following))
        framing = None if windows[0].bos else Framing()
        config = framed(self._container.genie_config.as_basic(), framing).with_dialog(
            sampler=Sampler(type="custom", callback_name=STEP_SAMPLER), max_num_tokens=most
        )
        folder = self.folder()
        run = StepRun(
            self.device,
            folder,
            self.options.runner_timeout_s,
            tuple(self._logging),
            trace=self._trace,
            command=self._command(STEP_RUNNER),
        )
        return run.decode(windows, config)

    def _command(self, runner: str) -> tuple[str, ...]:
        return runner_command(runner, registrations(self._container.metadata.op_packages))

    def _require_python(self, runner: str) -> None:
        if not self._has_python:
            reason = f"{runner} needs Python, which Android has not: {NAMED}"
            raise RuntimeChoiceError(self.device.serial, reason)

    def _count_tokens(
        self, request: GenerationRequest, config: GenieConfig, rows: bytes | None
    ) -> int:
        """Return tokens that the prompt takes in the context, with those that Genie adds."""
        if rows is not None:
            return len(rows) // row_bytes(config, self._container)
        if request.token_ids is not None:
            own, fill = added_tokens(config), request.fill_token_ids
            later = added_tokens(config, after_empty_answer=True) if fill else 0
            return own + len(fill) + later + len(request.token_ids)
        return added_tokens(config) + len(encode(self._tokenizer, request.prompt or ""))

    def _answer(self, text: str, turn: Turn) -> tuple[str, tuple[int, ...] | None]:
        """Return the text of an answer, and its token ids if it has them."""
        ids = None if isinstance(turn, str) else self._parse_ids(text)
        return text if ids is None else self._decode(ids), ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def _parse_ids(self, printed: str) -> tuple[int, ...] | None:
        """Return the ids that answer a token query; the SDK does not document what it prints."""
        if not self._has_python and not _IDS.fullmatch(printed):
            return None
        return parse_ids(printed, self._container.genie_config, self.device.serial)

    @functools.cached_property
    def _draft_limit(self) -> ContextLimit:
        return ContextLimit.of_draft(self._container)
