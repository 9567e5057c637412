"""The application: common flags, one command for each verb module, errors and exit codes."""

from __future__ import annotations

import errno
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import importlib_metadata
import typer
from typer.core import TyperGroup

from specdec.core.registry.discovery import PluginSettings
from specdec.sdk import ConfigError, SpecdecError
from specdec.sdk.explanations import explanations
from specdec.sdk.lifecycle import SDK_DISTRIBUTION
from specdec.testing.calls import WATCH_S, Calls, Watch

from ._session import Session

DENY_PREFIX = "no:"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a system says where a file takes no more."""


class _Group(TyperGroup):
    """Turns our errors into their text and exit code; SPECDEC_DEBUG=1 shows the whole traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _written_out():
                return super().invoke(ctx)
        except SpecdecError as error:
            if os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            else:
                print(error, file=sys.stderr)
                if error.code in explanations():
                    print(f"more: specdec explain {error.code}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None


@contextmanager
def _written_out() -> Iterator[None]:
    """Standard output is written to its end. Raises ConfigError SD-E187 if it is full; typer ends at a closed pipe."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the exit
        raise ConfigError("SD-E187", "cannot write the output", {"because": error.strerror}) from error


def build_app() -> typer.Typer:
    """The application with a command for each verb module."""
    app = typer.Typer(
        cls=_Group,
        callback=common_flags,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for verb in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not verb.name.startswith("_"):
            app.command(verb.name.replace("_", "-"))(import_module(f".{verb.name}", __package__).command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{SDK_DISTRIBUTION} {importlib_metadata.version(SDK_DISTRIBUTION)}")
        raise typer.Exit


def common_flags(
    ctx: typer.Context,
    plugins: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Allow only these plugins, by name, distribution:name or distribution."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("-p", metavar="no:NAME", help="Deny a plugin or distribution; repeatable, wins over --plugins."),
    ] = None,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="Allow no plugin at all, the packaged ones included.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for debug messages.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors and the result.")] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Print without colour; NO_COLOR in the environment does the same.")
    ] = False,
    watch: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Warn once of a plugin's call that takes longer, with its line; 0: never."
        ),
    ] = WATCH_S,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Write, prove, measure and run speculative-decoding proposers."""
    level = logging.ERROR if quiet else max(logging.WARNING - 10 * verbose, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("specdec").setLevel(level)
    if ctx.obj is not None and watch:  # the calls of this process, of `main`
        ctx.with_resource(Watch(watch, ctx.obj))
    ctx.obj = Session(_settings(plugins, without or [], no_plugins=no_plugins), not no_color, quiet)


def _settings(plugins: str | None, without: list[str], *, no_plugins: bool) -> PluginSettings:
    """The environment's settings; --plugins and --no-plugins replace the allow list, -p adds to the deny list."""
    for item in without:
        if not item.startswith(DENY_PREFIX) or item == DENY_PREFIX:
            raise typer.BadParameter(f"-p takes no:NAME, found {item!r}")
    environment = dict(os.environ)
    if plugins is not None:
        environment["SPECDEC_PLUGINS"] = plugins
    if no_plugins:
        environment["SPECDEC_PLUGINS"] = ""
    denied = [item.removeprefix(DENY_PREFIX) for item in without]
    environment["SPECDEC_DISABLE_PLUGINS"] = ",".join([environment.get("SPECDEC_DISABLE_PLUGINS", ""), *denied])
    return PluginSettings.from_environment(environment)


def main(calls: Calls | None = None) -> None:
    """Run the command of the process's arguments. Class paths may name files in the working directory.

    calls: those of plugins, which are watched. None means that nobody listens to them.
    """
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.path.append(os.getcwd())  # last: a file there hides nothing that is installed
    build_app()(prog_name="specdec", obj=calls)
