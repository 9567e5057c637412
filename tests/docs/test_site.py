"""The site builds, and one can link to every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import specdec
import specdec.sdk
from specdec.sdk import Needs

pytestmark = pytest.mark.full
DOCS = Path(__file__).parents[2] / "docs"
ANCHOR = re.compile(r'id="(specdec\.[\w.]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_public_name_of_the_contract_and_the_engine_has_an_anchor(site):
    anchors = [each for page in (site / "reference").glob("*.html") for each in ANCHOR.findall(page.read_text())]
    assert len(anchors) == len(set(anchors))
    assert {f"specdec.sdk.{name}" for name in specdec.sdk.__all__} <= set(anchors)
    assert {f"specdec.{name}" for name in specdec.__all__ if name != "SamplingParams"} <= set(anchors)
    assert {f"specdec.sdk.Needs.{field}" for field in Needs.model_fields} <= set(anchors)
    assert {"specdec.sdk.ProposerBase.bind", "specdec.sdk.KeptTokens.next_position"} <= set(anchors)


def test_the_index_leads_to_them(site):
    index = (site / "genindex.html").read_text()
    assert 'href="reference/contract-in-full.html#specdec.sdk.Needs.history"' in index
    assert 'href="reference/engine.html#specdec.LLM"' in index


def test_the_landing_page_shows_code_and_lists_no_decision(site):
    page = (site / "index.html").read_text()
    assert "highlight-python" in page
    assert f"specdec {version('specdec-sdk')}" in page
    assert "decisions/00" not in page
    assert 'href="0001-' in (site / "decisions" / "index.html").read_text()


def test_commands_are_wrapped_and_can_be_copied_without_their_prompt(site):
    page = (site / "tutorial" / "first-proposer.html").read_text()
    assert "site.css" in page
    assert "copybutton.js" in page
    assert "pre-wrap" in (site / "_static" / "site.css").read_text()
    assert "formatCopyText(text, '$ '" in (site / "_static" / "copybutton.js").read_text()


def test_the_index_of_decisions_lists_them_all_by_their_titles():
    folder = DOCS / "decisions"
    pages = {page.name: page.read_text().partition("\n")[0] for page in sorted(folder.glob("0*.md"))}
    listed = re.findall(r"\[(\d{4})\]\((.+)\): (.+)", (folder / "index.md").read_text())
    assert pages == {name: f"# {number}: {title}" for number, name, title in listed}
    assert len(pages) <= 25
