"""The built wheel holds what the checkout holds, from the real folders and never twice."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = out.glob("specdec_sdk-*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def names(wheel) -> list[str]:
    return wheel.namelist()


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


@pytest.mark.slow
def test_links_of_the_readme_lead_to_the_project_where_there_are_no_files(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL"))
    links, files = LINK.findall(metadata.get_payload()), LINK.findall((ROOT / "README.md").read_text())
    assert "docs/tutorial/first-proposer.md" in files
    assert links == [link if link.startswith("https:") else f"{urls['Source']}/{link}" for link in files]
    assert [url for url in urls.values() if not url.startswith(urls["Source"])] == []


def test_files_that_the_readme_links_to_exist() -> None:
    links = [link for link in LINK.findall((ROOT / "README.md").read_text()) if not link.startswith("https:")]
    assert [link for link in links if not (ROOT / link).exists()] == []
