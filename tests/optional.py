"""Marks of tests that run where an extra is installed, and of those that run where it is not."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

_IS_INSTALLED = all(map(find_spec, ("torch", "transformers")))
needs_transformers = pytest.mark.skipif(
    not _IS_INSTALLED,
    reason="torch and transformers are not installed: pip install 'qnnfarm[reference]'",
)
needs_transformers_5 = pytest.mark.skipif(
    not _IS_INSTALLED or version("transformers").startswith("4"),
    reason="the file is of transformers 5: pip install 'qnnfarm[reference]' 'transformers>=5'",
)
needs_no_transformers = pytest.mark.skipif(
    _IS_INSTALLED, reason="torch and transformers are installed: nothing is missing"
)
