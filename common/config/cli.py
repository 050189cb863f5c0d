"""The command line of every command, built from its configuration class.

``resolve`` parses flags, merges environment and file, checks the values and returns the frozen configuration. A mistake
is one sentence on standard error and exit status 2, never a traceback.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import click

from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import Option, merge, options_of, read_file, unknown_variables
from common.config.serve import ServeConfig
from common.config.shared import NOT_YET, OTHER_VARIABLES, SMALL_MODEL
from common.errors import ConfigError

Config = TypeVar("Config")

CLASSES: dict[str, type] = {"serve": ServeConfig, "gateway": GatewayConfig, "prefill": NodeConfig, "decode": NodeConfig}

#: Commands with a configuration in their own package, and the prefix of their environment variables.
OTHER_COMMANDS = {"loadtest": "BATON_LOADTEST_", "simulate": "BATON_SIMULATE_"}


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
    for word in words:
        flag = word.split("=")[0]
        if flag in NOT_YET:
            raise ConfigError(f"{flag} is not available yet: {NOT_YET[flag]}; leave it out")
    flags = _typed(cls, words, command=command, help=help)
    path = flags.pop("config", None) or os.environ.get("BATON_CONFIG")
    file = read_file(path, command, [*CLASSES, *OTHER_COMMANDS]) if path else {}
    known: list[str] = [found.env for other in [*CLASSES.values(), cls] for found in options_of(other).values()]
    others = tuple(prefix for other, prefix in OTHER_COMMANDS.items() if other != command)
    unknown_variables(os.environ, [*known, *OTHER_VARIABLES], others)
    values: dict[str, Any] = merge(cls, flags=flags, environ=os.environ, file=file, file_name=path or "")
    if cls is NodeConfig:
        values["role"] = command
    return cls(**values)


def _typed(cls: type, words: Sequence[str], *, command: str, help: str) -> dict[str, Any]:
    params: list[click.Parameter] = [_param(found) for found in options_of(cls).values()]
    config_help = "TOML file with options as keys, in a table named after the command, or before all tables."
    params.append(click.Option(["--config"], metavar="FILE", help=f"{config_help}  [env: BATON_CONFIG]"))
    footer = "Flags take precedence over BATON_* variables, and those over the --config file."
    parser = click.Command(
        command, params=params, help=help, epilog=footer, context_settings={"max_content_width": 110}
    )
    try:
        with parser.make_context(command, list(words)) as context:
            return {name: value for name, value in context.params.items() if value not in (None, ())}
    except click.exceptions.Exit as done:  # --help
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None


def _param(found: Option) -> click.Option:
    shown = _shown(found.default)
    text = f"{found.help}  [default: {shown}; env: {found.env}]" if shown else f"{found.help}  [env: {found.env}]"
    if found.kind is bool:
        return click.Option([f"{found.flag}/--no-{found.flag[2:]}", found.name], default=None, help=text)
    is_many = found.kind is tuple
    return click.Option(
        [found.flag, found.name], default=None, metavar=found.metavar, type=str, multiple=is_many, help=text
    )


def _shown(default: Any) -> str:
    if default in (None, ()) or default is False:
        return ""
    if default == SMALL_MODEL:
        return "the small model of the repository"
    return f"{default:g}" if isinstance(default, float) else str(default)
