"""Rotary position embedding: the cosines and sines a host feeds to the graph.

Frequencies after Su et al., RoFormer (arXiv 2104.09864); scalings `linear` after Chen et al. (arXiv
2306.15595), `llama3` as published with Llama 3.1, `yarn` after Peng et al. (arXiv 2309.00071),
`longrope` after Ding et al. (arXiv 2402.13753). Halves are rotated (x1, x2) -> (x1 cos - x2 sin,
x2 cos + x1 sin), as Hugging Face does.

YaRN and LongRoPE also make cosines and sines longer than 1. The host's have length 1 always, which
is what their grid holds: the graph multiplies queries by the square of that length instead.
"""

import math

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig
from buildlib.checkpoint.rotary import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)

Floats = npt.NDArray[np.float64]


def rope_tables(
    config: DecoderConfig, context_length: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines, each [context_length, rotary_dim/2]."""
    frequencies = _frequencies(config) / frequency_divisors(config, context_length)
    angles = np.outer(np.arange(context_length, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def local_rope_tables(
    config: DecoderConfig, context_length: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines of layers with a window (`DecoderConfig.rope_local_base_freq`)."""
    update = {"rope_theta": config.rope_local_base_freq, "rope_scaling": None}
    return rope_tables(config.model_copy(update=update), context_length)


def frequency_divisors(config: DecoderConfig, context_length: int) -> Floats:
    """Return the divisors of frequencies by a scaling, [rotary_dim/2]."""
    frequencies = _frequencies(config)
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            return np.full_like(frequencies, factor)
        case Llama3RopeScaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(config, scaling)
        case LongRopeScaling() as scaling:
            is_long = context_length > scaling.original_max_position_embeddings
            return np.array(scaling.long_factor if is_long else scaling.short_factor)
        case DynamicRopeScaling() | None:
            return np.ones_like(frequencies)


def rotation_length(config: DecoderConfig) -> float:
    """Return the length that a scaling gives to pairs of a cosine and a sine.

    Layers whose rotations have a base of their own have no scaling.
    """
    match config.rope_scaling:
        case YarnRopeScaling(attention_factor=float(length)):
            return length
        case LongRopeScaling(attention_factor=float(length)):
            return length
        case YarnRopeScaling(factor=factor, mscale=mscale, mscale_all_dim=of_all):
            if mscale and of_all:
                return _sharpness(factor, mscale) / _sharpness(factor, of_all)
            return _sharpness(factor, 1.0)
        case LongRopeScaling(factor=factor, original_max_position_embeddings=original):
            if factor is None or factor <= 1.0:
                return 1.0
            return math.sqrt(1.0 + math.log(factor) / math.log(original))
    return 1.0


def _frequencies(config: DecoderConfig) -> Floats:
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    return np.asarray(config.rope_theta**-exponents)


def _llama3(frequencies: Floats, scaling: Llama3RopeScaling) -> Floats:
    """Divide slow frequencies by the factor, keep fast ones, and blend those between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (turns - low) / (high - low) if high > low else np.where(turns < low, 0.0, 1.0)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(1.0 / (blend + (1.0 - blend) / scaling.factor))


def _yarn(config: DecoderConfig, scaling: YarnRopeScaling) -> Floats:
    """Do as `_llama3`, with a blend that is linear in the index of the frequency."""
    half = config.rotary_dim // 2
    length = scaling.original_max_position_embeddings

    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency with so many turns in the length."""
        return half * math.log(length / (2 * math.pi * turns)) / math.log(config.rope_theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    blend = np.clip((np.arange(half) - low) / (high - low or 1e-3), 0.0, 1.0)
    return np.asarray(1.0 / (1.0 - blend + blend / scaling.factor))


def _sharpness(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
