"""The pages of docs/reference/ say what the code says, and other pages show what they say they show."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import pytest
from scripts import reference_docs

from specdec import LLM, SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.request.metrics import RequestMetrics
from specdec.sdk import Needs
from specdec.sdk.extensions import DraftKV

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_the_committed_page_is_current(name):
    assert (REFERENCE / name).read_text() == reference_docs.PAGES[name](), "python -m scripts.reference_docs"


def test_the_page_of_the_contract_shows_shapes_defaults_bounds_and_members():
    contract = (REFERENCE / "contract-in-full.md").read_text()
    for line in (
        "| `kind` | `Tensor` | [B] uint8, DistributionKind |",
        "| `SPARSE` | 3 |  |",
        "| `sparse_top_m` | integer at least 0 | `0` | entries per draft position of a sparse distribution |",
        "* `from_lists(drafts: Sequence[Sequence[int]], width: int) -> Draft` (classmethod)",
        "* `next_position: Tensor`",
    ):
        assert line in contract.splitlines()


@pytest.mark.parametrize("model", [SpeculativeConfig, EngineConfig, SamplingParams, Needs, DraftKV])
def test_every_key_is_described(model):
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_page_of_metrics_names_what_a_run_exports(tmp_path, monkeypatch):
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"method": "fails_once:FailsOnce", "num_speculative_tokens": 2, "on_proposer_error": "skip_step"}
    llm = LLM("tiny", speculative_config=config, enable_profiling=True)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    exported = {metric.name for metric in llm.get_metrics()} | set(RequestMetrics().as_dict())
    text = (REFERENCE / "metrics.md").read_text()
    assert exported == set(re.findall(r"^\| `(\S+)` \|", text, flags=re.MULTILINE))


FAILS_ONCE = """
from specdec.sdk import Draft

class FailsOnce:
    def __init__(self, config):
        self.asked = 0

    def propose(self, step):
        self.asked += 1
        return Draft.from_lists([[5]], step.width) if self.asked > 1 else None
"""


def test_the_workflow_shown_is_the_one_that_is_written():
    template = ROOT / "assets" / "scaffold" / "package" / ".github" / "workflows" / "test.yml.in"
    workflow = Template(template.read_text()).substitute(name="my-idea")
    assert f"```yaml\n{workflow}```" in (DOCS / "how-to" / "test-without-a-gpu.md").read_text()
