"""Limits of where a Genie configuration can run: parts that need hardware, or other libraries.

Genie's parser takes all of it. Found by running each on the HTP emulator of QNN 2.51.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from buildlib.container.genie_engine import Backend, Engine
from buildlib.container.text_embedding import Configuration, EncoderBackend, TextEmbeddingConfig

_HTP_OPTIONS = (
    ("spill-fill-bufsize", "spill-fill-bufsize above 0", "fails on the emulator (5010)"),
    ("enable-graph-switching", "graph switching", "fails on the emulator (1000)"),
    ("direct-io", "direct-io", "fails on the emulator, which has no UDMA"),
    ("skip-lora-validation", "skip-lora-validation", "fails on the emulator (5010)"),
    ("shared-engine", "shared-engine", "ends the emulator (SIGSEGV)"),
)
"""Options of `QnnHtp` that the emulator does not run, with the feature and the reason."""
_KEYDIFF = "keydiff", "needs a scoring network, which nothing here builds"
_SECTIONS = "LoRA of bin-sections", "needs sections, which nothing here builds"
_KV_SHARE = "kv-share", "hands its KV cache to QnnGenAiTransformer; the emulator refuses it (-6)"


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


def find_limits(config: Configuration, *, emulator: bool) -> list[Limit]:
    """Return the parts of a configuration that cannot run; none if it can.

    Args:
        config: of a dialog, or of a text encoder.
        emulator: on the HTP emulator, which lacks more than a device.
    """
    if isinstance(config, TextEmbeddingConfig):
        backend = config.embedding.engine.backend
        return list(_of_backend(backend, "/embedding/engine/backend", emulator=emulator))
    limits = []
    if emulator and config.dialog.type == "kv-share":
        limits.append(Limit("/dialog/type", *_KV_SHARE))
    several = isinstance(config.dialog.engine, tuple)
    for index, engine in enumerate(config.dialog.engines):
        place = f"/dialog/engine/{index}" if several else "/dialog/engine"
        limits += _of_backend(engine.backend, f"{place}/backend", emulator=emulator)
        limits += _of_engine(engine, place) if emulator else ()
    return limits


def _of_backend(
    backend: Backend | EncoderBackend, place: str, *, emulator: bool
) -> Iterator[Limit]:
    if backend.type != "QnnHtp":
        yield Limit(f"{place}/type", backend.type, "needs a library that is not put on devices")
    for key, feature, reason in _HTP_OPTIONS if emulator else ():
        if getattr(backend.qnn_htp, key.replace("-", "_"), None):
            yield Limit(f"{place}/QnnHtp/{key}", feature, reason)


def _of_engine(engine: Engine, place: str) -> Iterator[Limit]:
    if engine.longcontext is not None and engine.longcontext.type == "keydiff":
        yield Limit(f"{place}/longcontext", *_KEYDIFF)
    contexts = (group.longcontext for group in engine.cache_groups or ())
    if any(context is not None and context.type == "keydiff" for context in contexts):
        yield Limit(f"{place}/cache-groups", *_KEYDIFF)
    lora = engine.model.binary.lora if engine.model.binary else None
    if lora is not None and lora.lora_version != 1:
        yield Limit(f"{place}/model/binary/lora", *_SECTIONS)
