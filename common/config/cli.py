"""The command line of every command, built from its configuration class.

``resolve`` parses flags, merges environment and file, checks the values and returns the frozen configuration. A mistake
is one sentence on standard error and exit status 2, never a traceback.
"""

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from common.config.foreign_flags import ALIASES, ALWAYS_ON, aliases_of, unknown_flag, unknown_option
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.option_groups import sections
from common.config.options import Option, merge, options_of, read_file, unknown_variables
from common.config.serve import ServeConfig
from common.config.shared import OTHER_VARIABLES, SMALL_MODEL
from common.errors import ConfigError
from common.standard_output import output_failed
from common.version import VERSION

Config = TypeVar("Config")

#: Characters of a flag with its choices, so that a line has 80 columns at most.
MAX_ROW = 76

CLASSES: dict[str, type] = {"serve": ServeConfig, "gateway": GatewayConfig, "prefill": NodeConfig, "decode": NodeConfig}

#: Commands with a configuration in their own package, and the prefix of their environment variables.
OTHER_COMMANDS = {"loadtest": "BATON_LOADTEST_", "simulate": "BATON_SIMULATE_", "chaos": "BATON_CHAOS_"}
#: What these commands say to a word without a flag.
STRAY_WORDS = {"loadtest": "; give the server as --url"}


def resolve(cls: type[Config], argv: Sequence[str] | None = None, *, command: str, help: str = "") -> Config:
    """Return the configuration of a command; exits the process on ``--help`` and on a mistake.

    Args:
        argv: words after the program's name; None: those of this process.
        command: ``gateway``, ``prefill``, ``decode``, ``serve``, ...: the table in the file, and the role of a node.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return parse(cls, words, command=command, help=help)
    except ConfigError as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(2)


def parse(cls: type[Config], words: Sequence[str], *, command: str, help: str = "") -> Config:
    """Like ``resolve``, but raises ConfigError on a mistake; the message names the flag, key or value."""
    flags = _typed(cls, words, command=command, help=help)
    path = flags.pop("config", None) or os.environ.get("BATON_CONFIG")
    file = read_file(path, command, [*CLASSES, *OTHER_COMMANDS]) if path else {}
    _check_keys(cls, file, f"in {path} is not an option of {command}, but of")
    known: list[str] = [found.env for other in [*CLASSES.values(), cls] for found in options_of(other).values()]
    others = tuple(prefix for other, prefix in OTHER_COMMANDS.items() if other != command)
    unknown_variables(os.environ, [*known, *OTHER_VARIABLES], others)
    values: dict[str, Any] = merge(
        cls, flags=flags, environ=os.environ, file=file, file_name=path or "", spellings=_spellings(cls, words)
    )
    if cls is NodeConfig:
        values["role"] = command
    return cls(**values)


def _typed(cls: type, words: Sequence[str], *, command: str, help: str) -> dict[str, Any]:
    is_serving = cls in CLASSES.values()
    params: list[click.Parameter] = [_param(found, has_aliases=is_serving) for found in options_of(cls).values()]
    if is_serving:
        params += [click.Option([flag], is_flag=True, hidden=True, expose_value=False) for flag in ALWAYS_ON]
    config_help = "TOML file with options as keys, in a table named after the command, or before all tables."
    params.append(click.Option(["--config"], metavar="FILE", help=config_help))
    params.append(
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version and exit.",
        )
    )
    parser = GroupedCommand(
        command,
        params=params,
        help=help,
        epilog=_footer(cls),
        context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    )
    try:
        with parser.make_context(command, list(words)) as context:
            return {name: value for name, value in context.params.items() if value not in (None, ())}
    except click.exceptions.Exit as done:  # --help, --version
        sys.exit(done.exit_code)
    except OSError as error:  # of --help, --version
        sys.exit(output_failed(command, error))
    except click.NoSuchOption as error:
        known = [flag for param in params for flag in (*param.opts, *param.secondary_opts)]
        flag = error.option_name  # of a word such as -pp only -p
        flag = next((word for word in words if word.startswith(flag) and not flag.startswith("--")), flag).split("=")[0]
        if not is_serving:
            raise ConfigError(unknown_option(flag, known)) from None
        raise ConfigError(unknown_flag(flag, known, _commands_by_flag())) from None
    except click.UsageError as error:
        is_stray = "unexpected extra argument" in error.message
        remedy = "; give a model as --model" if is_serving else STRAY_WORDS.get(command, "")
        raise ConfigError(error.format_message() + (remedy if is_stray else "")) from None


def _show_version(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        print(f"baton {VERSION}", flush=True)
        context.exit()


class HelpFormatter(click.HelpFormatter):
    """Breaks the help of an option only at spaces, so that the flags in it can be searched for and copied."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        column = min(max(len(flags) for flags, _ in rows), col_max) + col_spacing
        width = max(self.width - column - self.indent_increment, 10)
        margin = " " * (self.current_indent + column)
        for flags, text in rows:
            lines = textwrap.wrap(text, width, break_on_hyphens=False)
            if len(flags) > column - col_spacing or not lines:
                lines.insert(0, "")
            self.write(f"{'':{self.current_indent}}{flags:{column}}{lines[0]}".rstrip() + "\n")
            self.write("".join(f"{margin}{line}\n" for line in lines[1:]))


class HelpContext(click.Context):
    formatter_class = HelpFormatter


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows the usual options first, and then the others in groups."""

    context_class = HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name or "": param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        general = [name for name, param in params.items() if {"--config", "--version", "--help"} & set(param.opts)]
        shown = [name for name, param in params.items() if not param.hidden and name not in general]
        for title, names in sections(self.name or "", shown):
            with formatter.section(title):
                formatter.write_dl([_help_row(params[name]) for name in names], col_max=24)
        with formatter.section("General"):
            formatter.write_dl([_help_row(params[name]) for name in general], col_max=24)


def _help_row(param: click.Option) -> tuple[str, str]:
    """The flags of an option, and its help."""
    flags = ", ".join(param.opts)
    if param.secondary_opts:
        flags = f"--[no-]{param.opts[0][2:]}" + "".join(f", {flag}" for flag in param.opts[1:])
    metavar = param.metavar or ""
    if len(flags) + len(metavar) > MAX_ROW and "|" in metavar:
        metavar = "NAME"  # the help explains the names
    return f"{flags} {metavar}".rstrip(), param.help or ""


def _footer(cls: type) -> str:
    example = next(iter(options_of(cls).values()))
    return (
        f"Every option is also an environment variable ({example.flag} is {example.env}) and a key of the --config "
        "file. Flags take precedence over variables, and those over the file."
    )


def _param(found: Option, *, has_aliases: bool) -> click.Option:
    shown = _shown(found.default)
    text = f"{found.help}  [default: {shown}]" if shown else found.help
    aliases = ALIASES.get(found.name, ()) if has_aliases else ()
    if found.kind is bool:
        flag = f"{found.flag}/--no-{found.flag[2:]}"
        return click.Option([flag, *aliases, found.name], default=None, help=text)
    is_many = found.kind is tuple
    return click.Option(
        [found.flag, *aliases, found.name], default=None, metavar=found.metavar, type=str, multiple=is_many, help=text
    )


def _spellings(cls: type, words: Sequence[str]) -> dict[str, str]:
    """Return the aliases among the words, by the names of their options, so that errors can name what was typed."""
    if cls not in CLASSES.values():
        return {}
    options = {alias: name for name in options_of(cls) for alias in aliases_of(name)}
    typed = [word.split("=")[0] for word in words]
    return {options[flag]: flag for flag in typed if flag in options}


def _check_keys(cls: type, file: Mapping[str, Any], complaint: str) -> None:
    """Raises ConfigError: a key is an option of other commands, which may read the same file."""
    for key in file:
        name = key.replace("-", "_")
        others = [command for command, other in CLASSES.items() if name in options_of(other)]
        if others and name not in options_of(cls):
            raise ConfigError(f"{key} {complaint} {', '.join(others)}: put it into their tables, such as [{others[0]}]")


def _commands_by_flag() -> dict[str, list[str]]:
    """Return the commands that take each flag, aliases included."""
    commands: dict[str, list[str]] = {}
    for command, cls in CLASSES.items():
        for found in options_of(cls).values():
            for flag in (found.flag, *aliases_of(found.name)):
                commands.setdefault(flag, []).append(command)
    return commands


def _shown(default: Any) -> str:
    if default in (None, ()) or default is False:
        return ""
    if default == SMALL_MODEL:
        return "the small model of the repository"
    if default is True:
        return "on"
    return f"{default:g}" if isinstance(default, float) else str(default)
