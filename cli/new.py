"""`specdec new`: a plugin that drafts, installs and passes its tests before anything in it was changed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from ._scaffold import Names, render, write

Kind = Literal["lookup", "draft-model", "head", "block", "tree", "remote", "external"]
"""What a proposer drafts with. Each has a folder of templates."""


def command(
    name: Annotated[str, typer.Argument(help="What users will write as method, for example my-idea.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="lookup: plain Python on tokens; draft-model: a smaller language model; head: a network on the "
            "target's hidden states; block: a network that drafts all tokens in one pass; tree: several guesses for a "
            "position; remote: a service whose answers may come late; external: one file and one test for a "
            "repository that you have."
        ),
    ] = "lookup",
    directory: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Where to put it; default: the working directory.")
    ] = Path(),
    no_git: Annotated[bool, typer.Option("--no-git", help="Make no git repository of the package.")] = False,
) -> None:
    """Write a plugin package for a new proposer: complete, tested, and with something to accept from the start."""
    names = Names.checked(name, as_module=kind == "external")
    files = render(kind, names)
    if kind == "external":
        write(files, directory, blocked_by=[directory / file for file in files])
        print("\n".join(f"wrote {directory / file}" for file in files))
        _show_next(directory, names, f'"model": "{names.module}.{names.class_name}"', ["pytest"])
        return
    root = directory / names.distribution
    write(files, root, blocked_by=[root])
    if not no_git:
        _make_repository(root)
    print(f"wrote {root}: start with {root / 'src' / names.package / 'proposer.py'}")
    checks = ["pip install -e '.[test]'", "specdec list", "pytest", f"specdec check {names.name} --level full"]
    _show_next(root, names, f'"method": "{names.name}"', checks)


def _show_next(folder: Path, names: Names, proposer: str, checks: list[str]) -> None:
    enter = [] if folder == Path() else [f"cd {folder}"]
    print("\n".join(["", *enter, *checks, f"specdec bench tiny -sc '{{{proposer}}}'"]))


def _make_repository(root: Path) -> None:
    """Make a repository of the folder, if git is installed and the folder is not inside a repository already."""
    git = shutil.which("git")
    if git is None:
        return
    inside = subprocess.run([git, "-C", root, "rev-parse", "--is-inside-work-tree"], capture_output=True)
    if inside.returncode != 0:
        subprocess.run([git, "init", "--quiet", root], check=False)
