"""Limits of where a Genie configuration can run: what asks for hardware, or for other libraries.

Genie's parser takes all of it. Found by running each on the HTP emulator of QNN 2.51.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from buildlib.container.genie_engine import Engine
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


_HTP = "/backend/QnnHtp"
_SPILL, _DIRECT = "spill-fill-bufsize above 0", "direct-io"
_NO_LIBRARY = "needs a library that is not put on devices"


def _spills(engine: Engine) -> Iterator[str]:
    if engine.backend.qnn_htp and engine.backend.qnn_htp.spill_fill_bufsize > 0:
        yield f"{_HTP}/spill-fill-bufsize"


def _switches(engine: Engine) -> Iterator[str]:
    if engine.backend.qnn_htp and engine.backend.qnn_htp.enable_graph_switching:
        yield f"{_HTP}/enable-graph-switching"


def _reads_directly(engine: Engine) -> Iterator[str]:
    if engine.backend.qnn_htp and engine.backend.qnn_htp.direct_io:
        yield f"{_HTP}/direct-io"


def _shares(engine: Engine) -> Iterator[str]:
    if engine.backend.qnn_htp and engine.backend.qnn_htp.shared_engine:
        yield f"{_HTP}/shared-engine"


def _has_native_kv(engine: Engine) -> Iterator[str]:
    if engine.backend.qnn_htp and engine.backend.qnn_htp.kv_update_method == "NATIVE_KV":
        yield f"{_HTP}/kv-update-method"


def _scores(engine: Engine) -> Iterator[str]:
    if engine.longcontext is not None and engine.longcontext.type == "keydiff":
        yield "/longcontext"
    for index, group in enumerate(engine.cache_groups or ()):
        if group.longcontext is not None and group.longcontext.type == "keydiff":
            yield f"/cache-groups/{index}/longcontext"


def _updates_binaries(engine: Engine) -> Iterator[str]:
    lora = engine.model.binary.lora if engine.model.binary else None
    if lora is not None and lora.lora_version != 1:
        yield "/model/binary/lora"


def _is_on(backend: str) -> Callable[[Engine], Iterator[str]]:
    def found(engine: Engine) -> Iterator[str]:
        if engine.backend.type == backend:
            yield "/backend/type"

    return found


_Find = Callable[[Engine], Iterator[str]]
_EVERYWHERE: Mapping[str, tuple[str, _Find]] = MappingProxyType(
    {
        "QnnGpu": (_NO_LIBRARY, _is_on("QnnGpu")),
        "QnnGenAiTransformer": (_NO_LIBRARY, _is_on("QnnGenAiTransformer")),
    }
)
_ON_EMULATOR: Mapping[str, tuple[str, _Find]] = MappingProxyType(
    {
        _SPILL: ("fails on the emulator (5010)", _spills),
        "graph switching": ("fails on the emulator (1000)", _switches),
        _DIRECT: ("fails on the emulator, which has no UDMA", _reads_directly),
        "shared-engine": ("ends the emulator (SIGSEGV)", _shares),
        "NATIVE_KV": ("gives another text on the emulator", _has_native_kv),
        "keydiff": ("needs a scoring network, which nothing here builds", _scores),
        "LoRA of bin-sections": ("needs sections, which nothing here builds", _updates_binaries),
    }
)


def _encoder_limits(config: TextEmbeddingConfig, *, emulator: bool) -> Iterator[Limit]:
    backend = config.embedding.engine.backend
    if backend.type != "QnnHtp":
        yield Limit("/embedding/engine/backend/type", backend.type, _NO_LIBRARY)
    if emulator and backend.qnn_htp is not None:
        for feature, key, used in (
            (_SPILL, "spill-fill-bufsize", backend.qnn_htp.spill_fill_bufsize > 0),
            (_DIRECT, "direct-io", backend.qnn_htp.direct_io),
        ):
            if used:
                yield Limit(f"/embedding/engine{_HTP}/{key}", feature, _ON_EMULATOR[feature][0])


_KV_SHARE = "kv-share", "hands its KV cache to QnnGenAiTransformer; the emulator refuses it (-6)"


def find_limits(config: Configuration, *, emulator: bool) -> list[Limit]:
    """Return the parts of a configuration that cannot run; none if it can.

    Args:
        config: the configuration.
        emulator: on the HTP emulator, which lacks more than a device.
    """
    if isinstance(config, TextEmbeddingConfig):
        return list(_encoder_limits(config, emulator=emulator))
    found = []
    if emulator and config.dialog.type == "kv-share":
        found.append(Limit("/dialog/type", *_KV_SHARE))
    several = isinstance(config.dialog.engine, tuple)
    for index, engine in enumerate(config.dialog.engines):
        prefix = f"/dialog/engine/{index}" if several else "/dialog/engine"
        for feature, (reason, find) in {
            **_EVERYWHERE,
            **(_ON_EMULATOR if emulator else {}),
        }.items():
            found += [Limit(prefix + pointer, feature, reason) for pointer in find(engine)]
    return found
