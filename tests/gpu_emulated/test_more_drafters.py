"""Drafters without a packaged checkpoint: recorded work gives what the same work gives unrecorded.

Their checkpoints are those of `tests/plugins`. What they are asked is that of `test_churn.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import K, churn

from specdec import LLM

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
pard_checkpoints, mtp_checkpoints, lora_checkpoints = map(
    importlib.import_module, ("pard_checkpoints", "mtp_checkpoints", "lora_checkpoints")
)
sys.path.pop(0)


def several_modules(path: Path) -> tuple[str, dict[str, Any]]:
    modules = mtp_checkpoints.Several([mtp_checkpoints.tiny_module(seed=seed) for seed in range(K)])
    target = mtp_checkpoints.tiny_target(path / "target", modules.tensors(mtp_checkpoints.NEXTN, 8))
    return str(target), {"method": "mtp"}


def checkpoint(make: Callable[[Path], Any], method: str) -> Callable[[Path], tuple[str, dict[str, Any]]]:
    return lambda path: ("tiny", {"method": method, "model": str(make(path / "draft").save().path)})


MADE = {
    "pard": checkpoint(pard_checkpoints.pard, "draft_model"),
    "mtp-modules": several_modules,
    "uno": lambda path: (
        "tiny",
        {
            "method": "specdec.plugins.uno.proposer:UnoProposer",
            "model": str(lora_checkpoints.lora().save(path / "draft")),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["greedy", "sparse"])
@pytest.mark.parametrize("name", MADE)
def test_recorded_work_gives_what_it_gives_unrecorded(name, form, cuda, tmp_path):
    model, speculative = MADE[name](tmp_path)
    speculative |= {"num_speculative_tokens": K}
    if form != "greedy":
        speculative |= {"draft_sample_method": "probabilistic", "proposer_config": {"draft_distribution": form}}
    found = []
    for graphs in (True, False):
        settings = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3, "num_kv_blocks": 6}
        llm = LLM(model, speculative_config=speculative, cuda_graphs=graphs, **settings)
        found.append(churn(llm, 4))
        assert not llm.engine.metrics.proposer_errors
        assert llm.engine.metrics.counts["num_preemptions"] > 0
    assert found[0] == found[1]
