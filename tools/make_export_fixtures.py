"""Make `tests/fixtures/exports`: small random models, exported the ways that others export them.

    python -m tools.make_export_fixtures --environments /tmp/exporters

makes two virtual environments in that folder (3 GB: one with torch and transformers, one with
Qualcomm's `qai_hub_models`; both are kept and used again), runs the exporters in them, checks each
graph with ONNX Runtime against the torch module that it came from, and writes the fixtures. The
same versions give the same files. Needs Linux, Python 3.11 and a package index; no accelerator, no
account.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from tools.exports import environment
from tools.exports.environment import Environment

_OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "exports"


@dataclass(frozen=True)
class _Exporter:
    module: str
    environment: Environment
    prefixes: tuple[str, ...]

    def chosen(self, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(self.prefixes)]


_EXPORTERS = (
    _Exporter("huggingface", environment.HUGGINGFACE, ("torchscript-", "dynamo-")),
    _Exporter("encoders", environment.HUGGINGFACE, ("encoder-",)),
    _Exporter("notebook", environment.HUGGINGFACE, ("notebook-",)),
    _Exporter("aihub", environment.AIHUB, ("aihub-",)),
)


def main() -> None:
    """Read the arguments and make what they name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="fixtures to make (default: all)")
    parser.add_argument("--environments", type=Path, required=True, help="folder for the venvs")
    parser.add_argument("--out", type=Path, default=_OUT, help=f"default: {_OUT}")
    arguments = parser.parse_args()
    out = str(arguments.out.resolve())
    for exporter in _EXPORTERS:
        chosen = exporter.chosen(arguments.names)
        if chosen or not arguments.names:
            python = exporter.environment.ensure(arguments.environments.resolve())
            environment.run_inside(python, f"tools.exports.{exporter.module}", [out, *chosen])


if __name__ == "__main__":
    main()
