"""The tiny model as most tests of quantization take it."""

from pathlib import Path

import pytest

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encodings


@pytest.fixture(scope="session")
def path(tiny_export: Path) -> Path:
    """The float model."""
    return tiny_export / "model.onnx"


@pytest.fixture(scope="session")
def config(tiny_export: Path) -> DecoderConfig:
    return load_config(tiny_export / "config.json")


@pytest.fixture(scope="session")
def whole(tiny_export: Path) -> Encodings:
    """Encodings of all its values, calibrated on text."""
    return load_encodings(tiny_export / "model.encodings")
