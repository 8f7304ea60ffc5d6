"""Names of the files of a Genie bundle, as AI Hub names them."""

from typing import Final

GENIE_CONFIG: Final = "genie_config.json"
HTP_CONFIG: Final = "htp_backend_ext_config.json"
TOKENIZER: Final = "tokenizer.json"
METADATA: Final = "metadata.json"


def binary_name(model_name: str, part: int, parts: int) -> str:
    """Name of the context binary of a split; parts count from 1."""
    return f"{model_name}_part_{part}_of_{parts}.bin"
