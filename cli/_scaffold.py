"""A new plugin's names and files. Templates are `assets/scaffold/KIND/PATH.in`: `string.Template`, paths too."""

from __future__ import annotations

import datetime
import keyword
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Self

import importlib_metadata
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import Version

from specdec.core.registry.discovery import read_entry_points
from specdec.sdk import ConfigError
from specdec.sdk.lifecycle import SDK_DISTRIBUTION

PREFIX = "specdec-plugin-"
_TEMPLATES = Path(__file__).parents[1] / "assets" / "scaffold"
_SUFFIX = ".in"
_SHARED = "package"  # templates of every kind that is a package
_TEXTS = ("summary.txt", "about.md")  # a kind's words in the shared templates
_NAMES_OF_BASES = ("autoregressive", "host", "late", "model", "parallel")  # a class of this name would hide the SDK's


@dataclass(frozen=True)
class Names:
    """What a proposer of a name like "my-idea" is called everywhere else."""

    name: str
    distribution: str  # specdec-plugin-my-idea
    module: str  # my_idea
    package: str  # specdec_plugin_my_idea
    class_name: str  # MyIdeaProposer

    @classmethod
    def of(cls, name: str) -> Self:
        """name: normalised, without the prefix of distributions."""
        module, class_name = name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))
        return cls(name, PREFIX + name, module, PREFIX.replace("-", "_") + module, f"{class_name}Proposer")

    @classmethod
    def checked(cls, name: str, *, as_module: bool) -> Self:
        """Normalised, the prefix of distributions taken off. Raises ConfigError SD-E190 with the reason.

        `as_module`: whether the proposer's file is to be imported by this name, with nothing before it.
        """
        try:
            names = cls.of(canonicalize_name(name, validate=True).removeprefix(PREFIX))
        except InvalidName:
            reason = "a distribution's name has letters, digits, and single - . _ between them"
            raise _unusable(name, reason, "my-idea") from None
        if not names.module.isidentifier() or keyword.iskeyword(names.module):
            raise _unusable(name, f"{names.module!r} cannot be a name in Python", f"a-{names.name}")
        if names.name in _NAMES_OF_BASES:
            raise _unusable(name, f"the SDK has a class {names.class_name} of its own", f"my-{names.name}")
        owner = _owner(names)
        if owner is not None:
            raise _unusable(name, f"{owner} offers a proposer of this name", f"my-{names.name}")
        if as_module and find_spec(names.module) is not None:
            raise _unusable(name, f"there is a module {names.module!r} already", f"my-{names.name}")
        return names


def _owner(names: Names) -> str | None:
    """The installed distribution that offers a proposer of this name, unless it is this very plugin."""
    for entry in read_entry_points("proposers"):
        distribution = entry.distribution or ""
        if canonicalize_name(entry.name) == names.name and canonicalize_name(distribution) != names.distribution:
            return distribution
    return None


def _unusable(name: str, reason: str, example: str) -> ConfigError:
    facts = {"name": repr(name), "reason": reason, "fix": f"another name, for example {example}"}
    return ConfigError("SD-E190", "no plugin can be made with this name", facts)


def render(kind: str, names: Names) -> dict[Path, str]:
    """Text by relative path: the templates of the kind and, if it is a package, those that all packages share."""
    own = _TEMPLATES / kind
    texts = {file: (own / file).read_text(encoding="utf-8") for file in _TEXTS if (own / file).is_file()}
    values = asdict(names) | {
        "kind": kind,
        "sdk_range": sdk_range(importlib_metadata.version(SDK_DISTRIBUTION)),
        "year": str(datetime.date.today().year),
    }
    values |= {file.partition(".")[0]: _filled(text, values).strip() for file, text in texts.items()}
    return {
        Path(_filled(str(path.relative_to(folder)).removesuffix(_SUFFIX), values)): _filled(
            path.read_text(encoding="utf-8"), values
        )
        for folder in ([_TEMPLATES / _SHARED, own] if texts else [own])
        for path in sorted(folder.rglob(f"*{_SUFFIX}"))
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    return Template(text).substitute(values)


def sdk_range(version: str) -> str:
    """The versions of the SDK that a plugin written for this one works with: before 1.0 a minor may break."""
    installed = Version(version)
    end = f"{installed.major + 1}" if installed.major else f"0.{installed.minor + 1}"
    return f">={installed.public},<{end}"


def write(files: Mapping[Path, str], root: Path, *, blocked_by: Sequence[Path]) -> None:
    """Write all files below `root`, or none. Raises ConfigError SD-E191 if one of `blocked_by` exists, SD-E187."""
    for path in blocked_by:
        if path.exists():
            facts = {"found": path, "fix": "another name, or another folder with --dir"}
            raise ConfigError("SD-E191", "there is something in the way", facts)
    made: list[Path] = []
    try:
        for path, text in files.items():
            made += [each for each in reversed((root / path).parents) if not each.exists()]
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            made.append(root / path)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as error:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir() if each.is_dir() else each.unlink()
        facts = {"because": error.strerror, "fix": "make room, or name another folder with --dir"}
        raise ConfigError("SD-E187", f"cannot write to {str(error.filename or root)!r}", facts) from error
