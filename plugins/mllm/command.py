"""`qnnfarm aot`: mllm's ahead-of-time flow on QNN, from a checkpoint to a phone."""

import typer

from plugins.mllm.command_device import compile_, push, run
from plugins.mllm.command_files import convert, init, inspect, quantize

app = typer.Typer(
    help="mllm's ahead-of-time flow on QNN: its configurations, quantized parameters and files.",
    no_args_is_help=True,
    # mllm's own programs have underscores in the names of options
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
app.command("init")(init)
app.command("quantize")(quantize)
app.command("convert")(convert)
app.command("inspect")(inspect)
app.command("compile")(compile_)
app.command("push")(push)
app.command("run")(run)
