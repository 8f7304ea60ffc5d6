"""Whether a model turns its heads as its configuration says: a host will, as that says."""

from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import CheckpointError
from buildlib.graph.rope import rope_tables
from buildlib.importing.importer import RopeTables

_TOLERANCE = 2e-3  # what float16 leaves of a cosine; coarser types say so themselves


def check_rotation(rope: RopeTables | None, config: DecoderConfig, path: Path) -> None:
    """Compare what a source computed itself with what hosts will feed in its place.

    Args:
        rope: of the source; None when it took cosines and sines from its host already.
        config: by which hosts compute them.
        path: of the configuration, for messages.

    Raises:
        CheckpointError: `rope_theta`, scaling or rotary dimensions are not the model's.
    """
    if rope is None:
        return
    count, width = rope.cos.shape
    tables = [table[rope.first :] for table in rope_tables(config, rope.first + count)]
    if tables[0].shape[1] != width:
        reason = f"heads turn {2 * width} dimensions in the ONNX, and {config.rotary_dim} by it"
        raise CheckpointError(path, reason)
    worst = max(
        float(np.abs(own - ours).max())
        for own, ours in zip((rope.cos, rope.sin), tables, strict=True)
    )
    if not worst <= max(_TOLERANCE, rope.tolerance):
        reason = (
            "rotary positions of the ONNX are others than rope_theta and rope_scaling give "
            f"(cosines differ by up to {worst:.2g})"
        )
        raise CheckpointError(path, reason)
