"""Bundle of Genie with a container."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.deploy.deployment import DeployFile
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.python import find_python
from harness.runtimes.bundles.sources import PROGRAMS, SDK_PROGRAMS, find_genie
from harness.runtimes.files import qnn_api_files, target_of

_RUNNER_FILES = (
    "genie_api.py", "genie_app.py", "genie_app_script.py", "genie_embeddings.py",
    "genie_logits.py", "genie_nodes.py", "genie_perplexity.py", "genie_t2e_run.py",
    "genie_t2t_run.py", "genie_trace.py",
)  # fmt: skip


def genie_bundle(container: GenAIContainer, abi: str) -> Bundle:
    """Collect all that Genie needs to run a container on devices of an ABI.

    The SDK's programs run where devices have no Python; ours, which do more, where they have one or
    the user gives one.
    """
    bundle, python = find_genie(abi, target_of(container).soc), find_python(abi)
    if python:
        libraries = {name: file for name, file in bundle.files.items() if name not in SDK_PROGRAMS}
        bundle = replace(bundle, files={**libraries, **python})
    files = {name: DeployFile(path, origin="container") for name, path in container.files.items()}
    if PROGRAMS[0] not in bundle.files:
        scripts = resources.files("device_scripts")
        paths = {name: Path(str(scripts / name)) for name in _RUNNER_FILES}
        if container.metadata.op_packages:
            paths |= qnn_api_files()
        files |= {name: DeployFile(path, origin="qnnfarm") for name, path in paths.items()}
    return bundle.add(files)
