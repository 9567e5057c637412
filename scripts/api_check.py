"""Judge what changed in the public API since the last published version: python -m scripts.api_check [--publish]

It fails if a number is not raised as the changes demand, or if a new name does not say since when it is there.
--publish writes the API as it is now to tests/sdk/api.pyi. Do that when a version is published, or before the first.
docs/reference/versions.md has the rules.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import griffe
from packaging.version import Version

from scripts import api_stub
from scripts.api_rules import Change, changes

ROOT = Path(__file__).parents[1]
UNPUBLISHED = "was no release and binds nobody: take this in with python -m scripts.api_check --publish"
PUBLISHED = ROOT / "tests" / "sdk" / "api.pyi"
CONTRACT = "specdec.sdk."
EXTENSIONS = "specdec.sdk.extensions."
NOTICE = re.compile(r"^# deprecated (\S+) since (\d+)\.(\d+) until (\d+)\.(\d+)$", re.MULTILINE)
PROVISIONAL = (
    "specdec.adapters.",
    "specdec.sdk.checkpoint.",
    "specdec.sdk.combinators.",
    "specdec.sdk.hooks.",
    "specdec.sdk.model_proposer.",
    "specdec.sdk.trees.",
)
"""What may break in a minor version of the package. `specdec` and `specdec.testing` may in a major one only."""


@dataclass(frozen=True)
class Numbers:
    """The numbers that a stub states."""

    package: Version
    api: tuple[int, int]
    extensions: Mapping[str, int]  # by the path of the class

    @property
    def binds(self) -> bool:
        """Whether somebody may depend on them."""
        return not self.package.is_prerelease and self.package.major > 0


def stub_of(package: griffe.Module) -> str:
    """The public API of the sources, below a line with the package's version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"# {project['name']} {project['version']}\n{api_stub.stub(package)}"


def faults(published: str, found: str, prose: Callable[[str], str]) -> list[str]:
    """The changes, and what has to be mended before `found` may follow `published`; both are stubs.

    prose: what is written about the name at a path.
    """
    with api_stub.parsed(published) as old, api_stub.parsed(found) as new:
        before, after = _numbers(published, old), _numbers(found, new)
        listed = changes(old, new)
    if before.binds:
        demands = [*_too_low(listed, before, after)] or [*_undated(listed, before, after, prose)]
        demands += [*_unannounced(listed, published, before, after), *_misdated(found, after)]
    else:
        same = not listed and before == after
        demands = [] if same else [f"{before.package} {UNPUBLISHED}"]
    return [*map(str, listed), *demands] if demands else []


def _numbers(text: str, package: griffe.Module) -> Numbers:
    api = ast.literal_eval(str(package["sdk.API_VERSION"].value))
    extensions = {
        cls.path: int(str(cls["version"].value))
        for module in api_stub.walk(package)
        for cls in module.classes.values()
        if cls.path.startswith(EXTENSIONS) and "version" in cls.members and cls["version"].value is not None
    }
    return Numbers(Version(text.partition("\n")[0].split()[-1]), api, extensions)


def _too_low(listed: Sequence[Change], before: Numbers, after: Numbers) -> Iterator[str]:
    provisional = [change for change in listed if change.path.startswith(PROVISIONAL)]
    extensions = [change for change in listed if change.path.startswith(EXTENSIONS)]
    contract = [change for change in listed if change.path.startswith(CONTRACT) and change not in provisional]
    package = [change for change in listed if change not in contract]

    least = _next(before.api, any(change.breaking and change not in extensions for change in contract), bool(contract))
    if after.api < least:
        yield f"API_VERSION must be at least {least}, and is {after.api}"
    for change in extensions:
        if change.breaking:
            yield from _not_raised(change, before.extensions, after.extensions)
    release = before.package.major, before.package.minor
    least = _next(release, any(change.breaking and change not in provisional for change in package), bool(package))
    if (after.package.major, after.package.minor) < least:
        yield f"the package's version must be at least {least[0]}.{least[1]}, and is {after.package}"


def _next(number: tuple[int, int], breaks: bool, adds: bool) -> tuple[int, int]:
    major, minor = number
    return (major + 1, 0) if breaks else (major, minor + adds)


def _not_raised(change: Change, before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    """An extension's own number rises for its settings; for a type beside it, that of an extension that uses it."""
    own = [path for path in before if f"{change.path}.".startswith(f"{path}.")]
    if all(after.get(path) == before[path] for path in own or before):
        which = own[0] if own else "the extension that it belongs to"
        yield f"{change.path} is broken: raise the version of {which}"


def _undated(listed: Sequence[Change], before: Numbers, after: Numbers, prose: Callable[[str], str]) -> Iterator[str]:
    """New names of the contract that do not say with which version they came."""
    for change in listed:
        if not change.is_new or not change.path.startswith(CONTRACT) or change.path.startswith(PROVISIONAL):
            continue
        dated = re.search(r"Since API (\d+)\.(\d+)", prose(change.path))
        if dated is None or not before.api < (int(dated[1]), int(dated[2])) <= after.api:
            yield f'{change.path} must say "Since API {after.api[0]}.{after.api[1]}" in its docstring or comment'


def _unannounced(listed: Sequence[Change], published: str, before: Numbers, after: Numbers) -> Iterator[str]:
    """Names of the contract that a major takes away, and that two minors did not say it of."""
    notices = [(name, (int(a), int(b)), (int(c), int(d))) for name, a, b, c, d in NOTICE.findall(published)]
    for change in listed:
        if not change.is_removal or not change.path.startswith(CONTRACT) or change.path.startswith(PROVISIONAL):
            continue
        told = [since for name, since, until in notices if change.path.endswith(f".{name}") and until == after.api]
        if after.api[0] > before.api[0] and not any(since < before.api for since in told):
            yield f"{change.path} goes in {after.api}, and two minors before have to say so with `deprecated`"


def _misdated(found: str, after: Numbers) -> Iterator[str]:
    """Notices for a version that may not take a name away, or from one that is not there yet."""
    for name, *numbers in NOTICE.findall(found):
        since, until = (int(numbers[0]), int(numbers[1])), (int(numbers[2]), int(numbers[3]))
        if since > after.api or until <= after.api or until[1] != 0:
            yield f"{name} is deprecated since {since} until {until}: it goes in a major that comes later, and with it"


def _prose(package: griffe.Module) -> Callable[[str], str]:
    def of(path: str) -> str:
        found = package[path.removeprefix("specdec.")]
        return f"{found.source}\n{found.docstring.value if found.docstring else ''}"

    return of


def main(arguments: Sequence[str]) -> int:
    """Say what changed and what it demands. Returns the exit status."""
    package = api_stub.load()
    found, published = stub_of(package), PUBLISHED.read_text(encoding="utf-8")
    lines = faults(published, found, _prose(package))
    publishes = arguments == ["--publish"] and (not lines or lines[-1].endswith(UNPUBLISHED))
    if publishes:
        PUBLISHED.write_text(found, encoding="utf-8")
    print("\n".join(lines or ["the public API and its numbers agree with what was published"]))
    return 0 if publishes else int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
