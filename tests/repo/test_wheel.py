"""The built wheel holds what the checkout holds, from the real folders and never twice."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> list[str]:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = out.glob("specdec_sdk-*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_wheel_has_every_module_once(names: list[str]) -> None:
    expected = {
        f"specdec/{path.relative_to(ROOT)}"
        for house in ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins")
        for path in (ROOT / house).rglob("*.py")
    }
    modules = [name for name in names if name.endswith(".py")]
    assert len(modules) == len(set(modules))
    assert set(modules) == expected | {"specdec/__init__.py", "specdec/__main__.py"}


@pytest.mark.slow
def test_wheel_carries_types_assets_licence_and_entry_points(names: list[str]) -> None:
    assert "specdec/py.typed" in names
    for asset in ("target/model.safetensors", "target/config.json", "target/tokenizer.json", "prompts.jsonl"):
        assert f"specdec/assets/tiny/{asset}" in names
    assert {f"specdec/{path.relative_to(ROOT)}" for path in (ROOT / "sdk").rglob("*.toml")} <= set(names)
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert f"{info}/entry_points.txt" in names
    assert f"{info}/licenses/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests/", "core/", "sdk/", "plugins/", "src/"))]
