"""libGenie's C API through ctypes, for the runners beside this file (Python 3.8+, stdlib only).

Sources: Qualcomm's public documentation (80-63442-10: ``api_root``, ``json``, ``profile_json``,
``accuracy_accuracy``), BSD-licensed users of the API (quic/ai-hub-apps,
quic/ai-engine-direct-helper) and runs against the library. The API promises no thread safety: one
thread uses it here.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar

STATUS_NAMES = {
    0: "GENIE_STATUS_SUCCESS",
    1: "GENIE_STATUS_WARNING_ABORTED",
    2: "GENIE_STATUS_WARNING_BOUND_HANDLE",
    3: "GENIE_STATUS_WARNING_PAUSED",
    4: "GENIE_STATUS_WARNING_CONTEXT_EXCEEDED",
    -1: "GENIE_STATUS_ERROR_GENERAL",
    -2: "GENIE_STATUS_ERROR_INVALID_ARGUMENT",
    -3: "GENIE_STATUS_ERROR_MEM_ALLOC",
    -4: "GENIE_STATUS_ERROR_INVALID_CONFIG",
    -5: "GENIE_STATUS_ERROR_INVALID_HANDLE",
    -6: "GENIE_STATUS_ERROR_QUERY_FAILED",
    -7: "GENIE_STATUS_ERROR_JSON_FORMAT",
    -8: "GENIE_STATUS_ERROR_JSON_SCHEMA",
    -9: "GENIE_STATUS_ERROR_JSON_VALUE",
    -10: "GENIE_STATUS_ERROR_GENERATE_FAILED",
    -11: "GENIE_STATUS_ERROR_GET_HANDLE_FAILED",
    -12: "GENIE_STATUS_ERROR_APPLY_CONFIG_FAILED",
    -13: "GENIE_STATUS_ERROR_SET_PARAMS_FAILED",
    -14: "GENIE_STATUS_ERROR_BOUND_HANDLE",
}
CONTEXT_EXCEEDED = 4
OP_PACKAGES = "QNNFARM_OP_PACKAGES"
LOG_LEVELS = {"error": 1, "warn": 2, "info": 3, "verbose": 4}
PERFORMANCE_POLICIES = {
    "GENIE_PERFORMANCE_BURST": 10,
    "GENIE_PERFORMANCE_SUSTAINED_HIGH_PERFORMANCE": 20,
    "GENIE_PERFORMANCE_HIGH_PERFORMANCE": 30,
    "GENIE_PERFORMANCE_BALANCED": 40,
    "GENIE_PERFORMANCE_LOW_BALANCED": 50,
    "GENIE_PERFORMANCE_HIGH_POWER_SAVER": 60,
    "GENIE_PERFORMANCE_POWER_SAVER": 70,
    "GENIE_PERFORMANCE_LOW_POWER_SAVER": 80,
    "GENIE_PERFORMANCE_EXTREME_POWER_SAVER": 90,
}
PRIORITIES = {
    "GENIE_DIALOG_PRIORITY_LOW": 0,
    "GENIE_DIALOG_PRIORITY_NORMAL": 100,
    "GENIE_DIALOG_PRIORITY_NORMAL_HIGH": 150,
    "GENIE_DIALOG_PRIORITY_HIGH": 200,
}
SENTENCE_COMPLETE = 0
SENTENCE_REWIND = 5
ACTION_ABORT = 1
_MOST_DEAF = 8  # pieces that a dialog still gives after it was told to stop
_TRACED = b'{"profile": {"version": 1, "trace": {"version": 1, "enable": true}}}'
_LONGEST_LOG_LINE = 4096
_MOST_AXES = 8
_LARGEST_RESULT = 1 << 30  # bytes; what Genie asks for beyond it is refused, not allocated

_Handle = ctypes.c_void_p
_Text = ctypes.c_char_p
_U32 = ctypes.c_uint32
_QueryCallback = ctypes.CFUNCTYPE(None, _Text, ctypes.c_int, _Handle)
_TokenCallback = ctypes.CFUNCTYPE(None, ctypes.POINTER(_U32), _U32, ctypes.c_int, _Handle)
_EmbeddingCallback = ctypes.CFUNCTYPE(None, ctypes.c_int32, _Handle, _U32, _Handle)
SamplerFunction = ctypes.CFUNCTYPE(
    None, _U32, _Handle, _U32, ctypes.POINTER(ctypes.c_int32), _Handle
)
_VectorCallback = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_U32), _U32, ctypes.POINTER(ctypes.c_float), _Handle
)
NodeTextFunction = ctypes.CFUNCTYPE(None, _Text, ctypes.c_int, _Handle)
_AllocCallback = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
# handle, format, level, nanoseconds since the log was made, the format's va_list
_LogCallback = ctypes.CFUNCTYPE(None, _Handle, _Text, ctypes.c_int, ctypes.c_uint64, _Handle)

_SIGNATURES: Dict[str, Tuple[Any, ...]] = {
    "GenieLog_create": (_Handle, _LogCallback, ctypes.c_int, ctypes.POINTER(_Handle)),
    "GenieLog_free": (_Handle,),
    "GenieProfile_create": (_Handle, ctypes.POINTER(_Handle)),
    "GenieProfile_getJsonData": (_Handle, _AllocCallback, ctypes.POINTER(ctypes.c_void_p)),
    "GenieDialog_query": (_Handle, _Text, ctypes.c_int, _QueryCallback, _Handle),
    "GenieDialog_tokenQuery": (
        _Handle,
        ctypes.POINTER(_U32),
        _U32,
        ctypes.c_int,
        _TokenCallback,
        _Handle,
    ),
    "GenieDialog_embeddingQuery": (
        _Handle,
        _Handle,
        _U32,
        ctypes.c_int,
        _EmbeddingCallback,
        _QueryCallback,
        _Handle,
    ),
    "GenieDialog_embeddingTokenQuery": (
        _Handle,
        _Handle,
        _U32,
        ctypes.c_int,
        _EmbeddingCallback,
        _TokenCallback,
        _Handle,
    ),
    "GenieDialog_setStopSequence": (_Handle, _Text),
    "GenieDialog_setMaxNumTokens": (_Handle, _U32),
    "GenieDialog_signal": (_Handle, ctypes.c_int),
    "GenieDialog_applyLora": (_Handle, _Text, _Text),
    "GenieDialog_setLoraStrength": (_Handle, _Text, _Text, ctypes.c_float),
    "GenieDialog_setPerformancePolicy": (_Handle, ctypes.c_int),
    "GenieDialog_setPriority": (_Handle, _Text, ctypes.c_int),
    "GenieDialog_bindEngine": (_Handle, _Text, _Handle),
    "GenieDialog_getTokenizer": (_Handle, ctypes.POINTER(_Handle)),
    "GenieTokenizer_encode": (
        _Handle,
        _Text,
        _AllocCallback,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(_U32),
    ),
    "GenieTokenizer_decode": (
        _Handle,
        ctypes.POINTER(ctypes.c_int32),
        _U32,
        _AllocCallback,
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "GenieSampler_registerUserDataCallback": (_Text, SamplerFunction, _Handle),
    "GenieEmbedding_generate": (_Handle, _Text, _VectorCallback, _Handle),
    "GenieEmbedding_setPerformancePolicy": (_Handle, ctypes.c_int),
    "GenieNode_setData": (_Handle, ctypes.c_int, _Handle, ctypes.c_size_t, _Text),
    "GenieNode_setTextCallback": (_Handle, ctypes.c_int, NodeTextFunction),
    "GeniePipeline_addNode": (_Handle, _Handle),
    "GeniePipeline_execute": (_Handle, _Handle),
    "GenieAccuracy_createFromDialog": (_Handle, _Handle, ctypes.POINTER(_Handle)),
    "GenieAccuracy_compute": (_Handle, _AllocCallback, ctypes.POINTER(ctypes.c_void_p)),
}
_MODELS = ("Dialog", "Embedding", "Engine", "Node", "Pipeline")
for _kind in _MODELS:
    _SIGNATURES[f"Genie{_kind}Config_bindProfiler"] = (_Handle, _Handle)
    _SIGNATURES[f"Genie{_kind}Config_bindLogger"] = (_Handle, _Handle)
    _SIGNATURES[f"Genie{_kind}_create"] = (_Handle, ctypes.POINTER(_Handle))
for _kind in (*_MODELS, "Profile", "Accuracy"):
    _SIGNATURES[f"Genie{_kind}Config_createFromJson"] = (_Text, ctypes.POINTER(_Handle))
    _SIGNATURES[f"Genie{_kind}Config_free"] = (_Handle,)
    _SIGNATURES[f"Genie{_kind}_free"] = (_Handle,)
for _kind in ("Dialog", "Pipeline"):
    _SIGNATURES[f"Genie{_kind}_reset"] = (_Handle,)
    _SIGNATURES[f"Genie{_kind}_save"] = (_Handle, _Text)
    _SIGNATURES[f"Genie{_kind}_restore"] = (_Handle, _Text)


class FatalError(Exception):
    """Ends a runner with one line and exit status 1."""


class GenieError(FatalError):
    """A call of the C API returned an error status."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(function, status)
        self.function = function
        self.status = status

    def __str__(self) -> str:
        name = STATUS_NAMES.get(self.status, "an undocumented status")
        return f"{self.function} failed: {name} ({self.status})"


class Interrupted(FatalError):  # noqa: N818  (what happened, not a fault)
    """A signal asked the runner to end; its handles are closed first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


class ProgressFile:
    """Tells ``run.sh`` how far a run is, by a line in the run folder, once a second at most."""

    _PATH = ".qnnfarm/progress"

    def __init__(self) -> None:
        self._told = 0.0

    def tell(self, words: str) -> None:
        """Write words such as ``token 12``, unless others were written within the second."""
        now = time.monotonic()
        if now - self._told < 1.0:
            return
        self._told = now
        try:
            with open(self._PATH, "w") as file:
                file.write(f"{words}\n")
        except OSError:  # not in a run folder, or no space: no reason to fail
            pass


class Stop:
    """Signal that asked this process to end: noted when it comes, acted on between two calls.

    An exception out of a signal handler would be lost in the library's callbacks.
    """

    def __init__(self) -> None:
        self._number = 0

    @classmethod
    def watching(cls) -> "Stop":
        """Return one that notes TERM, INT and HUP from now on."""
        stop = cls()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop._note)
        return stop

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self._number:
            raise Interrupted(self._number)

    def _note(self, number: int, _frame: Optional[FrameType]) -> None:
        self._number = number


def keep_to_one_cpu() -> None:
    """Keep an emulator's process (x86-64) to the CPU that it is on, before it starts threads.

    The emulator computes in one thread, while ten others wait in ``sched_yield``: on a CPU of
    their own they would be busy with that, and slow down other programs of the host.
    """
    if os.uname().machine == "x86_64":
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})


def register_op_packages(packages: str) -> Any:
    """Register op packages with the backend that Genie is going to use.

    Genie takes none itself. It loads a binary that has operations of a package if that is
    registered on any open handle of the backend in its process (seen with Genie 1.21, QNN 2.51).

    Args:
        packages: ``PATH:PROVIDER:TARGET`` of each, in the order of registration, with spaces
            between.

    Returns:
        The backend that must stay open; None for no package.
    """
    if not packages:
        return None
    from buildlib.toolchains.qnn import api, refusal

    package = "libQnnHtp.so"
    try:
        backend = api.HtpBackend(Path(package), whole=False)
        for package in packages.split():
            path, provider, target = package.split(":")
            backend.register_op_package(path, provider, target)
    except (refusal.RefusedError, ValueError) as error:
        raise FatalError(f"cannot register op package {package}: {error}") from error
    return backend


class Genie:
    """The loaded library; every call checks its status.

    The dynamic loader finds it: ``LD_LIBRARY_PATH`` must hold its folder when the process starts,
    because its own dependencies are looked up there too. Op packages that the environment names in
    ``QNNFARM_OP_PACKAGES`` are registered before it.
    """

    def __init__(self, library: str = "libGenie.so", stop: Optional[Stop] = None) -> None:
        self.stop = stop or Stop()
        keep_to_one_cpu()
        self._backend = register_op_packages(os.environ.get(OP_PACKAGES, ""))
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise FatalError(f"cannot load {library}: {error}; set LD_LIBRARY_PATH") from error

    def version(self) -> str:
        """Return the API's version, ``X.Y.Z``."""
        parts = ("Major", "Minor", "Patch")
        numbers = (self._function(f"Genie_getApi{part}Version")() for part in parts)
        return ".".join(str(number & 0xFFFFFFFF) for number in numbers)

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function of the API and return its status: 0, or a positive warning.

        Raises:
            GenieError: The status is an error.
            Interrupted: A signal came before the call; calls that free or stop run all the same.
        """
        if not name.endswith(("_free", "_signal")):
            self.stop.check()
        function = self._function(name)
        function.argtypes = _SIGNATURES[name]
        function.restype = ctypes.c_int32
        status = int(function(*arguments))
        if status < 0:
            raise GenieError(name, status)
        return status

    def create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a ``..._create...`` function and return the handle from its last argument."""
        handle = _Handle()
        self.call(name, *arguments, ctypes.byref(handle))
        if not handle.value:
            raise GenieError(name, -5)
        return handle

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError as error:
            raise FatalError(f"this libGenie.so has no {name}; it is too old") from error


class Buffers:
    """Memory that Genie requests for its results; lives as long as this object."""

    def __init__(self) -> None:
        self._kept: List[Any] = []
        self.callback = _AllocCallback(self._allocate)

    def _allocate(self, size: int, out: Any) -> None:
        if size > _LARGEST_RESULT:
            out[0] = None
            return
        buffer = ctypes.create_string_buffer(size + 1)  # ends in a zero whatever Genie writes
        self._kept.append(buffer)
        out[0] = ctypes.addressof(buffer)

    def text(self, pointer: ctypes.c_void_p) -> bytes:
        """Return the bytes that Genie wrote at ``pointer``, up to the first zero."""
        for buffer in self._kept:
            if pointer.value == ctypes.addressof(buffer):
                return bytes(buffer.value)
        return b""

    def integers(self, pointer: ctypes.c_void_p, count: int) -> List[int]:
        """Return the first ``count`` int32 that Genie wrote at ``pointer``."""
        for buffer in self._kept:
            if pointer.value == ctypes.addressof(buffer):
                whole = min(count, (len(buffer) - 1) // 4)
                return list((ctypes.c_int32 * whole).from_buffer(buffer))
        return []


class Owned:
    """A handle that is freed once."""

    _kind = ""  # as in the names of its functions

    def __init__(self, genie: Genie, handle: ctypes.c_void_p) -> None:
        self.genie = genie
        self.handle: Optional[ctypes.c_void_p] = handle

    def close(self) -> None:
        """Free the handle; Genie refuses while something made from it still lives."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self.genie.call(f"{self._kind}_free", handle)


OwnedType = TypeVar("OwnedType", bound=Owned)


class LogHandle(Owned):
    """The log of Genie and of QNN below it: one line each to stderr, ``[ERROR] text``.

    Without a callback they go to logcat on Android and to stdout elsewhere, among the answers.
    """

    _kind = "GenieLog"

    def __init__(self, genie: Genie, level: str) -> None:
        self._callback = _LogCallback(self._write)  # Genie calls it as long as the log lives
        super().__init__(
            genie, genie.create("GenieLog_create", None, self._callback, LOG_LEVELS[level])
        )

    def _write(self, _log: Any, form: Optional[bytes], level: int, _time: int, values: Any) -> None:
        write_log(form, level, values)


def write_log(form: Optional[bytes], level: int, values: Any) -> None:
    """Write a message of a library to stderr, from its format and the `va_list` of its values."""
    if form is None:  # C would read it
        return
    # A va_list is passed by reference on x86-64 and AArch64 alike.
    line = ctypes.create_string_buffer(_LONGEST_LOG_LINE)
    write = ctypes.CDLL(None).vsnprintf
    write.argtypes = [_Text, ctypes.c_size_t, _Text, _Handle]
    write(line, _LONGEST_LOG_LINE, form, values)
    name = next((name for name, number in LOG_LEVELS.items() if number == level), str(level))
    text = line.value.decode(errors="replace").strip()
    if text:
        os.write(2, f"[{name.upper()}] {text}\n".encode(errors="replace"))


class ProfileHandle(Owned):
    """Genie's own measurements of the dialogs bound to it, with its trace events if asked for."""

    _kind = "GenieProfile"

    def __init__(self, genie: Genie, *, trace: bool = False) -> None:
        if not trace:
            super().__init__(genie, genie.create("GenieProfile_create", None))
            return
        config = genie.create("GenieProfileConfig_createFromJson", _TRACED)
        try:
            super().__init__(genie, genie.create("GenieProfile_create", config))
        finally:
            genie.call("GenieProfileConfig_free", config)

    def json(self) -> bytes:
        """Return the documented profile JSON, as Genie wrote it."""
        buffers = Buffers()
        pointer = ctypes.c_void_p()
        self.genie.call(
            "GenieProfile_getJsonData", self.handle, buffers.callback, ctypes.byref(pointer)
        )
        return buffers.text(pointer)


class ConfigHandle(Owned):
    """A parsed and validated configuration of a Genie object."""

    def __init__(self, genie: Genie, text: bytes) -> None:
        super().__init__(genie, genie.create(f"{self._kind}_createFromJson", text))

    def bind(self, log: Optional[LogHandle], profile: Optional[ProfileHandle] = None) -> None:
        """Let objects that are created from this configuration write to these, if given."""
        if log is not None:
            self.genie.call(f"{self._kind}_bindLogger", self.handle, log.handle)
        if profile is not None:
            self.genie.call(f"{self._kind}_bindProfiler", self.handle, profile.handle)


class LoadedHandle(Owned):
    """An object made from a configuration."""

    def __init__(self, config: ConfigHandle) -> None:
        handle = config.genie.create(f"{self._kind}_create", config.handle)
        super().__init__(config.genie, handle)


class DialogConfigHandle(ConfigHandle):
    """A configuration of a dialog."""

    _kind = "GenieDialogConfig"


TextSink = Callable[[bytes], None]
TokenSink = Callable[[List[int]], None]
Lookup = Callable[[int, int], bytes]


def _pieces(sink: TextSink) -> Callable[..., None]:
    def take(piece: Optional[bytes], _code: int, _data: Optional[int]) -> None:
        if piece:
            sink(piece)

    return take


def _ids(sink: TokenSink) -> Callable[..., None]:
    def take(ids: Any, count: int, _code: int, _data: Optional[int]) -> None:
        if ids and count:
            sink([int(ids[i]) for i in range(count)])

    return take


class DialogHandle(LoadedHandle):
    """A loaded model with its context.

    Attributes:
        answers: When each callback with tokens came, by ``time.monotonic_ns``, and how many it
            brought; 0 for the beginning of a query.
    """

    _kind = "GenieDialog"

    def __init__(self, config: DialogConfigHandle) -> None:
        self.answers: List[Tuple[int, int]] = []
        super().__init__(config)

    def query(self, prompt: bytes, sink: TextSink, *, rewind: bool = False) -> int:
        """Generate, passing each piece to ``sink`` as bytes from Genie.

        A piece may end inside a UTF-8 character. An exception of ``sink``, or a signal, stops the
        generation and is raised here.

        Returns:
            The status: 0, or a warning such as `CONTEXT_EXCEEDED`.
        """
        code = SENTENCE_REWIND if rewind else SENTENCE_COMPLETE
        query = (self.handle, prompt, code)
        return self._generate("GenieDialog_query", query, _QueryCallback, _pieces(sink))

    def token_query(self, tokens: Sequence[int], sink: TokenSink) -> int:
        """Generate from token ids to token ids; otherwise like `query`."""
        ids = (_U32 * len(tokens))(*tokens)
        query = (self.handle, ids, len(tokens), SENTENCE_COMPLETE)
        return self._generate("GenieDialog_tokenQuery", query, _TokenCallback, _ids(sink))

    def embedding_query(self, rows: bytes, lookup: Optional[Lookup], sink: TextSink) -> int:
        """Generate from embeddings to text; otherwise like `query`.

        Args:
            rows: Embeddings of the prompt, bos included, as the graph's input has them.
            lookup: Gives the row of a generated token, of so many bytes; None if the configuration
                names a table.
            sink: As for `query`.
        """
        return self._embedding_query("", rows, lookup, _QueryCallback, _pieces(sink))

    def embedding_token_query(self, rows: bytes, lookup: Optional[Lookup], sink: TokenSink) -> int:
        """Generate from embeddings to token ids; otherwise like `embedding_query`."""
        return self._embedding_query("Token", rows, lookup, _TokenCallback, _ids(sink))

    def _embedding_query(
        self,
        kind: str,
        rows: bytes,
        lookup: Optional[Lookup],
        callback: Any,
        take: Callable[..., None],
    ) -> int:
        failures: List[BaseException] = []

        def write(token: int, target: int, size: int, _data: Optional[int]) -> None:
            row = b""
            if lookup is not None:
                try:
                    row = lookup(token, size)
                except FatalError as error:
                    failures.append(error)
            ctypes.memmove(target, row.ljust(size, b"\0"), size)

        table = _EmbeddingCallback(write) if lookup is not None else _EmbeddingCallback(0)
        buffer = ctypes.create_string_buffer(rows, len(rows))
        pointer = ctypes.cast(buffer, _Handle)
        query = (self.handle, pointer, len(rows), SENTENCE_COMPLETE, table)
        name = f"GenieDialog_embedding{kind}Query"
        return self._generate(name, query, callback, take, failures)

    def _generate(
        self,
        name: str,
        query: Tuple[Any, ...],
        callback: Any,
        take: Callable[..., None],
        failures: Optional[List[BaseException]] = None,
    ) -> int:
        """Run a query; stop it at the first failure of ``take``."""
        errors: List[BaseException] = [] if failures is None else failures
        deaf = 0

        def receive(*piece: Any) -> None:
            nonlocal deaf
            if piece[0]:
                count = piece[1] if callback is _TokenCallback else 1
                self.answers.append((time.monotonic_ns(), count))
            try:
                if not errors:
                    self.genie.stop.check()
                    take(*piece)
                    return
            except BaseException as error:  # noqa: BLE001  (ctypes would print it and go on)
                errors.append(error)
            deaf += 1
            if deaf > _MOST_DEAF:  # lade dialogs take no signal, and would fill the context
                leave(1, str(errors[0]))
            self.genie.call("GenieDialog_signal", self.handle, ACTION_ABORT)

        self.answers.append((time.monotonic_ns(), 0))
        status = self.genie.call(name, *query, callback(receive), None)
        if errors:
            raise errors[0]
        return status

    def save(self, path: str) -> None:
        """Write the conversation into a folder, which is created."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FatalError(f"cannot save into {path}: {error.strerror}") from error
        self.genie.call("GenieDialog_save", self.handle, os.fsencode(path))

    def restore(self, path: str) -> None:
        """Go on with the conversation that `save` wrote."""
        self.genie.call("GenieDialog_restore", self.handle, os.fsencode(path))

    def set_stop_sequence(self, text: Optional[bytes]) -> None:
        """Replace the stop sequences by those of a JSON; None removes them."""
        self.genie.call("GenieDialog_setStopSequence", self.handle, text)

    def set_max_tokens(self, count: int) -> None:
        """Bound the tokens of an answer; lade and multistream dialogs ignore it."""
        self.genie.call("GenieDialog_setMaxNumTokens", self.handle, count)

    def reset(self) -> None:
        """Reset the conversation."""
        self.genie.call("GenieDialog_reset", self.handle)

    def set_performance(self, policy: str) -> None:
        """Set the clock policy, a key of `PERFORMANCE_POLICIES`."""
        self.genie.call(
            "GenieDialog_setPerformancePolicy", self.handle, PERFORMANCE_POLICIES[policy]
        )

    def set_priority(self, engine: str, priority: str) -> None:
        """Set the priority of an engine on the NPU, a key of `PRIORITIES`."""
        number = PRIORITIES[priority]
        self.genie.call("GenieDialog_setPriority", self.handle, engine.encode(), number)

    def bind_engine(self, role: str, engine: Owned) -> None:
        """Use another engine in place of the dialog's own: ``draft`` of a dialog with two."""
        self.genie.call("GenieDialog_bindEngine", self.handle, role.encode(), engine.handle)

    def apply_lora(self, engine: str, adapter: str) -> None:
        """Activate an adapter that the configuration names."""
        self.genie.call("GenieDialog_applyLora", self.handle, engine.encode(), adapter.encode())

    def set_lora_strength(self, engine: str, tensor: str, value: float) -> None:
        """Set the alpha of the active adapter."""
        self.genie.call(
            "GenieDialog_setLoraStrength", self.handle, engine.encode(), tensor.encode(), value
        )

    def encode(self, text: bytes) -> List[int]:
        """Return token ids by Genie's own tokenizer, without special tokens."""
        buffers = Buffers()
        pointer = ctypes.c_void_p()
        count = _U32()
        self.genie.call(
            "GenieTokenizer_encode",
            self._tokenizer(),
            text,
            buffers.callback,
            ctypes.byref(pointer),
            ctypes.byref(count),
        )
        return buffers.integers(pointer, count.value)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return text by Genie's own tokenizer."""
        buffers = Buffers()
        pointer = ctypes.c_void_p()
        self.genie.call(
            "GenieTokenizer_decode",
            self._tokenizer(),
            (ctypes.c_int32 * len(tokens))(*tokens),
            len(tokens),
            buffers.callback,
            ctypes.byref(pointer),
        )
        return buffers.text(pointer)

    def _tokenizer(self) -> ctypes.c_void_p:
        return self.genie.create("GenieDialog_getTokenizer", self.handle)


class EmbeddingConfigHandle(ConfigHandle):
    """A configuration of a text encoder."""

    _kind = "GenieEmbeddingConfig"


class Vectors(NamedTuple):
    """Vectors of a text: float32 in the byte order of the device, row by row."""

    shape: Tuple[int, ...]
    data: bytes


class EmbeddingHandle(LoadedHandle):
    """A loaded text encoder."""

    _kind = "GenieEmbedding"

    def generate(self, text: bytes) -> Vectors:
        """Embed a text."""
        vectors: List[Vectors] = []

        def receive(dims: Any, rank: int, data: Any, _user: Optional[int]) -> None:
            shape = tuple(int(dims[axis]) for axis in range(min(rank, _MOST_AXES)))
            count = 1
            for size in shape:
                count *= size
            if data and 0 < count * 4 <= _LARGEST_RESULT:
                vectors.append(Vectors(shape, ctypes.string_at(data, count * 4)))

        name = "GenieEmbedding_generate"
        self.genie.call(name, self.handle, text, _VectorCallback(receive), None)
        if not vectors:
            raise GenieError(name, -10)
        return vectors[-1]

    def set_performance(self, policy: str) -> None:
        """Set the clock policy, a key of `PERFORMANCE_POLICIES`."""
        name = "GenieEmbedding_setPerformancePolicy"
        self.genie.call(name, self.handle, PERFORMANCE_POLICIES[policy])


class AccuracyConfigHandle(ConfigHandle):
    """A parsed accuracy configuration; nothing is bound to it."""

    _kind = "GenieAccuracyConfig"


class AccuracyHandle(Owned):
    """An evaluation tied to a dialog, which it resets."""

    _kind = "GenieAccuracy"

    def __init__(self, config: AccuracyConfigHandle, dialog: DialogHandle) -> None:
        handle = config.genie.create("GenieAccuracy_createFromDialog", config.handle, dialog.handle)
        super().__init__(config.genie, handle)

    def compute(self) -> bytes:
        """Evaluate and return Genie's result JSON."""
        buffers = Buffers()
        pointer = ctypes.c_void_p()
        self.genie.call(
            "GenieAccuracy_compute", self.handle, buffers.callback, ctypes.byref(pointer)
        )
        return buffers.text(pointer)


class Resources:
    """Frees the added handles in reverse order when its block ends.

    The first failure to free is raised, unless the block itself failed: then its error is raised.
    """

    def __init__(self) -> None:
        self._owned: List[Owned] = []

    def add(self, owned: OwnedType) -> OwnedType:
        """Take ownership of a handle and return it."""
        self._owned.append(owned)
        return owned

    def __enter__(self) -> "Resources":  # noqa: PYI034  (3.8 has no typing.Self)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        failures = [failure for failure in map(_close, reversed(self._owned)) if failure]
        self._owned.clear()
        if failures and kind is None:
            raise failures[0]


def _close(owned: Owned) -> Optional[GenieError]:
    try:
        owned.close()
    except GenieError as error:
        return error
    return None


def leave(status: int, error: str = "") -> None:
    """End the process at once with a status.

    The library's own exit handlers abort (status 134) where a dialog could not be freed.
    """
    if error:
        print(f"error: {error}", file=sys.stderr)
    ctypes.CDLL(None).fflush(None)
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)


def read_file(path: str, what: str) -> bytes:
    """Return the bytes of a file that the user named; raises `FatalError`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FatalError(f"cannot read the {what} {path}: {error.strerror}") from error
