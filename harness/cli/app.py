"""The command line: all commands, and how errors end them.

Errors that the project raises on purpose carry an `exit_code` and a one-line text; the user sees
that line alone.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

import harness.cli
from buildlib.entry_points import entry_names, load_entry
from buildlib.error_base import QnnfarmError
from buildlib.errors import BuildError
from buildlib.validation import first_fault
from harness.cli.completion import join_bash_words
from harness.codes import explain_end
from harness.console import visible
from harness.errors import INTERRUPTED, NO_ANSWER, WrongUseError, help_text, one_line

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter  # exported under no other name

DOOR = "commands"
"""Entry points of commands that plugins and other packages have."""
PANELS = MappingProxyType({
    "Start here": {
        "demo": "Build, run, measure and report a model on virtual devices.",
        "doctor": "Check this machine, and say how to fix it.",
    },
    "Build": {
        "build": "Build a container for each target.",
        "pipeline": "Run a recipe from a checkpoint to measured text.",
        "export": "Write a model as float ONNX.",
        "train": "Train what speculative decoding needs.",
        "verify": "Compare a model with transformers, before any build.",
        "import-container": "Import a model that another runtime was built for.",
        "op-package": "Check and run operations of your own.",
        "aot": "Build and run models in mllm's ahead-of-time flow.",
        "inspect": "Show a container, a checkpoint or any built file.",
    },
    "Run": {
        "generate": "Generate text on a device.",
        "bench": "Measure speed and memory of containers.",
        "perplexity": "Score a text on a device.",
        "evaluate": "Score tasks on a device.",
        "embed": "Embed texts on a device.",
        "run": "Run a plan: containers x devices x workloads.",
        "profile": "Show the cost of each operator.",
    },
    "Judge": {
        "compare": "Tell whether one container is slower than another.",
        "gate": "Judge new results against a baseline.",
        "report": "Write results as an HTML report.",
        "history": "Show a metric night by night.",
        "alerts": "List losses in histories, and settle them.",
        "results": "Show, list, export, import and remove results.",
        "rehearse": "Try a phone's container without the phone.",
        "conformance": "Prove a toolchain and a device.",
    },
    "Farm": {
        "devices": "List devices: model, state and holder.",
        "device": "Start and stop virtual Android devices.",
        "pool": "Lease, show and repair the devices of a pool.",
        "worker": "Run cells of a lab's plans on this host.",
        "nightly": "Build, run, judge and report every night.",
        "serve": "Show the lab in a browser.",
    },
    "Upkeep": {
        "explain": "Explain error numbers of QNN, Genie and FastRPC.",
        "cache": "List, check and prune the stage cache.",
        "qairt-layout": "Lay out stages as the vendor's builder does.",
        "libraries": "List and fetch the libraries for devices.",
        "bundle": "List the files that a run would push.",
        "config": "Check Genie configurations.",
        "debug": "Compare tensors, call by call.",
    },
})  # fmt: skip
"""Commands by panel of the help. NAME is function or group (`app`) of `harness/cli/NAME.py`, which
is imported when it is asked for; else an entry point: without one, the help does not show it."""
_SECTIONS = MappingProxyType({
    "Device": ("device", "pool", "runtime", "wait", "push"),
    "Dialog": (
        "temp", "top_k", "top_p", "seed", "stop", "lora", "chat", "system", "genie_config",
    ),
    "Check of the output": (
        "reference_tokens", "max_perplexity", "perplexity_text", "perplexity_windows", "reference",
        "reference_with",
    ),
    "Conditions": ("max_temp", "charge", "no_gate"),
    "Records": ("db", "label", "log_level", "trace", "json"),
})  # fmt: skip
"""Options by section of the help, for commands with many."""
_MANY_OPTIONS = 14
_OPTIONS_OF = {"explain": {"ignore_unknown_options": True}}
_OF_BUILDS = frozenset({
    "ml_dtypes", "onnx", "onnx_ir", "onnxruntime", "onnxruntime_qnn", "safetensors",
    "threadpoolctl",
})  # fmt: skip
"""Modules of the extra `build`."""
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_LONGEST_LINE = 2000
_WIDEST = 16
"""Columns of names of commands, the same in all panels."""
_METAVARS = {"str": "TEXT", "path": "PATH", "int": "N", "float": "N", "%y-%m-%d": "YYYY-MM-DD"}
"""Metavars of options by what typer calls their types; choices stand as they are."""
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Base of what typer raises for wrong options; it exports only this one kind."""


class _Named:
    """Command or group whose help names values as command lines do, not `<list[str]>`."""

    def get_params(self, ctx: "Context") -> list[Any]:
        """Return the parameters, with metavars."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or parameter.name.upper()
            elif parameter.metavar is None:
                type_name = parameter.display_type(ctx).strip("<>")
                kind = type_name.removeprefix("list[").removesuffix("]").removesuffix(" range")
                parameter.metavar = _METAVARS.get(kind.lower(), type_name)
        return parameters


class _Command(_Named, TyperCommand):
    """Command with our errors, and its options in sections."""

    def invoke(self, ctx: "Context") -> object:
        """Run it; errors about fields of workloads name its options."""
        try:
            return super().invoke(ctx)
        except WrongUseError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            fault = first_fault(error.__cause__)
            field = f"{self._option(str(fault.location[0]))}: " if fault.location else ""
            reason = re.sub(r"`(\w+)`", lambda key: self._option(key[1]), fault.reason)
            raise WrongUseError(f"{field}{reason}") from error

    def _option(self, field: str) -> str:
        options = {
            parameter.name.rstrip("_"): max(parameter.opts, key=len)
            for parameter in self.params
            if parameter.name
        }
        flags = {option.strip("-").replace("-", "_"): option for option in options.values()}
        return options.get(field) or flags.get(field) or field

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments and options; of many options, those of a section under its title."""
        parameters = self.get_params(ctx)
        titles = {name: title for title, names in _SECTIONS.items() for name in names}
        if len(parameters) < _MANY_OPTIONS:
            titles = {}
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Arguments", "Options", *_SECTIONS)
        }
        for parameter in parameters:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                name = parameter.metavar if kind == "Arguments" else record[0]
                sections[titles.get(parameter.name, kind)].append((name, record[1]))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Group(_Named, TyperGroup):
    """Group of such commands."""


class _Commands(_Group):
    """Group whose commands are imported when one of them is asked for."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**attributes)
        self.commands = {name: _Command(name) for rows in panels().values() for name in rows}

    def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":
        """Import the command of a name; None if there is none."""
        del ctx
        return load_command(cmd_name)

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Read `help COMMAND` as `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the panels, and the commands that other packages add."""
        del ctx
        others = {name: _summary(name) for name in entry_names(DOOR) if name not in self.commands}
        for panel, summaries in {**panels(), "Others": others}.items():
            if summaries:
                rows = [(name.ljust(_WIDEST), summary) for name, summary in summaries.items()]
                with formatter.section(panel):
                    formatter.write_dl(rows)


def panels() -> Mapping[str, Mapping[str, str]]:
    """Return `PANELS` without the commands of plugins that are not installed."""
    here = {*entry_names(DOOR), *(one.name for one in pkgutil.iter_modules(harness.cli.__path__))}
    return {
        panel: {name: text for name, text in rows.items() if {name, _module(name)} & here}
        for panel, rows in PANELS.items()
    }


def _module(command: str) -> str:
    return command.replace("-", "_")


def _summary(name: str) -> str:
    command = load_command(name)
    return "" if command is None else command.get_short_help_str()


def build_app() -> typer.Typer:
    """Make the Typer group of all commands."""
    app = typer.Typer(
        name="qnnfarm",
        cls=_Commands,
        help="Build language models for Snapdragon NPUs and run them on a farm of devices."
        "\n\nExample: qnnfarm demo",
        epilog=help_text(),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    return app


@functools.cache
def load_command(name: str) -> "Command | None":
    """Import a command or a group of commands by its name; None if there is none."""
    above = typer.Typer(rich_markup_mode=None, context_settings=_SETTINGS)
    above.callback()(_options)
    function = _module(name)
    module = f"harness.cli.{function}"
    implementation: object
    if any(name in panel for panel in PANELS.values()) and importlib.util.find_spec(module):
        content = vars(importlib.import_module(module))
        implementation = content.get("app") or content[function]
    elif name in entry_names(DOOR):
        implementation = _load(name)
    else:
        return None
    if isinstance(implementation, typer.Typer):
        above.add_typer(implementation, name=name)
    else:
        command = above.command(name, context_settings=_OPTIONS_OF.get(name))
        command(cast("Callable[..., object]", implementation))
    _choose_classes(above)
    return typer.main.get_group(above).commands[name]


def _choose_classes(app: typer.Typer) -> None:
    """Make the commands and groups of an app ours."""
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        group.cls = _Group
        if group.typer_instance is not None:
            _choose_classes(group.typer_instance)


def _load(name: str) -> object:
    """Load an entry point's command; a broken one says so when it is called."""
    try:
        return load_entry(DOOR, name)
    except BuildError as error:
        reason = str(error)

        def broken() -> None:
            raise WrongUseError(reason)

        broken.__doc__ = reason
        return broken


def command_line() -> "Command":
    """Return the command of `build_app`."""
    return typer.main.get_command(build_app())


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    interrupts = _Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`, or a script's `&`
            signal.signal(number, interrupts)
    os.umask(os.umask(0o077) | 0o002)  # who can change a cache, or a report, speaks for its user
    warnings.showwarning = _show_warning
    join_bash_words()
    code, words = _answer()
    for stream, last in ((sys.stdout, ""), (sys.stderr, words)):
        try:
            if stream is not None:  # as under `>&-`
                stream.write(last)
                stream.flush()
        except OSError:
            # Nobody reads it, or its disk is full; the interpreter must not complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = NO_ANSWER if stream is sys.stdout else code
    sys.exit(INTERRUPTED if interrupts.seen else code)


def _answer() -> tuple[int | str | None, str]:
    """Run the command; return its exit code, and what is left to say on stderr."""
    try:
        return command_line()(prog_name="qnnfarm", standalone_mode=False), ""
    except _UsageError as error:
        return NO_ANSWER, _usage_line(error)
    except SystemExit as left:
        # typer leaves with 1 if the reader of our output has left (`qnnfarm ... | head`)
        return NO_ANSWER if isinstance(left.__context__, BrokenPipeError) else left.code, ""
    except KeyboardInterrupt:
        return INTERRUPTED, ""
    except OSError as error:
        # What we know to go wrong has an error of its own; this is the rest of what a file system
        # can do to us: no permission, no space, a file where a folder should be.
        reason = f"{error.filename or 'the system'}: {error.strerror or error}"
        return NO_ANSWER, f"qnnfarm: {one_line(reason, _LONGEST_LINE)}\n"
    except QnnfarmError as error:
        return error.exit_code, f"qnnfarm: {one_line(_explained(str(error)), _LONGEST_LINE)}\n"
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_BUILDS:
            return NO_ANSWER, visible(traceback.format_exc())
        reason = f"this needs {error.name}, which is not installed: pip install 'qnnfarm[build]'"
        return NO_ANSWER, f"qnnfarm: {reason}\n"
    except Exception:  # noqa: BLE001  (a bug of ours says nothing about what was asked)
        return NO_ANSWER, visible(traceback.format_exc())


def _explained(text: str) -> str:
    """Add the meaning of its first known number to an error that does not say so itself."""
    meaning = "" if "qnnfarm explain" in text else explain_end(text, None)
    return f"{text}; {meaning}" if meaning else text


def _usage_line(error: Any) -> str:  # noqa: ANN401 - typer exports no type for it
    """Return one line about wrong options or arguments; empty if the help was shown instead."""
    if isinstance(error.__cause__, ValidationError):
        error.message = first_fault(error.__cause__).reason
    line = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(line)
    if near := getattr(error, "possibilities", None):
        line = f"{error.message}: did you mean {' or '.join(sorted(near))}?"
    line = f"{line[:1].lower()}{line[1:]}".rstrip(".").replace(". Did you", ": did you")
    path = error.ctx.command_path if getattr(error, "ctx", None) else "qnnfarm"
    line += f"{'' if line.endswith('?') else ';'} `{path} -h` shows the usage"
    return f"qnnfarm: {one_line(line, _LONGEST_LINE)}\n"


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
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that all child processes are stopped.

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
        False,
        "-V",
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Show the version and exit.",
    ),
) -> None:
    pass
