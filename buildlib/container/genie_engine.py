"""The engine of a dialog: backend, context binaries, rotary positions, adapters."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.container.config_model import Count, GenieModel, Size, Version
from buildlib.container.layout import HTP_CONFIG


class QnnHtp(GenieModel):
    """The HTP backend of an engine.

    Attributes:
        spill_fill_bufsize: bytes shared by the graphs of all binaries; 0 lets each have its own.
        mmap_budget: bytes mapped at a time while loading; 0 for no limit.
        poll: spin while waiting for the processor: fewer microseconds, one busy core.
        cpu_mask: cores of Genie's own threads; `0x0` for any.
        kv_dim: the head dimension.
        pos_id_dim: half the head dimension; `positional_encoding` of the model replaces it.
        rope_theta: as `pos_id_dim`.
    """

    version: Version = 1
    use_mmap: bool = True
    spill_fill_bufsize: Size = 0
    mmap_budget: Size = 0
    poll: bool = True
    cpu_mask: Annotated[str, Field(pattern=r"^0x[0-9a-fA-F]{1,16}$")] = "0xe0"
    kv_dim: Count | None = None
    pos_id_dim: Count | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    data_alignment_size: Size | None = None
    allow_async_init: bool = False
    enable_graph_switching: bool | None = None


class Backend(GenieModel):
    """Backend that runs the graphs, and its extensions file."""

    version: Version = 1
    type: Literal["QnnHtp"] = "QnnHtp"
    qnn_htp: QnnHtp = Field(validation_alias="QnnHtp", serialization_alias="QnnHtp")
    extensions: str | None = HTP_CONFIG


class RopeScaling(GenieModel):
    """Scaling of rotary positions, as `rope_scaling` in a checkpoint's `config.json`."""

    rope_type: Literal["default", "linear", "llama3"]
    factor: Annotated[float, Field(gt=0)] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Count | None = None


class PositionalEncoding(GenieModel):
    """Rotary positions; `rope_dim` is half of the dimensions of a head that turn."""

    type: Literal["rope"] = "rope"
    rope_dim: Count
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScaling | None = None


class LoraAdapter(GenieModel):
    """A folder of float32 `{input}.raw` files, one for each input of the adapter."""

    version: Version = 1
    name: Annotated[str, Field(min_length=1)]
    path: Annotated[str, Field(min_length=1)]


class Lora(GenieModel):
    """Adapters that are inputs of the graphs; `alpha_tensor_name` takes the strength of one."""

    version: Version = 1
    lora_version: Literal[1] = 1
    alpha_tensor_name: str
    adapters: Annotated[tuple[LoraAdapter, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) != len(names):
            raise ValueError(f"an adapter stands twice in {names}")
        return self


class Binaries(GenieModel):
    """Context binaries in the order of the splits, relative to the runtime's working folder."""

    version: Version = 1
    ctx_bins: Annotated[tuple[str, ...], Field(min_length=1)]
    lora: Lora | None = None


class Model(GenieModel):
    """The context binaries, and what Genie computes for them."""

    version: Version = 1
    type: Literal["binary"] = "binary"
    binary: Binaries
    positional_encoding: PositionalEncoding | None = None


class Engine(GenieModel):
    """Engine that runs the model.

    `n_threads` are Genie's own threads on the CPU, for tokenizing, sampling and copying; `role`
    tells the two engines of a dialog apart.
    """

    version: Version = 1
    role: Literal["target", "draft"] | None = None
    n_threads: Count = 3
    backend: Backend
    model: Model

    @model_validator(mode="after")
    def _positions_are_given_once(self) -> Self:
        htp = self.backend.qnn_htp
        if self.model.positional_encoding and (htp.pos_id_dim or htp.rope_theta):
            raise ValueError(
                "positional-encoding excludes pos-id-dim and rope-theta of QnnHtp: keep one of them"
            )
        return self
