"""The command line: all commands, and how errors end them.

Whatever the project raises on purpose carries an `exit_code` and a one-line text; that line is all
the user sees of it.
"""

import importlib.metadata
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from pydantic import ValidationError

from buildlib.error_base import QnnfarmError
from buildlib.validation import first_fault
from harness.cli import (
    alerts,
    aot,
    aot_device,
    bench,
    build,
    bundle,
    cache,
    compare,
    config,
    conformance,
    debug,
    device,
    devices,
    doctor,
    embed,
    evaluate,
    explain,
    export,
    gate,
    generate,
    history,
    import_container,
    inspect,
    libraries,
    op_package,
    perplexity,
    pipeline,
    pool,
    profile,
    rehearse,
    results,
    run,
    train,
    verify,
    worker,
)
from harness.console import visible
from harness.errors import WrongUseError, one_line
from harness.exit_codes import INTERRUPTED, NO_ANSWER, help_text

if TYPE_CHECKING:
    from typer._click import Command  # typer exports it under no other name

COMMANDS_GROUP = "qnnfarm.commands"
_LONGEST_LINE = 2000
_METAVARS = {"str": "TEXT", "path": "PATH", "int": "N", "float": "N", "%y-%m-%d": "YYYY-MM-DD"}
"""Metavars of options by what typer calls their types; choices stand as they are."""
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Base of what typer raises for wrong options; it exports only this one kind."""


def build_app() -> typer.Typer:
    """Make the Typer group of our commands and those of installed packages."""
    app = typer.Typer(
        name="qnnfarm",
        help="Build language models for Snapdragon NPUs and run them on a farm of devices.",
        epilog=help_text(),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="markdown",
    )
    app.callback()(_options)
    app.command("build")(build.build)
    app.add_typer(pipeline.app, name="pipeline")
    app.command("export")(export.export)
    app.add_typer(train.app, name="train")
    app.command("verify")(verify.verify)
    app.command("import-container")(import_container.import_container)
    app.command("inspect")(inspect.inspect)
    app.add_typer(config.app, name="config")
    app.add_typer(debug.app, name="debug")
    app.command("profile")(profile.profile)
    app.command("rehearse")(rehearse.rehearse)
    app.command("conformance")(conformance.conformance)
    app.command("generate")(generate.generate)
    app.command("perplexity")(perplexity.perplexity)
    app.command("evaluate")(evaluate.evaluate)
    app.command("embed")(embed.embed)
    app.command("bench")(bench.bench)
    app.command("compare")(compare.compare)
    app.command("gate")(gate.gate)
    app.command("run")(run.run)
    app.command("worker")(worker.worker)
    app.command("devices")(devices.devices)
    app.add_typer(device.app, name="device")
    app.add_typer(pool.app, name="pool")
    app.add_typer(results.app, name="results")
    app.command("history")(history.history)
    app.add_typer(alerts.app, name="alerts")
    app.add_typer(cache.app, name="cache")
    app.add_typer(bundle.app, name="bundle")
    app.add_typer(libraries.app, name="libraries")
    app.add_typer(op_package.app, name="op-package")
    aot.app.add_typer(aot_device.app)
    app.add_typer(aot.app, name="aot")
    app.command("doctor")(doctor.doctor)
    app.command("explain", context_settings={"ignore_unknown_options": True})(explain.explain)
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS_GROUP)):
        app.command(entry.name)(_load(entry))
    return app


def _load(entry: importlib.metadata.EntryPoint) -> Callable[..., object]:
    """Load an entry point's command; a broken one says so when it is called."""
    try:
        command: Callable[..., object] = entry.load()
    except Exception as error:  # noqa: BLE001  (an import can raise anything)
        reason = f"the command {entry.name} ({entry.value}) cannot be loaded: {error}"

        def broken() -> None:
            raise WrongUseError(reason)

        broken.__doc__ = f"Cannot be loaded: {error}"
        return broken
    return command


def command_line() -> "Command":
    """Return the command of `build_app`, whose help names values as command lines do."""
    command = typer.main.get_command(build_app())
    _name_values(command, None)
    return command


def _name_values(command: "Command", above: typer.Context | None) -> None:
    """Give all parameters a metavar, in place of typer's `<list[str]>`."""
    context = typer.Context(command, parent=above, **command.context_settings)
    parameter: Any
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter.display_type_rich = lambda **_: None
        elif parameter.metavar is None:
            shown = parameter.display_type(context).strip("<>")
            kind = shown.removeprefix("list[").removesuffix("]").removesuffix(" range").lower()
            parameter.metavar = _METAVARS.get(kind, shown)
    for below in getattr(command, "commands", {}).values():
        _name_values(below, context)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    interrupts = _Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`, or a script's `&`
            signal.signal(number, interrupts)
    warnings.showwarning = _show_warning
    code: int | str | None = 0
    try:
        code = command_line()(prog_name="qnnfarm", standalone_mode=False)
    except _UsageError as error:
        code = NO_ANSWER
        sys.stderr.write(_usage_line(error))
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`qnnfarm ... | head`); the interpreter must not complain at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = NO_ANSWER
    except OSError as error:
        # What we know to go wrong has an error of its own; this is the rest of what a file system
        # can do to us: no permission, no space, a file where a folder should be.
        code = NO_ANSWER
        said = f"{error.filename or 'the system'}: {error.strerror or error}"
        sys.stderr.write(f"qnnfarm: {one_line(said, _LONGEST_LINE)}\n")
    except QnnfarmError as error:
        code = error.exit_code
        sys.stderr.write(f"qnnfarm: {one_line(_explained(str(error)), _LONGEST_LINE)}\n")
    except Exception:  # noqa: BLE001  (a bug of ours says nothing about what was asked)
        code = NO_ANSWER
        sys.stderr.write(visible(traceback.format_exc()))
    sys.exit(INTERRUPTED if interrupts.seen else code)


def _explained(text: str) -> str:
    """Add to an error what its first known number means, unless it says so itself."""
    from harness.errors.codes import explain_end

    known = "" if "qnnfarm explain" in text else explain_end(text, None)
    return f"{text}; {known}" if known else text


def _usage_line(error: Any) -> str:  # noqa: ANN401 - typer exports no type for it
    """Return one line about wrong options or arguments; empty if the help was shown instead."""
    if isinstance(error.__cause__, ValidationError):
        error.message = first_fault(error.__cause__).reason
    said = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(said)
    if near := getattr(error, "possibilities", None):
        said = f"{error.message}: did you mean {' or '.join(sorted(near))}?"
    said = f"{said[:1].lower()}{said[1:]}".rstrip(".").replace(". Did you", ": did you")
    path = error.ctx.command_path if getattr(error, "ctx", None) else "qnnfarm"
    said += f"{'' if said.endswith('?') else ';'} `{path} -h` shows the usage"
    return f"qnnfarm: {one_line(said, _LONGEST_LINE)}\n"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning in one line, as errors are, without its place in our code."""
    del category, filename, lineno, file, line
    sys.stderr.write(f"qnnfarm: warning: {one_line(str(message), _LONGEST_LINE)}\n")


class _Interrupts:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that whatever was started is stopped.

    The exception can get lost (in a finalizer, or behind an error of the clean-up that it set off);
    that there was an interrupt does not.
    """

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self.seen = True
        raise KeyboardInterrupt


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"qnnfarm {importlib.metadata.version('qnnfarm')}")
        raise typer.Exit


def _options(
    _version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass
