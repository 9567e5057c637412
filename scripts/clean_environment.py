"""A virtual environment to try packages in: it has what is installed into it, and borrows the libraries from here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = ("specdec", "pytest")


def build_wheel(project: Path, out: Path, **variables: str) -> None:
    """With the tools that are installed here, and further environment variables."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | variables)


@dataclass(frozen=True)
class Environment:
    """Needs no network: nothing is fetched, and packages are built with the tools that are installed here."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *, with_checkout: bool) -> Environment:
        """A new one. `with_checkout`: specdec is this checkout; otherwise its wheel has to be installed."""
        venv.create(folder, with_pip=False)
        made = cls(folder)
        borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        if with_checkout:
            borrowed.append(str(Path(__file__).parents[1] / "src"))
        [site] = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text("\n".join(dict.fromkeys(borrowed)) + "\n")
        for script in SCRIPTS:
            path = folder / "bin" / script
            path.write_text(f'#!/bin/sh\nexec "{made.python}" -m {script} "$@"\n')
            path.chmod(0o755)
        return made

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a process in it. `pip` installs into it, and fetches nothing."""
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "SPECDEC_"))
        }
        return kept | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PIP_PYTHON": str(self.python),
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is to be none
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def install(self, project: Path) -> Path:
        """Build a project's wheel and install it. Returns the wheel."""
        dist = self.folder / "dist" / project.name
        build_wheel(project, dist)
        [wheel] = dist.glob("*.whl")
        self.run("pip", "install", "--quiet", "--no-deps", str(wheel), cwd=self.folder)
        return wheel

    def run(self, *command: str, cwd: Path) -> str:
        """Run a command in it. Returns what it printed; raises AssertionError, with all of it, if it fails."""
        done = subprocess.run(command, cwd=cwd, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout
