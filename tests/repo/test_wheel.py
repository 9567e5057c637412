"""The wheel and the sdist hold what they should, from the real folders and never twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
MODEL = re.compile(r"\btiny/([a-z]\w*)\b(?!\.)")
FOR_USERS = (
    "README.md",
    "docs/tutorial",
    "docs/how-to",
    "examples",
    "assets/scaffold",
    "sdk",
    "core",
    "lab",
    "cli",
    "testing",
)
LIMIT = 30e6


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
def test_the_wheel_is_small_and_has_every_checkpoint_that_users_are_told_of(wheel: zipfile.ZipFile) -> None:
    files = [file for each in FOR_USERS for file in (ROOT / each, *(ROOT / each).rglob("*")) if file.is_file()]
    told = {name for file in files if file.suffix != ".pyc" for name in MODEL.findall(file.read_text(errors="ignore"))}
    assert {"draft", "eagle3", "dflash", "medusa", "eagle"} <= told
    whole = {name.split("/")[-2] for name in wheel.namelist() if re.match(r"specdec/assets/tiny/.*safetensors", name)}
    assert told - {"target"} <= whole
    assert Path(wheel.filename).stat().st_size < LIMIT


@pytest.mark.slow
def test_a_checkpoint_of_tests_alone_is_refused_with_the_reason_where_the_wheel_is_installed(wheel, tmp_path) -> None:
    wheel.extractall(tmp_path)
    code = """
from specdec.sdk.checkpoint import Checkpoint
assert Checkpoint.open("tiny/eagle3").directory.name == "eagle3"
Checkpoint.open("tiny/hybrid")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.search(r'SD-E105.*"tiny/hybrid"', done.stderr)
    assert re.search(r"weights +in the sources only", done.stderr)
    assert re.search(r"packaged +tiny, tiny/dflash", done.stderr)


def test_the_sdist_has_every_file_of_the_checkout_and_the_rooms_once() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split("\0") if name and not (ROOT / name).is_symlink()}
    packed = {file.relative_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert tracked - packed == {".gitignore", "pyproject.toml"}, "of which hatchling takes care itself"
    assert [name for name in packed if name.startswith("src/specdec/") and name.count("/") > 2] == []


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
