"""Blocks that are walked from left to right, on a device: recorded passes draft what a CPU drafts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sweeps import slow_unless

from specdec import LLM, SamplingParams

PLUGINS = Path(__file__).parents[1] / "plugins"
K = 3
MEMBERS = {
    "vanilla": lambda made, path: made.deepspec(path),
    "rnn": lambda made, path: made.dspark_of_speculators(path, from_anchor=False, kind="rnn"),
    "DFlash2": lambda made, path: made.dflash2(path),
    "Domino": lambda made, path: made.domino(path),
    "XPress": lambda made, path: made.xpress(path),
    "LiLiCorr": lambda made, path: made.lilicorr(path),
}


@pytest.fixture
def made(monkeypatch):
    """The modules that make checkpoints of the family."""
    monkeypatch.syspath_prepend(PLUGINS)
    import make_dspark
    import make_walks

    return SimpleNamespace(**vars(make_dspark) | vars(make_walks))


def drafts(model: Path, device: str, temperature: float) -> list[tuple[int, ...]]:
    """Everything that was drafted and generated for one prompt."""
    speculative = {"model": str(model), "num_speculative_tokens": K, "draft_sample_method": "probabilistic"}
    llm = LLM("tiny", speculative_config=speculative, device=device, dtype="float32", max_model_len=64, max_num_seqs=3)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(100, 112))}
    return [(*update.draft_token_ids, *update.token_ids) for update in llm.stream([prompt], params)]


CASES = {f"{name}-{how}": (name, value) for name in MEMBERS for how, value in {"greedy": 0.0, "sampled": 0.8}.items()}


@pytest.mark.full
@pytest.mark.parametrize("case", slow_unless("vanilla-sampled", CASES))
def test_a_device_drafts_what_a_cpu_does(case, made, cuda, tmp_path):
    name, temperature = CASES[case]
    model = MEMBERS[name](made, tmp_path / "draft").save().path
    found = drafts(model, "cuda", temperature)
    assert found == drafts(model, "cpu", temperature)
    assert sum(map(len, found)) > 8 + K
