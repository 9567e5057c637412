"""`specdec check`: does a proposer keep the contract, and if not, what to change."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specdec.sdk import ConfigError
from specdec.testing.report import Level

from ._engine_options import FurtherKeysOption, only_one, silence_libraries
from ._option_blocks import OutputOptions, with_blocks
from ._session import Session

if TYPE_CHECKING:
    from specdec.testing import CheckResult
    from specdec.testing.checks import Check

EXIT_FAILED = 1
STDERR = 2  # its file descriptor
WORDS = {"unexpected_pass": "FAILED", "failed": "FAILED", "expected_failure": "expected failure"}


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    proposer: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A name, distribution:name, package.module:Class, package.module.Class or a checkpoint.",
        ),
    ],
    level: Annotated[
        Level,
        typer.Option(help="basic: its form; standard: its behaviour; full: its distributions, long runs and searches."),
    ] = "standard",
    speculative_config: FurtherKeysOption = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run only this check; may be repeated.")] = None,
    expected: Annotated[
        list[str] | None,
        typer.Option("--xfail", metavar="CHECK=REASON", help="A check that is expected to fail; may be repeated."),
    ] = None,
    model: Annotated[str, typer.Option("--target", help="The model to check on: a directory or tiny.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Of texts, schedules and random numbers.")] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            min=0, max=1_000_000, metavar="SECONDS", help="The longest that one check may take; 0: as long as it likes."
        ),
    ] = 300,
    isolation: Annotated[
        Literal["process"] | None,
        typer.Option(help="process: each check in a process of its own; one that ends it fails by name."),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Check a proposer against the contract, on the CPU and offline. Exit code 1 if a check fails."""
    session: Session = ctx.obj
    how, quiet = output.form(session)
    silence_libraries()
    from specdec.core.config.speculative_config import SpeculativeConfig
    from specdec.testing.run import Run, results
    from specdec.testing.subject import Subject

    further = only_one("--speculative-config", speculative_config)
    settings = SpeculativeConfig.as_mapping(further) if further is not None else {}
    subject = Subject(proposer, settings, model, seed, session.settings)
    shown = not quiet and how != "json"
    announce = partial(_announce, 0 if isolation else timeout, shown)  # a process that hangs is ended
    run = Run(timeout, _expected(expected or []), announce, isolation)
    found = []
    try:
        for result in results(subject, level, tuple(only or ()), run):
            found.append(result)
            if shown:
                _show(result)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if how == "json":
        print(json.dumps([asdict(result) | {"ok": result.ok} for result in found], indent=2))
    else:
        _summary(found)
    if not all(result.ok for result in found):
        raise typer.Exit(EXIT_FAILED)


def _expected(items: list[str]) -> Mapping[str, str]:
    pairs = {}
    for item in items:
        name, equals, reason = item.partition("=")
        if not equals:
            raise ConfigError("SD-E132", "--xfail has no reason", {"expected": "CHECK=REASON", "found": repr(item)})
        pairs[name.strip()] = reason.strip()
    return pairs


def _announce(timeout: float, shown: bool, check: Check) -> None:
    """Name a check before it runs, so that a crash has a name; end the process if it cannot be interrupted.

    Either way the stack of every thread is written to stderr.
    """
    from specdec.testing.checks import ALL_CHECKS
    from specdec.testing.time_limit import GRACE_S

    if shown:
        width = 2 + max(len(each.name) for each in ALL_CHECKS)
        print(f"{check.name:<{width}}", end="", flush=True)
    if timeout:
        faulthandler.dump_traceback_later(timeout + GRACE_S, exit=True, file=STDERR)


def _show(result: CheckResult) -> None:
    word = WORDS.get(result.status, result.status)
    if result.status == "explained":
        word = f"explained by {result.facts['explained_by']}"
    note = f"   {result.facts['reason']}" if "reason" in result.facts else ""
    print(f"{word:<17}{result.seconds:6.2f} s{note}", flush=True)
    if not result.ok and result.status != "explained":
        print(result.text, flush=True)


def _summary(found: list[CheckResult]) -> None:
    counts = {status: sum(each.status == status for each in found) for status in dict.fromkeys(r.status for r in found)}
    told = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())
    print(f"{told} in {sum(result.seconds for result in found):.1f} s")
    explained = [result.check for result in found if result.status == "explained"]
    if explained:
        print(f"a check that is explained may pass once the one that explains it does: {', '.join(explained)}")
    sys.stdout.flush()
