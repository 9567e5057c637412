import os
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """Tables as on a wide terminal, whatever the terminal that runs the tests is like."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def install(site):
    """Write a distribution with one module: its metadata and its source."""

    def write(name, version="1.0", proposers=(), plugins=(), others=None, module=None, source="", metadata=""):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        groups = {"specdec.proposers": proposers, "specdec.plugins": plugins} | (others or {})
        lines = [line for group, items in groups.items() if items for line in (f"[{group}]", *items)]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
        if module:
            (site / f"{module}.py").write_text(textwrap.dedent(source))

    return write


@pytest.fixture
def specdec(site, tmp_path):
    """Run the command in a process of its own; returns the finished process."""

    def run(*arguments, **environment):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}
        clean |= {"PYTHONPATH": str(site), "NO_COLOR": "1", "COLUMNS": "200"} | environment
        command = [sys.executable, "-m", "specdec", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=clean, cwd=tmp_path, timeout=600)

    return run
