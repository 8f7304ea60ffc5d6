"""Limits of where a Genie configuration can run: parts that need hardware, or other libraries.

Genie's parser takes all of it. Found by running each on the HTP emulator of QNN 2.51.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from buildlib.container.genie_engine import Engine, QnnHtp
from buildlib.container.text_embedding import Configuration, TextEmbeddingConfig


@dataclass(frozen=True)
class Limit:
    """A part of a configuration that cannot run.

    Attributes:
        pointer: JSON pointer of the part.
        feature: its name.
        reason: why it cannot.
    """

    pointer: str
    feature: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.feature} {self.reason}"


@dataclass(frozen=True)
class _Rule:
    """A limit, and how to find it in an engine; `everywhere` holds on devices, too."""

    limit: Limit
    is_used: Callable[[Engine], bool]
    everywhere: bool = False


def _backend(name: str) -> _Rule:
    limit = Limit("/backend/type", name, "needs a library that is not put on devices")
    return _Rule(limit, lambda engine: engine.backend.type == name, everywhere=True)


def _htp(key: str, feature: str, reason: str, is_used: Callable[[QnnHtp], object]) -> _Rule:
    def found(engine: Engine) -> bool:
        return engine.backend.qnn_htp is not None and bool(is_used(engine.backend.qnn_htp))

    return _Rule(Limit(f"/backend/QnnHtp/{key}", feature, reason), found)


def _scores_groups(engine: Engine) -> bool:
    contexts = (group.longcontext for group in engine.cache_groups or ())
    return any(context is not None and context.type == "keydiff" for context in contexts)


def _scores(engine: Engine) -> bool:
    return engine.longcontext is not None and engine.longcontext.type == "keydiff"


def _updates_binaries(engine: Engine) -> bool:
    lora = engine.model.binary.lora if engine.model.binary else None
    return lora is not None and lora.lora_version != 1


_SPILL = "spill-fill-bufsize above 0", "fails on the emulator (5010)"
_DIRECT = "direct-io", "fails on the emulator, which has no UDMA"
_KEYDIFF = "keydiff", "needs a scoring network, which nothing here builds"
_RULES = (
    _backend("QnnGpu"),
    _backend("QnnGenAiTransformer"),
    _htp("spill-fill-bufsize", *_SPILL, lambda htp: htp.spill_fill_bufsize),
    _htp(
        "enable-graph-switching",
        "graph switching",
        "fails on the emulator (1000)",
        lambda htp: htp.enable_graph_switching,
    ),
    _htp("direct-io", *_DIRECT, lambda htp: htp.direct_io),
    _htp(
        "skip-lora-validation",
        "skip-lora-validation",
        "fails on the emulator (5010)",
        lambda htp: htp.skip_lora_validation,
    ),
    _htp(
        "shared-engine", "shared-engine", "ends the emulator (SIGSEGV)", lambda h: h.shared_engine
    ),
    _Rule(Limit("/longcontext", *_KEYDIFF), _scores),
    _Rule(Limit("/cache-groups", *_KEYDIFF), _scores_groups),
    _Rule(
        Limit(
            "/model/binary/lora",
            "LoRA of bin-sections",
            "needs sections, which nothing here builds",
        ),
        _updates_binaries,
    ),
)
_KV_SHARE = Limit(
    "/dialog/type",
    "kv-share",
    "hands its KV cache to QnnGenAiTransformer; the emulator refuses it (-6)",
)


def find_limits(config: Configuration, *, emulator: bool) -> list[Limit]:
    """Return the parts of a configuration that cannot run; none if it can.

    Args:
        config: of a dialog, or of a text encoder.
        emulator: on the HTP emulator, which lacks more than a device.
    """
    if isinstance(config, TextEmbeddingConfig):
        return list(_of_encoder(config, emulator=emulator))
    limits = [_KV_SHARE] if emulator and config.dialog.type == "kv-share" else []
    several = isinstance(config.dialog.engine, tuple)
    for index, engine in enumerate(config.dialog.engines):
        place = f"/dialog/engine/{index}" if several else "/dialog/engine"
        for rule in _RULES:
            if (emulator or rule.everywhere) and rule.is_used(engine):
                limit = rule.limit
                limits.append(Limit(place + limit.pointer, limit.feature, limit.reason))
    return limits


def _of_encoder(config: TextEmbeddingConfig, *, emulator: bool) -> Iterator[Limit]:
    backend, place = config.embedding.engine.backend, "/embedding/engine/backend"
    if backend.type != "QnnHtp":
        yield Limit(f"{place}/type", backend.type, _backend(backend.type).limit.reason)
    if emulator and backend.qnn_htp is not None:
        if backend.qnn_htp.spill_fill_bufsize > 0:
            yield Limit(f"{place}/QnnHtp/spill-fill-bufsize", *_SPILL)
        if backend.qnn_htp.direct_io:
            yield Limit(f"{place}/QnnHtp/direct-io", *_DIRECT)
