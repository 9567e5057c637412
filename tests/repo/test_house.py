"""Rules of the repository that code review should not have to remember."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins")
PLUGIN_NAMES = re.compile(r"ngram|n-gram|eagle|dflash|medusa|\bmtp\b|suffix.?(tree|automaton|decod)", re.IGNORECASE)
MODEL_CLASSES = re.compile(r"\b\w+For(CausalLM|ConditionalGeneration)\b")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sources("core", "sdk"), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_and_sdk_name_no_plugin_and_no_model_class(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("AutoModelForCausalLM", "")
    assert not PLUGIN_NAMES.findall(text), f"a plugin's name in {path}"
    assert not MODEL_CLASSES.findall(text), f"a model class's name in {path}"


@pytest.mark.parametrize("command", ["import specdec.sdk", "import specdec", "import specdec.plugins.ngram"])
def test_contract_loads_no_torch(command: str) -> None:
    code = f"import sys; {command}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


@pytest.mark.parametrize("room", list(ROOMS))
def test_importing_a_room_from_the_checkout_root_is_refused(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"import specdec.{room}, not {room}" in done.stderr


def test_rooms_are_links_to_the_top_level_folders() -> None:
    for room in (*ROOMS, "assets"):
        link = ROOT / "src" / "specdec" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room


def test_public_names_are_exactly_what_the_sdk_exports() -> None:
    import specdec.sdk

    public = {name for name in vars(specdec.sdk) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(specdec.sdk, name)).__name__ == "module"}
    assert public - modules == set(specdec.sdk.__all__)
    assert list(specdec.sdk.__all__) == sorted(specdec.sdk.__all__, key=lambda name: (not name.isupper(), name))


@pytest.mark.parametrize("path", sources(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_an_engine_is_looked_into_in_one_place() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = sources("tests", "benchmarks", "adapters", "testing", "lab", "cli")
    files = [path for path in (*code, *pages) if path.name != "inside.py"]
    assert [path.name for path in files if re.search(r"\bengine\.(?=parts\b)", path.read_text())] == []
