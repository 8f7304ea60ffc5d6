"""Rotary position embedding: the cosines and sines a host feeds to the graph.

Frequencies after Su et al., RoFormer (arXiv 2104.09864); the `llama3` scaling as published with
Llama 3.1, the `linear` one after Chen et al. (arXiv 2306.15595). Halves are rotated
(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), as Hugging Face does.
"""

import math

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig, LinearRopeScaling, Llama3RopeScaling


def rope_tables(
    config: DecoderConfig, n_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines, each [n_positions, rotary_dim/2]."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    frequencies = config.rope_theta**-exponents
    match config.rope_scaling:
        case Llama3RopeScaling() as scaling:
            frequencies = _scaled(frequencies, scaling)
        case LinearRopeScaling(factor=factor):
            frequencies = frequencies / factor
    angles = np.outer(np.arange(n_positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _scaled(
    frequencies: npt.NDArray[np.float64], scaling: Llama3RopeScaling
) -> npt.NDArray[np.float64]:
    """Divide slow frequencies by the factor, keep fast ones, and blend those between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    result: npt.NDArray[np.float64] = frequencies * (blend + (1.0 - blend) / scaling.factor)
    return result
