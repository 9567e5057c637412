"""The versions that the package is tried with, one session each: `nox`, or `nox -s newest-3.12`; `nox -l` lists them.

A session installs into an environment of its own and runs a slice of the tests, or what follows `--`. What came of it,
and with which versions, goes to assets/versions.json, and from there to docs/reference/tried-versions.md. `targets`
verifies model types in place of tests. On Linux the usual index serves torch with gigabytes of CUDA:
UV_TORCH_BACKEND=cpu asks for builds for a CPU.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13"]
TRANSFORMERS = ["5.20", "5.21", "5.22", "5.23", "5.24"]  # 5.19 is in the floors and pinned
SLICE = [  # texts of every drafter, inside transformers' own loop, and of a target whose layers keep states
    "tests/plugins/test_packaged.py",
    "tests/adapters/test_transformers.py",
    "tests/engine/test_hybrids.py",  # last: its directory has the conftest.py that tests import from
]

VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@nox.session(python="3.11")
def floors(session: nox.Session) -> None:
    """Try the lowest versions that pyproject.toml allows, together."""
    lowest = Path(session.create_tmp()) / "floors.txt"
    lowest.write_text(session.run("python", "scripts/floors.py", silent=True))
    try_with(session, "-c", str(lowest))


@nox.session(python=PYTHONS)
def pinned(session: nox.Session) -> None:
    """Try what continuous integration tests, with every Python."""
    try_with(session, "-c", "constraints.txt")


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Try the newest version of everything."""
    try_with(session, "--upgrade")


@nox.session(python="3.11")
@nox.parametrize("minor", TRANSFORMERS, ids=TRANSFORMERS)
def transformers(session: nox.Session, minor: str) -> None:
    """Try a minor of transformers with the torch that is pinned."""
    (torch,) = (line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    try_with(session, torch, f"transformers=={minor}.*")


@nox.session(python="3.11")
def targets(session: nox.Session) -> None:
    """Verify every model type of the newest transformers, and write docs/reference/targets.md."""
    session.install("--upgrade", "-e", ".")
    session.run("python", "-m", "scripts.target_sweep", "--newest", *(session.posargs or ["--again"]), env=VARIABLES)
    session.run("python", "-m", "scripts.target_table")


def try_with(session: nox.Session, *versions: str) -> None:
    """Install, run, and write down."""
    compiled = {"UV_COMPILE_BYTECODE": "1"}  # as pip does: else warnings about others' sources end our tests
    session.install(*versions, "-e", ".[lab,quantization,testing]", "pytest-xdist", "sybil", env=compiled)
    session.run("python", "-m", "scripts.tried_versions", session.name, *(session.posargs or SLICE), env=VARIABLES)
