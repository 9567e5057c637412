"""Draft checkpoints that vLLM has methods of its own for, and what our engine drafts with them."""

from __future__ import annotations

import sys
from pathlib import Path

from specdec import SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.sdk.packaged import packaged

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))  # which makes checkpoints

import make_dflash
import make_dspark
import make_eagle
import make_walks
import pard_checkpoints

NUM_TOKENS = 24
PACKAGED = ("draft_model", "eagle", "eagle3", "dflash", "medusa")
V1 = {  # name: what saves it, our method, K, further settings of vLLM's
    "eagle of SafeAILab": (make_eagle.safeailab_eagle1, "eagle", 3, {}),
    "eagle3 of SafeAILab": (make_eagle.safeailab, "eagle3", 3, {}),
    "eagle3 of speculators": (make_eagle.speculators, "eagle3", 3, {}),
    "eagle3 of speculators, a Qwen3 layer": (make_eagle.speculators_qwen3, "eagle3", 3, {}),
    "eagle3 with latent attention": (make_eagle.latent, "eagle3", 3, {}),
    "P-EAGLE": (make_eagle.peagle, "eagle3", 3, {"parallel_drafting": True}),
    "PARD": (pard_checkpoints.pard, "draft_model", 4, {"parallel_drafting": True}),
    "dflash of z-lab": (make_dflash.z_lab, "dflash", 3, {}),
    "dflash of speculators": (make_dflash.speculators, "dflash", 3, {}),
}
V2 = {
    "dspark": (make_dspark.dspark_over_trained, "dspark", 3, {}),
    "dflash2": (make_walks.dflash2, "dflash", 3, {}),
    "lilicorr": (make_walks.lilicorr, "dflash", 3, {}),
}
OURS = {"PARD": {"parallel_drafting": True}, "P-EAGLE": {}}


def both_configs(name, directory):
    """Our `speculative_config` and vLLM's."""
    if name in PACKAGED:
        path = packaged(f"tiny/{ {'draft_model': 'draft'}.get(name, name) }".replace(" ", ""))
        config = {"method": name, "model": str(path), "num_speculative_tokens": 3}
        return config, config
    save, method, k, theirs = (V1 | V2)[name]
    made = save(directory / "drafter")
    path = made.save().path if hasattr(made, "save") else directory / "drafter"
    config = {"method": method, "model": str(path), "num_speculative_tokens": k}
    return config | OURS.get(name, {}), config | theirs


def drafts_of_the_core(target, prompts, config):
    """As `stepwise` of run_vllm.py."""
    engine = Engine(
        EngineConfig(model=target, device="cpu", dtype="float32", max_num_seqs=8, max_model_len=512), config
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    texts, drafts = [[] for _ in prompts], [{} for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params, str(number))
    while engine.has_unfinished_requests:
        for each in engine.step():
            number = int(each.request.request_id)
            texts[number] = list(each.request.output_token_ids)
            if each.draft_token_ids:
                drafts[number][str(each.length - len(each.token_ids))] = each.draft_token_ids
    engine.close()
    return texts, drafts
