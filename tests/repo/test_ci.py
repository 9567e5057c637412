"""CI runs what the README tells a newcomer to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from scripts.readme_commands import commands

ROOT = Path(__file__).parents[2]
FILES = (".ci/run", "scripts/readme_commands.py")
README = """# x

## Two commands

```bash
{first}
```

```bash
{second}
```

## Others

```bash
echo other >> "$MARKS"
```
"""
LINTS_WITH_3 = "mkdir -p .venv/bin && printf '#!/bin/sh\\nexit 3\\n' > .venv/bin/ruff && chmod +x .venv/bin/ruff"


def run_ci(folder: Path, first: str, second: str) -> tuple[int, list[str]]:
    """The exit status of our .ci/run for a repository with this README, and lines that its commands wrote to $MARKS."""
    repository, marks = folder / "repository", folder / "marks"
    for file in FILES:
        copy = repository / file
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / file).read_text())
        copy.chmod(0o755)
    (repository / "README.md").write_text(README.format(first=first, second=second))
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(repository)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    (repository / "uncommitted").touch()
    marks.touch()
    done = subprocess.run([repository / ".ci" / "run"], env={**os.environ, "MARKS": str(marks)}, capture_output=True)
    return done.returncode, marks.read_text().splitlines()


def test_ci_runs_both_commands_of_the_readme_in_a_fresh_clone_and_goes_on_in_their_environment(tmp_path):
    tell = 'echo {0} $(ls -A) >> "$MARKS"'
    status, marks = run_ci(tmp_path, tell.format("first"), f"{tell.format('second')} && {LINTS_WITH_3}")
    assert marks == ["first .ci .git README.md scripts", "second .ci .git README.md scripts"]
    assert status == 3, "the next step is ruff, from .venv"


def test_ci_ends_where_a_command_of_the_readme_fails(tmp_path):
    assert run_ci(tmp_path, "exit 5", 'echo second >> "$MARKS"') == (5, [])


def test_the_readme_has_both_commands_and_ci_repeats_neither():
    install, test = commands((ROOT / "README.md").read_text())
    assert "specdec bench tiny" in install
    assert "pytest" in test
    assert "-e '.[dev]'" not in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("lost", ["## Two commands", "```bash\nfirst\n```"])
def test_a_readme_without_them_is_refused(lost):
    text = README.format(first="first", second="second")
    assert commands(text) == ["first", "second"]
    with pytest.raises(ValueError, match="expected two commands of one line"):
        commands(text.replace(lost, ""))
