#!/usr/bin/env python3
"""Greedy generation, step logits and scores of a model by its graphs, without Genie.

Reads the same configuration as Genie, and drives the context binaries that it names through the QNN
C API. Standard library only, Python 3.8+. Exit status: 0 success, 1 QNN or a file failed, 2 wrong
use.
"""

import argparse
import array
import json
import math
import os
import sys
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

from buildlib.toolchains.qnn.refusal import RefusedError

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_logits, genie_t2t_run, genie_trace

    from plugins.diagnosis.on_device import graph_model
else:  # beside this file on the device
    import genie_api
    import genie_logits
    import genie_t2t_run
    import genie_trace

    import graph_model

_FORMAT = 1
OpPackage = Tuple[str, str, str]


def op_package(text: str) -> OpPackage:
    """Read PATH:PROVIDER or PATH:PROVIDER:TARGET; raises `ValueError`."""
    words = text.split(":")
    if len(words) not in (2, 3) or not all(words):
        raise ValueError(text)
    return words[0], words[1], words[2] if len(words) == 3 else "CPU"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    build = argparse.ArgumentParser(prog="graph-run", allow_abbrev=False, description=__doc__)
    build.add_argument("-c", "--config", metavar="FILE", required=True, help="dialog JSON of Genie")
    work = build.add_mutually_exclusive_group(required=True)
    work.add_argument("--describe", action="store_true", help="print the graphs as JSON")
    work.add_argument(
        "-tok", "--tokens_file", metavar="FILE", help="token ids to answer, separated by spaces"
    )
    work.add_argument(
        "--windows",
        metavar="FILE",
        help='decode texts step by step: JSON array of {"prompt": [ids], "following": [ids]}',
    )
    work.add_argument(
        "--node-cycles",
        metavar="N",
        type=int,
        help="run each graph N times on zeros, and print the least cycles of its nodes as JSON",
    )
    work.add_argument("--score", metavar="FILE", help="score texts: JSON array of arrays of ids")
    build.add_argument("--fill_file", metavar="FILE", help="token ids before those of -tok")
    build.add_argument(
        "--op-package",
        metavar="PATH:PROVIDER[:TARGET]",
        type=op_package,
        action="append",
        default=[],
        help="op package to register before the graphs are loaded; several in their order",
    )
    build.add_argument("--output_file", metavar="FILE", help="float32 logits of --windows")
    build.add_argument("--summary", metavar="FILE", help="JSON of --windows or --score")
    build.add_argument("--dump", metavar="FILE", help="write tensors of a step of -tok, as stored")
    build.add_argument(
        "--step", metavar="N", type=int, default=0, help="of --dump: the one that gives token N"
    )
    build.add_argument("--profile", metavar="FILE", help="write figures in the form of Genie's")
    build.add_argument("--trace", metavar="FILE", help="write a trace that Perfetto reads")
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="QNN's own log")
    build.add_argument("--clock", metavar="FILE", help="write when each token came")
    return build


class Dump:
    """Tensors of the call that gives one token of an answer, as stored.

    The file begins with a line of JSON that describes them; their bytes follow in its order.

    Args:
        step: number of the token, from 0.
    """

    def __init__(self, path: str, step: int) -> None:
        self._path = path
        self._step = step
        self._calls = 0
        self.done = False

    def take(self, model: graph_model.LoadedModel, call: graph_model.ChainCall) -> None:
        """Write the inputs and outputs, if this is the step's call, but for the cache before it."""
        self._calls += 1
        if self._calls != self._step + 1:
            return
        chain = call.chain
        caches = {one.past.name for one in chain.kv}  # the call's columns are in it by now
        ports = {name: port for name, port in chain.inputs.items() if name not in caches}
        ports.update(chain.outputs)
        described = [
            {
                "name": port.name, "shape": port.shape, "code": "e" if port.is_half else port.code,
                "scale": port.scale, "offset": port.offset, "size": port.size,
            }
            for port in ports.values()
        ]  # fmt: skip
        head = {
            "format": _FORMAT, "first": call.first, "tokens": call.tokens, "slots": chain.slots,
            "tensors": described,
        }  # fmt: skip
        data = [model.memory.of(port)[: port.count].tobytes() for port in ports.values()]
        content = json.dumps(head).encode() + b"\n" + b"".join(data)
        genie_t2t_run.write_file(content, self._path, "dump")
        self.done = True


class TimeRecorder:
    """Times of a process, for its profile and its trace."""

    def __init__(self) -> None:
        self._events: List[Dict[str, Any]] = []
        self._calls: List[genie_trace.Event] = []
        self.answers: List[genie_trace.Answer] = []
        self.init_s = 0.0

    def event(self, name: str, began_ns: int, **figures: Tuple[float, str]) -> None:
        """Note an event of the profile that ends now, with figures and their units."""
        start, stop = began_ns // 1000, time.monotonic_ns() // 1000
        values = {key.replace("_", "-"): {"value": v, "unit": u} for key, (v, u) in figures.items()}
        event = {"type": name, "duration": stop - start, "start": start, "stop": stop, **values}
        self._events.append(event)

    def call(self, call: graph_model.ChainCall) -> None:
        """Note the graphs of a call."""
        facts = {"ar": call.chain.ar, "cl": call.chain.cl, "first": call.first}
        for name, began, end in call.spans:
            self._calls.append(
                genie_trace.function(name, began, end, {**facts, "tokens": call.tokens})
            )

    def profile(self) -> bytes:
        """Return the profile, in the form of Genie's."""
        return json.dumps({"components": [self._component()]}).encode()

    def trace(self) -> bytes:
        """Return the trace of the process."""
        return genie_trace.document({"components": [self._component()]}, self.answers, self._calls)

    def _component(self) -> Dict[str, Any]:
        return {"name": "graph0", "type": "graph", "events": self._events}


def greedy(logits: graph_model.View) -> int:
    """Return the lowest id of the largest logit.

    Of uint16 the high bytes are compared first, all at once: `in` and `find` run at the speed of C,
    and a large vocabulary would take as long as a part of the model otherwise.
    """
    if logits.format != "H" or sys.byteorder != "little":
        values = array.array(logits.format, logits.tobytes())
        return int(values.index(max(values)))
    data: bytes = logits.tobytes()
    low, high = data[::2], data[1::2]
    top = next(byte for byte in range(255, -1, -1) if byte in high)
    best = place = high.find(top)
    while place >= 0:
        if low[place] > low[best]:
            best = place
        place = high.find(top, place + 1)
    return best


def generate(
    model: graph_model.LoadedModel,
    prompt: Sequence[int],
    most: int,
    recorder: TimeRecorder,
    clock: genie_t2t_run.TokenClock,
    dump: Optional[Dump] = None,
) -> Iterator[int]:
    """Yield the greedy answer to a prompt, at most so many tokens, without the one that ends it.

    As Genie does, it ends an answer that fills the context with a status of its own in `clock`.
    """
    began = time.monotonic_ns()
    recorder.answers.append((began, 0))
    clock.start()
    moments: List[int] = []
    tokens = prompt
    while True:
        for call in model.feed(tokens):
            recorder.call(call)
        if not moments:
            prefilled = time.monotonic_ns()
        if dump is not None:
            dump.take(model, call)
        token = greedy(model.logits(call, call.tokens - 1))
        moments.append(time.monotonic_ns())
        if token in model.settings.ends:
            break
        clock.takes()
        recorder.answers.append((moments[-1], 1))
        yield token
        if len(moments) >= most:
            break
        if model.cache.n_past + 1 >= model.context:
            clock.status = genie_api.CONTEXT_EXCEEDED
            break
        tokens = [token]
    figures = {
        "num_prompt_tokens": (len(prompt), ""),
        "prompt_processing_rate": (_rate(len(prompt), prefilled - began), "toks/sec"),
        "time_to_first_token": ((moments[0] - began) // 1000, "us"),
        "num_generated_tokens": (len(moments), ""),
    }
    if len(moments) > 1:
        rate = _rate(len(moments) - 1, moments[-1] - moments[0])
        figures["token_generation_rate"] = (rate, "toks/sec")
        figures["token_generation_time"] = ((moments[-1] - moments[0]) // 1000, "us")
    recorder.event("graph_query", began, **figures)


def _rate(count: int, nanoseconds: int) -> float:
    return count * 1e9 / max(nanoseconds, 1)


def answer_query(
    options: argparse.Namespace, model: graph_model.LoadedModel, recorder: TimeRecorder
) -> None:
    """Answer token ids, and print the ids in the form of our genie-t2t-run."""
    tokens = read_tokens(options.tokens_file, model)
    fill = read_tokens(options.fill_file, model) if options.fill_file else []
    most = genie_t2t_run.answer_bound(genie_api.read_file(options.config, "configuration"))
    begin = [model.settings.bos] if model.settings.bos >= 0 else []
    if fill:
        for _ in model.feed([*begin, *fill]):
            pass
        begin = []
    clock = genie_t2t_run.TokenClock()
    clock.init_s = recorder.init_s
    genie_t2t_run.write(b"[PROMPT]: " + " ".join(map(str, tokens)).encode() + b"\n\n[BEGIN]: ")
    dump = Dump(options.dump, options.step) if options.dump else None
    answer = generate(model, [*begin, *tokens], most, recorder, clock, dump)
    for number, token in enumerate(answer):
        genie_t2t_run.write(b"%s%d" % (b" " if number else b"", token))
    genie_t2t_run.write(b"[END]\n\n")
    genie_t2t_run.check_status(clock.status, generated=True)
    if dump is not None and not dump.done:
        raise genie_api.FatalError(f"the answer ends before step {options.step}")
    if options.clock is not None:
        genie_t2t_run.write_file(clock.json().encode(), options.clock, "clock")


def read_tokens(path: str, model: graph_model.LoadedModel) -> List[int]:
    """Return the ids of a tokens file."""
    tokens = genie_t2t_run.parse_tokens(genie_api.read_file(path, "tokens file"))
    return checked(tokens, model)


def checked(tokens: List[int], model: graph_model.LoadedModel) -> List[int]:
    """Return tokens, and refuse one outside of the vocabulary."""
    size = model.settings.vocabulary
    for token in tokens:
        if type(token) is not int or not 0 <= token < size:
            raise genie_api.FatalError(f"token {token!r} is outside the vocabulary of {size}")
    return tokens


class Floats:
    """Real numbers of stored logits, by a table of all integers where they are quantized."""

    def __init__(self, port: graph_model.GraphPort) -> None:
        least, most = graph_model.BOUNDS.get(port.code, (0, -1))
        self._least = least
        values = range(least, most + 1)
        self._reals = [(value + port.offset) * port.scale for value in values]
        # Relative to the largest that the grid holds: sums of any row are at least 1 token's.
        self._weights = [math.exp((value - most) * port.scale) for value in values]
        self._top = self._reals[-1] if self._reals else 0.0

    def real(self, logits: graph_model.View) -> "array.array[float]":
        """Return a row as float32."""
        if not self._reals:
            return array.array("f", logits.tobytes())
        return array.array("f", map(self._reals.__getitem__, self._indices(logits)))

    def loss(self, logits: graph_model.View, token: int) -> float:
        """Return the negative log-likelihood of a token."""
        if not self._reals:
            return _loss(logits.tolist(), token)
        indices = self._indices(logits)
        total = sum(map(self._weights.__getitem__, indices))
        if total > 0.0:
            return math.log(total) + self._top - self._reals[indices[token]]
        # All weights were too small for a float.
        return _loss([self._reals[index] for index in indices], token)

    def _indices(self, logits: graph_model.View) -> Sequence[int]:
        values = logits.tolist()
        return [value - self._least for value in values] if self._least else values


def _loss(logits: Sequence[float], token: int) -> float:
    top = max(logits)
    return math.log(sum(math.exp(one - top) for one in logits)) + top - logits[token]


def decode_windows(
    options: argparse.Namespace, model: graph_model.LoadedModel, recorder: TimeRecorder
) -> None:
    """Decode texts step by step, with the tokens of the text in place of the likeliest."""
    windows = genie_logits.read_windows(options.windows)
    begin = [model.settings.bos] if model.settings.bos >= 0 else []
    floats = Floats(model.chains[0].logits)
    step_bytes, progress = 0, genie_api.ProgressFile()
    with open(options.output_file, "wb") as sink:
        for number, window in enumerate(windows, start=1):
            checked([*window.prompt, *window.following], model)
            model.reset()
            began = time.monotonic_ns()
            tokens = [*begin, *window.prompt]
            for step, following in enumerate(window.following):
                progress.tell(f"window {number}/{len(windows)}, step {step}")
                for call in model.feed(tokens):
                    recorder.call(call)
                row = floats.real(model.logits(call, call.tokens - 1)).tobytes()
                step_bytes = len(row)
                sink.write(row)
                tokens = [following]
            recorder.event("graph_steps", began)
            count = len(window.following)
            print(f"window {number}/{len(windows)}: {count} steps", flush=True)
    steps = [len(window.following) for window in windows]
    summary = {"format": _FORMAT, "step_bytes": step_bytes, "steps": steps}
    genie_t2t_run.write_file(json.dumps(summary).encode(), options.summary, "summary")


def score_windows(
    options: argparse.Namespace, model: graph_model.LoadedModel, recorder: TimeRecorder
) -> None:
    """Score all tokens of texts, each from an empty context, by prefill alone."""
    windows = json.loads(genie_api.read_file(options.score, "windows"))
    if not windows or not all(isinstance(one, list) and one for one in windows):
        raise genie_api.FatalError(f"{options.score} holds no windows")
    begin = [model.settings.bos] if model.settings.bos >= 0 else []
    floats, progress = Floats(model.chains[0].logits), genie_api.ProgressFile()
    scores, losses = [], []
    for number, window in enumerate(windows, start=1):
        tokens = [*begin, *checked(window, model)]
        model.reset()
        began = time.monotonic_ns()
        loss = 0.0
        for call in model.feed(tokens[:-1]):
            progress.tell(f"window {number}/{len(windows)}, token {call.first}")
            recorder.call(call)
            for row in range(call.tokens):
                loss += floats.loss(model.logits(call, row), tokens[call.first + row + 1])
        recorder.event("graph_score", began)
        scored = len(tokens) - 1
        losses.append(loss)
        scores.append({"perplexity": math.exp(loss / scored), "tokens": scored})
        print(f"window {number}/{len(windows)} perplexity={scores[-1]['perplexity']}", flush=True)
    total = sum(int(score["tokens"]) for score in scores)
    summary = {
        "format": _FORMAT, "perplexity": math.exp(sum(losses) / total), "n_tokens": total,
        "positions": "first_cl_minus_ar", "retries": 0, "windows": scores,
    }  # fmt: skip
    genie_t2t_run.write_file(json.dumps(summary).encode(), options.summary, "summary")


def describe(model: graph_model.LoadedModel) -> None:
    """Print the graphs of a model as JSON."""

    def ports(listed: Dict[str, graph_model.GraphPort]) -> Dict[str, Any]:
        return {
            name: {
                "shape": port.shape,
                "code": port.code,
                "scale": port.scale,
                "offset": port.offset,
            }
            for name, port in listed.items()
        }

    chains = [
        {
            "ar": chain.ar,
            "cl": chain.cl,
            "graphs": {
                part.name: {"inputs": ports(part.inputs), "outputs": ports(part.outputs)}
                for part in chain.parts
            },
        }
        for chain in model.chains
    ]
    print(json.dumps({"contract": model.contract.name, "chains": chains}, indent=1))


def print_node_cycles(model: graph_model.LoadedModel, repetitions: int) -> None:
    """Print the cycles of each node as JSON: `{graph: [[name, cycles], ...]}`, the least of all."""
    answer = {}
    for chain in model.chains:
        for port in chain.inputs.values():
            zeros = array.array(port.code, [port.stored(0.0)]) * port.count
            model.memory.write(port, zeros.tobytes())
        for part in chain.parts:
            runs = [part.node_cycles() for _ in range(max(1, repetitions))]
            answer[part.name] = [
                (same[0][0], min(cycles for _, cycles in same)) for same in zip(*runs)
            ]
    print(json.dumps(answer))


def run(options: argparse.Namespace, stop: genie_api.Stop) -> None:
    """Load the model and do one of the works of the options."""
    settings = graph_model.Settings.read(options.config)
    if options.tokens_file is not None and not settings.greedy:
        raise genie_api.FatalError("it chooses greedily: set top-k of the sampler to 1")
    recorder = TimeRecorder()
    began = time.monotonic_ns()
    level = genie_api.LOG_LEVELS[options.log or "error"]
    model = graph_model.LoadedModel(settings, options.op_package, stop, level)
    recorder.init_s = (time.monotonic_ns() - began) / 1e9
    recorder.event("graph_load", began, init_time=(int(recorder.init_s * 1e6), "us"))
    if options.describe:
        describe(model)
    elif options.node_cycles is not None:
        print_node_cycles(model, options.node_cycles)
    elif options.tokens_file is not None:
        answer_query(options, model, recorder)
    elif options.windows is not None:
        decode_windows(options, model, recorder)
    else:
        score_windows(options, model, recorder)
    if options.profile is not None:
        genie_t2t_run.write_file(recorder.profile(), options.profile, "profile")
    if options.trace is not None:
        genie_t2t_run.write_file(recorder.trace(), options.trace, "trace")


def main(arguments: Optional[Sequence[str]] = None, stop: Optional[genie_api.Stop] = None) -> int:
    """Run the program and return its exit status."""
    build = parser()
    options = build.parse_args(arguments)
    if options.fill_file is not None and options.tokens_file is None:
        build.error("argument --fill_file: goes with -tok/--tokens_file")
    if options.dump is not None and options.tokens_file is None:
        build.error("argument --dump: goes with -tok/--tokens_file")
    if options.windows is not None and (options.output_file is None or options.summary is None):
        build.error("argument --windows: goes with --output_file and --summary")
    if options.score is not None and options.summary is None:
        build.error("argument --score: goes with --summary")
    try:
        run(options, stop or genie_api.Stop())
    except (genie_api.FatalError, RefusedError, OSError, ValueError) as error:
        return genie_t2t_run.fail("graph-run", error)
    return 0


def divert_libraries() -> None:
    """Send the output of libraries to stderr, apart from answers; some log past the API."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


if __name__ == "__main__":
    divert_libraries()
    genie_api.leave(main(stop=genie_api.Stop.watching()))
