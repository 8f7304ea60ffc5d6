"""Virtual environments for the exporters, apart from the project's own."""

import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Packages of an environment.

    Attributes:
        alone: packages that are installed without their dependencies, over `requirements`.
    """

    name: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()

    def ensure(self, parent: Path) -> Path:
        """Return the interpreter of the environment in `parent`, made unless it is there already.

        Raises:
            subprocess.CalledProcessError: pip failed.
        """
        folder = parent / self.name
        python = folder / "bin" / "python"
        wanted = "\n".join((*self.requirements, *self.alone)) + "\n"
        finished = folder / "installed.txt"
        if finished.exists() and finished.read_text() == wanted:
            return python
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *self.requirements], check=True)
        if self.alone:
            subprocess.run([*pip, "--no-deps", *self.alone], check=True)
        finished.write_text(wanted)
        return python


HUGGINGFACE = Environment(
    "huggingface",
    (
        "torch==2.13.0",
        "transformers==5.23.0",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
        "onnxscript==0.7.2",
        "onnxruntime==1.31.1",
        "numpy==2.4.6",
    ),
)
"""Environment that exports transformers' models."""

AIHUB = Environment(
    "aihub",
    (
        "torch==2.13.0",
        "transformers==4.45.0",
        "onnx==1.18.0",
        "onnx-ir==0.2.1",
        "onnxscript==0.7.0",
        "onnxruntime==1.22.0",
        "numpy==2.4.6",
        "qai_hub==0.56.0",
        "aiofiles==25.1.0",
        "aiohttp==3.14.5",
        "boto3==1.40.26",
        "boto3-stubs[s3]==1.43.126",
        "datasets==5.0.1",
        "filelock==4.2.11",
        "gdown==6.5.1",
        "gitpython==3.2.1",
        "inputimeout==1.0.4",
        "opencv-python-headless==5.0.0.93",
        "pandas==3.1.1",
        "pillow==13.0.0",
        "platformdirs==4.14.5",
        "prettytable==3.18.0",
        "psutil==7.2.2",
        "pydantic==2.14.3",
        "pydantic-yaml==1.7.0",
        "ruamel.yaml==0.19.1",
        "schema==0.7.8",
        "scipy==1.17.1",
        "sentencepiece==0.2.3",
        "tabulate==0.10.0",
        "tqdm==4.70.1",
    ),
    ("qai_hub_models==0.65.0", "qai_hub_models_cli==0.65.0"),
)
"""What imports the Llama of qai_hub_models: transformers and ONNX of the versions it asks for.

torch is later than it asks for (2.10), which shows in a few Reshape nodes, and its remaining
dependencies are later too: they serve downloads and its cloud service. Those it needs for images
alone are left out.
"""


def run_inside(python: Path, module: str, arguments: list[str]) -> None:
    """Run one of our modules with another interpreter, from the root of the repository.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    root = Path(__file__).parents[2]
    command = [str(python), "-W", "ignore", "-m", module, *arguments]
    subprocess.run(command, cwd=root, check=True)
