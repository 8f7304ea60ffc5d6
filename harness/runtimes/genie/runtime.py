"""Genie: a container as its model, the configuration of its dialogs, and its queries on a device.

A runtime has one run folder, and each query is a process of its own.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import ClassVar, Protocol, cast

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_decoding import GREEDY, SPECULATIVE, Sampler
from buildlib.container.manifest import (
    CLIPPED_ADAPTERS,
    GENIE_CONTRACT,
    SpeculationRecord,
    has_file,
)
from buildlib.container.op_packages import registrations
from buildlib.entry_points import load_entry
from buildlib.errors import ModelWarning
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import (
    PromptTooLongError,
    RuntimeChoiceError,
    WrongUseError,
)
from harness.results.derived import measure_energy
from harness.results.records import Positions
from harness.runtimes.base import (
    Capability,
    Conversation,
    ConversationRequest,
    ConversationResult,
    Converses,
    DecodesSteps,
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
from harness.runtimes.bundles.sources import NAMED, PROGRAMS, SDK_PROGRAMS, find_genie, find_python
from harness.runtimes.container_model import (
    ContainerModel,
    ContainerRuntime,
    check_limits,
    has_bos,
    open_container,
    qnn_api_files,
    target_of,
)
from harness.runtimes.deployed import runner_command
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.conversation import (
    ConversationScript,
    alpha_tensor,
    read_state,
    write_state,
)
from harness.runtimes.genie.output import (
    IDS,
    STEP_RUNNER,
    STEP_SAMPLER,
    StepRun,
    complete_figures,
    find_early_end,
    generated_text,
    lacks_figures,
    parse_clock,
    parse_figures,
    parse_ids,
    parse_perplexity,
    parse_profile,
    parse_trace,
)
from harness.runtimes.tokenizer import ContextLimit, encode

_WITHOUT_DEPTH = frozenset({"spd", "ssd-q1", "eaglet", "lade", "multistream"})
"""Dialogs without a second query: they take words alone, go on to the end, or lose tokens."""


def config_of(settings: DialogSettings, container: GenAIContainer) -> GenieConfig:
    """Give the configuration of a container with settings of a dialog."""
    config = container.genie_config
    if settings.genie_config is not None:
        config = GenieConfig.from_file(Path(settings.genie_config))
        check_limits(config, settings.genie_config, target_of(container))
        for name in config.referenced_files:
            if not has_file(container.metadata.files, name):
                raise WrongUseError(
                    f"{settings.genie_config} names {name}, which is not in {container.path}"
                )
        own, given = _kv_dim(container.genie_config), _kv_dim(config)
        if given not in {own, None}:
            warnings.warn(
                f"{settings.genie_config}: kv-dim is {given}, and the heads of the graphs have "
                f"{own}: Genie 1.21 takes the graphs'",
                ModelWarning,
                stacklevel=2,
            )
    if config.dialog.type == "lade" and config.dialog.embedding is not None:
        raise WrongUseError(
            f"{container.path} looks tokens up on the host, which dialogs of type lade do not "
            "do: build it without --embedding-lut"
        )
    for name, strength in (settings.lora or {}).items():
        _check_adapter(name, strength, config, container)
    return config.with_dialog(sampler=_sampler_of(settings), stop_sequence=settings.stop)


def _kv_dim(config: GenieConfig) -> int | None:
    htp = config.dialog.target_engine.backend.qnn_htp
    return None if htp is None else htp.kv_dim


def framed(config: GenieConfig, framing: Framing | None) -> GenieConfig:
    """Give the configuration of a dialog with prompts that have their own special tokens.

    Genie 1.21 puts the first end-of-sequence token after an answer that another one ended, or none.
    """
    if framing is None:
        return config
    first = () if framing.end_token is None else (framing.end_token,)
    others = (token for token in eos_tokens(config) if token not in first)
    return config.with_special_tokens(bos_token=-1, eos_token=(*first, *others))


def eos_tokens(config: GenieConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a dialog."""
    eos = config.dialog.context.eos_token
    return eos if isinstance(eos, tuple) else (eos,)


def _sampler_of(settings: DialogSettings) -> Sampler:
    """Return Genie's sampler: a dialog is greedy by `top-k` 1, since Genie ignores `greedy`."""
    if settings.is_greedy:
        return GREEDY
    return Sampler.model_validate(settings.sampling)


def _check_adapter(
    name: str, strength: float, config: GenieConfig, container: GenAIContainer
) -> None:
    """Refuse an adapter that the container does not have, or not in that strength."""
    lora = config.dialog.target_engine.model.lora
    if lora is None:
        raise WrongUseError(
            f"{container.path} has no LoRA adapters: `qnnfarm build --lora` makes some"
        )
    names = [adapter.name for adapter in lora.adapters]
    if name not in names:
        raise WrongUseError(f"{container.path} has no adapter {name!r}: it has {', '.join(names)}")
    _check_strength(container, name, strength)


def _check_strength(container: GenAIContainer, name: str, strength: float) -> None:
    """Refuse a strength that the graphs cannot take; warn of one that their ranges do not cover."""
    from buildlib.builder.lora_config import MAX_STRENGTH

    if not 0.0 <= strength <= MAX_STRENGTH:
        raise WrongUseError(
            f"--lora {name}={strength:g}: the graphs take strengths from 0 to {MAX_STRENGTH:g}; a "
            "use case of the build (`use_cases` of its LoRA file) can have any weight"
        )
    clipped = str(container.metadata.model.quantization.get(CLIPPED_ADAPTERS, "")).split(", ")
    reason = None
    if name in clipped and strength:
        reason = "leaves the ranges of the container, which keep to the model without adapters"
    elif strength > 1.0:
        reason = "is stronger than 1, which the ranges of the container are made for"
    if reason is not None:
        warnings.warn(
            f"adapter {name}={strength:g} {reason}: its values are clipped, and text and "
            "perplexity may be worse",
            ModelWarning,
            stacklevel=2,
        )


def check_depth(config: GenieConfig) -> None:
    """Refuse a type of dialog that has no query before a prompt."""
    if config.dialog.type in _WITHOUT_DEPTH:
        raise WrongUseError(
            f"depth_tokens: a dialog of type {config.dialog.type} answers one prompt, and a "
            "depth is a query before it: leave the depth out, or measure a basic dialog"
        )


def added_tokens(config: GenieConfig, *, after_empty_answer: bool = False) -> int:
    """Return how many tokens Genie 1.21 puts before a prompt of text or tokens.

    Bos, unless the configuration has -1 for it. Before a query after one that was to answer nothing
    there is one more, and with an embedding table on the host another: Genie then generates one
    token even so.
    """
    count = int(config.dialog.context.bos_token >= 0)
    if after_empty_answer:
        count += 1 + (config.dialog.embedding is not None)
    return count


def bound_answer(
    config: GenieConfig, limit: ContextLimit, prompt_tokens: int, new_tokens: int
) -> GenieConfig:
    """Bound the answer of one query, by the settings that its type of dialog obeys.

    Dialogs of type `lade` and `multistream` ignore `max-num-tokens` and go on to the end of their
    context; so they get a smaller one. Genie loses all streams of a dialog that comes closer to the
    end of the graphs' context than one prefill call.

    Args:
        prompt_tokens: with bos.
    """
    dialog = config.dialog
    size = dialog.context.size
    if dialog.multistream is not None:
        size = prompt_tokens + dialog.multistream.n_streams * new_tokens
        if size > limit.longest_prompt:
            raise PromptTooLongError(
                prompt_tokens, size - prompt_tokens, limit.longest_prompt, limit.longest_prompt
            )
    elif dialog.type == "lade":
        ahead = limit.prefill_ar
        if dialog.lade is not None:
            ahead = dialog.lade.tokens_per_step or ahead
        size = min(size, prompt_tokens + new_tokens + ahead)
    return config.with_turns_of(new_tokens).with_dialog(context_size=size)


DIALOGS = "dialogs"
"""Entry points of what checks dialogs; one, `speculation`, a `DialogCheck`."""
Ask = Callable[[GenieConfig, str, int], str]
"""Answer of a new dialog on the device to a prompt, in so many tokens."""


class DialogCheck(Protocol):
    """The module at the door `dialogs`: do dialogs that speculate say what plain decoding says?"""

    def find_fault(self, kind: str) -> str:
        """Say why a type of dialog is refused with the installed Genie; empty if it is not."""

    def compare(
        self, config: GenieConfig, container: GenAIContainer, genie: tuple[str, str], ask: Ask
    ) -> SpeculationRecord:
        """Compare a dialog's texts with plain decoding's, by the Genie of this name and SHA-256."""


def find_dialog_check(config: GenieConfig, container: GenAIContainer) -> DialogCheck | None:
    """Return what checks a dialog that speculates, None for others; refuse one that is wrong."""
    kind = config.dialog.type
    if kind not in SPECULATIVE:
        return None
    check = cast("DialogCheck | None", load_entry(DIALOGS, "speculation"))
    if check is None:
        fault = f"dialogs of type {kind} need the plugin `speculation`, which checks their text"
    else:
        fault = check.find_fault(kind) if container.metadata.target.emulator else ""
    if fault:
        raise WrongUseError(f"{container.path} cannot run: {fault}")
    return check


_OUTPUT = "output.txt"
_SCORER = "genie_perplexity.py"
_TRIES = 4
"""Of a window, which Genie's accuracy API may leave without an end."""
_ASKED_IN_WORDS = frozenset({"spd", "ssd-q1", "eaglet"})
_PROGRAMS: Mapping[Capability, tuple[str, ...]] = {
    Generates: ("genie-t2t-run", "genie_t2t_run.py"),
    Converses: ("genie-app", "genie_app.py"),
    Scores: (_SCORER,),
    DecodesSteps: (STEP_RUNNER,),
}
"""The documented program of each capability, and ours where that does not exist."""


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


_RUNNER_FILES = (
    "genie_api.py", "genie_app.py", "genie_app_script.py", "genie_embeddings.py",
    "genie_logits.py", "genie_nodes.py", "genie_perplexity.py",
    "genie_t2t_run.py", "genie_trace.py",
)  # fmt: skip


def genie_bundle(container: GenAIContainer, abi: str) -> Bundle:
    """Collect all that Genie needs to run a container on devices of an ABI.

    The SDK's programs run where devices have no Python; ours, which do more, where they have one or
    the user gives one.
    """
    bundle, python = find_genie(abi, target_of(container).soc), find_python(abi)
    if python:
        libraries = {name: file for name, file in bundle.files.items() if name not in SDK_PROGRAMS}
        bundle = replace(bundle, files={**libraries, **python})
    files = {name: DeployFile(path, origin="container") for name, path in container.files.items()}
    if PROGRAMS[0] not in bundle.files:
        scripts = resources.files("device_scripts")
        paths = {name: Path(str(scripts / name)) for name in _RUNNER_FILES}
        if container.metadata.op_packages:
            paths |= qnn_api_files()
        files |= {name: DeployFile(path, origin="qnnfarm") for name, path in paths.items()}
    return bundle.add(files)


class GenieRuntime(ContainerRuntime):
    """A container on a device, run by Genie; `Runtime` of all capabilities but `MeasuresSpeed`.

    Attributes:
        has_python: whether the device has Python, for programs of ours.
        logging: options of a program for Genie's own log.

    Args:
        options: with a trace only where the device has Python.
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
        self._origin = self.bundle.files["libGenie.so"].origin
        self.has_python = PROGRAMS[0] not in self.bundle.files
        log_level = self.options.log_level
        if log_level is None and self.has_python:
            log_level = "error"  # the SDK's program writes its log among Android's
        self.logging = ["--log", log_level] if log_level else []
        if self.options.trace and not self.has_python:
            reason = "the SDK's genie-t2t-run writes no trace: leave out --trace"
            raise RuntimeChoiceError(device.serial, reason)
        if container.metadata.op_packages and not self.has_python:
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
        programs = _PROGRAMS[capability]
        return next((name for name in programs if name in self.bundle.files), programs[-1])

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
        """Run one query; the first of a speculating dialog may compare it with plain decoding."""
        config = framed(config_of(request.settings, self._container), request.framing)
        speculation = self._compare(config)
        return replace(self._query(request, config), speculation=speculation)

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
            check = find_dialog_check(config, self._container)
            found = None if check is None else check.compare(config, self._container, genie, ask)
            self._compared[kind] = found
        return self._compared[kind]

    def _query(self, request: GenerationRequest, config: GenieConfig) -> GenerationResult:
        request = self._in_words(request, config)
        rows = None
        if request.embeddings is not None:
            from harness.runtimes.genie.prompt_embeddings import read_embeddings

            rows = read_embeddings(request.embeddings, config, self._container)
        limit = self._limit.for_dialog(config)
        prompt_tokens = self._count_tokens(request, config, rows)
        limit.check(prompt_tokens, request.max_new_tokens)
        config = bound_answer(config, limit, prompt_tokens, request.max_new_tokens)
        name, flag, content = _query_of(request, rows)
        inputs: dict[str, str | bytes] = {"query_config.json": config.to_json(), name: content}
        query = [flag, name]
        if request.fill_token_ids:
            check_depth(config)
            if not self.has_python:
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
        command += ["--profile", profile, *self.logging]
        trace = f"trace-{self._queries}.json"
        command += ["--trace", trace] if self._trace else []
        command += _lora_arguments(request.settings.lora or {}, config)
        if self.has_python:
            command += ["--clock", clock]
        with self.sampling():
            outcome = folder.run(
                command, name=runner, stdout=_OUTPUT,
                timeout_s=self.limit_s(new_tokens=request.max_new_tokens),
            )  # fmt: skip
        text = generated_text(folder.read(_OUTPUT), self.device.serial)
        profiled = folder.read(profile)
        figures = parse_figures(profiled, self.device.serial)
        several, most = config.dialog.multistream is not None, request.max_new_tokens
        timed, clocked = None, dict[str, float]()
        lacks_profile = lacks_figures(figures)
        if self.has_python:
            timed = parse_clock(folder.read(clock), self.device.serial)
            clocked = timed.metrics(prompt_tokens) if lacks_profile else {}
        metrics = complete_figures(figures, clocked, self.device.serial)
        tails = {} if timed is None or several else timed.tails
        energy = measure_energy(metrics, self.samples, timed.began_s if timed else None)
        ids = None if request.token_ids is None else self._parse_ids(text)
        text = text if ids is None else self._decode(ids)
        traced = parse_trace(folder.read(trace), self.device.serial) if self._trace else ""
        count, stops = metrics["generated_tokens"], bool(config.dialog.stop_sequence)
        return GenerationResult(
            text,
            metrics | tails | energy | outcome.memory,
            self.samples,
            profiled,
            traced,
            token_ids=ids,
            streams=tuple(text.rstrip("\n").split("\n")) if several else (),
            clocked=frozenset(metrics.keys() - figures.keys()),
            early_end=None if several else find_early_end(count, most, timed, stops=stops),
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

    def converse(self, request: ConversationRequest) -> ConversationResult:
        """Hold conversations, by the runner of `genie-app` scripts."""
        config = framed(config_of(request.settings, self._container), request.framing)
        _refuse_turns(request, config)
        speculation = self._compare(config)
        if config.dialog.type in _ASKED_IN_WORDS:
            whole = request.framing is not None
            spoken = (self._spoken(each, whole=whole) for each in request.conversations)
            request = replace(request, conversations=tuple(spoken))
        config = config.with_turns_of(request.max_new_tokens)
        script = ConversationScript(request, config)
        folder = self.folder()
        state: Mapping[str, bytes] = {}
        if request.restore is not None:
            state = read_state(request.restore, self._container)
        folder.send({"query_config.json": config.to_json(), **script.inputs(), **state})
        runner = self.runner(Converses)
        command = [*self._command(runner), "-s", script.name]
        if self.has_python:  # options of ours
            command += [*self.logging, *(["--trace", "trace.json"] if self._trace else [])]
        with self.sampling():
            turns = sum(len(each.turns) for each in request.conversations)
            timeout_s = self.limit_s(turns, request.max_new_tokens)
            outcome = folder.run(command, name=runner, timeout_s=timeout_s)
        answers = [
            [self._answer(folder.read(name), turn) for name, turn in files]
            for files in script.answers()
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
            texts,
            metrics,
            profiled,
            self.samples,
            traced,
            speculation,
            early_end=end,
            token_ids=ids,
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
        if has_bos(self._container):
            return "draft_first_cl_minus_ar" if role == "draft" else "first_cl_minus_ar"
        return "draft_no_bos_first_cl_minus_ar" if role == "draft" else "no_bos_first_cl_minus_ar"

    def _limit_of(self, role: ModelRole) -> ContextLimit:
        return self._draft_limit if role == "draft" else self._limit

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows by Genie's accuracy API, a fresh process for each."""
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
        command += [*self.logging, *(["--trace", "traces.jsonl"] if self._trace else [])]
        # The tries of a window share its time.
        command += ["--timeout", f"{self.limit_s() / _TRIES:g}", "--retries", str(_TRIES - 1)]
        command += ["--out", "perplexity.json", "--window-files", *names]
        folder.run(command, name=_SCORER, timeout_s=self.limit_s(len(windows)), stdout=_OUTPUT)
        text = folder.read("perplexity.json")
        result = parse_perplexity(text, windows, self.device.serial, self.positions(role))
        if not self._trace:
            return result
        lines = folder.read("traces.jsonl").splitlines()
        traces = tuple(parse_trace(line, self.device.serial) for line in lines)
        return replace(result, traces=traces)

    def decode_steps(self, windows: Sequence[StepWindow]) -> StepLogits:
        """Decode texts step by step; each step goes on with the token of the text.

        A dialog that speculates is decoded as a plain one of its target.
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
            self.limit_s(new_tokens=most),
            tuple(self.logging),
            trace=self._trace,
            command=self._command(STEP_RUNNER),
        )
        return run.decode(windows, config)

    def _command(self, runner: str) -> tuple[str, ...]:
        return runner_command(runner, registrations(self._container.metadata.op_packages))

    def _require_python(self, runner: str) -> None:
        if not self.has_python:
            reason = f"{runner} needs Python, which Android has not: {NAMED}"
            raise RuntimeChoiceError(self.device.serial, reason)

    def _count_tokens(
        self, request: GenerationRequest, config: GenieConfig, rows: bytes | None
    ) -> int:
        """Return tokens that the prompt takes in the context, with those that Genie adds."""
        if rows is not None:
            from harness.runtimes.genie.prompt_embeddings import row_bytes

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
        """Return the ids of an answer to token ids; the SDK does not document its output."""
        if not self.has_python and not IDS.fullmatch(printed):
            return None
        return parse_ids(printed, self._container.genie_config, self.device.serial)

    @functools.cached_property
    def _draft_limit(self) -> ContextLimit:
        return ContextLimit.of_draft(self._container)


RUNTIME = GenieRuntime


def runs(path: Path) -> bool:
    """Return whether it is a folder, as containers are, or nothing yet."""
    return not path.is_file()


def open_model(path: Path) -> "GenieModel":
    """Open a container; see `open_container`."""
    container = open_container(path)
    contract = container.metadata.contract
    if contract != GENIE_CONTRACT:
        raise WrongUseError(
            f"{path} holds graphs of the contract {contract}, which Genie does not run: use "
            "--runtime graph"
        )
    return GenieModel(container)


@dataclass(frozen=True)
class GenieModel(ContainerModel):
    """A container that Genie runs; `Model`."""

    runtime: ClassVar[type[GenieRuntime]] = GenieRuntime

    def dialog_config(self, settings: DialogSettings, depth_tokens: int) -> GenieConfig:
        """Return the configuration of a dialog; refuse one that Genie cannot hold."""
        config = config_of(settings, self.container)
        if depth_tokens:
            check_depth(config)
        find_dialog_check(config, self.container)
        return config
