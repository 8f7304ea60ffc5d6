"""Modules of the build library do not import each other in circles, not even inside functions."""

from pathlib import Path

import buildlib
from buildlib.builder.code_digest import CodeDigest

PACKAGE = Path(buildlib.__file__).parent


def test_no_module_reaches_itself_through_its_imports() -> None:
    digest = CodeDigest(PACKAGE)
    paths = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("[a-z]*.py"))
    modules = {".".join(path.with_suffix("").parts) for path in paths}
    # A child process may import from the module that starts it.
    imported = {module for module in modules if not module.endswith("worker")}
    imports = {module: digest.imports(module) & imported for module in modules}
    while leaves := {module for module, names in imports.items() if not names}:
        rest = imports.keys() - leaves
        imports = {module: imports[module] - leaves for module in rest}
    assert imports == {}
