"""Draft checkpoints that vLLM has methods of its own for, and what our engine drafts with them."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec import SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.sdk.packaged import packaged

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))  # which makes checkpoints

import gemma4_checkpoints
import make_dflash
import make_eagle
import make_walks
import mtp_checkpoints
import pard_checkpoints

NUM_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One checkpoint as both engines are asked for it: `speculative_config`, and what vLLM takes besides."""

    target: Path
    prompts: list[list[int]]
    ours: dict[str, Any]
    theirs: dict[str, Any]
    engine: dict[str, Any]


def case_of(name, directory, target, prompts):
    """The case of a name. target, prompts: of those that need none of their own."""
    if name == "Gemma 4":
        return gemma4(directory)
    if name in NUM_MODULES:
        return mtp(directory, NUM_MODULES[name])
    if name in EAGLE_LAYOUTS:
        k, method, ours, theirs = eagle3(directory, *EAGLE_LAYOUTS[name])
    else:
        k, method, make = MADE[name]
        ours = theirs = make(directory / "drafter")
    asked = {"method": method, "num_speculative_tokens": k}
    asked |= {"parallel_drafting": True} if name in ("PARD", "P-EAGLE") else {}
    return Case(target, prompts, asked | {"model": str(ours)}, asked | {"model": str(theirs)}, {})


def eagle3(directory, make, change):
    """As `MADE`, with a copy for each engine."""
    made = make(directory / "ours"), change(make(directory / "theirs"))
    return 3, "eagle3", *(each.save().path for each in made)


def gemma4(directory):
    """An assistant and its target, with heads as wide as vLLM's attention on a CPU takes them."""
    with gemma4_checkpoints.sizes(head_dim=32, global_head_dim=64, sliding_window=16):
        target = gemma4_checkpoints.make_target()
        prompts = gemma4_checkpoints.PROMPTS
        texts = [gemma4_checkpoints.generate(target, prompt, NUM_TOKENS) for prompt in prompts]
        target.save_pretrained(directory / "target")
        gemma4_checkpoints.make_assistant(target, texts, ordered=False).save_pretrained(directory / "drafter")
    asked = {"model": str(directory / "drafter"), "num_speculative_tokens": 3}
    ours, theirs = asked | {"method": "gemma4_assistant"}, asked | {"method": "mtp"}
    return Case(directory / "target", prompts, ours, theirs, {"skip_tokenizer_init": True, "max_model_len": 256})


def mtp(directory, count):
    """A small GLM-4 with experts, and modules of its own.

    vLLM takes zeros for the embedding in each module's first row. So prompts begin with tokens whose embedding is zero.
    """
    mtp_checkpoints.moe_target(directory, "glm4_moe")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    tensors, blank = load_file(directory / "model.safetensors"), 300
    tensors["model.embed_tokens.weight"][blank] = 0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shared = {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    modules = [mtp_checkpoints.moe_module("glm4_moe", directory / "scratch") for _ in range(count)]
    for index, module in enumerate(modules):
        module.parts |= shared | {"proj": module.parts["proj"].roll(index, dims=0)}
    first = config["num_hidden_layers"]
    save_file(mtp_checkpoints.Several(modules).tensors(mtp_checkpoints.NEXTN, first), directory / "mtp.safetensors")
    prompts = [[5, *[blank] * 3, *(5 + (7 * n + 13 * i) % 500 for i in range(16 + n))] for n in range(3)]
    asked = {"method": "mtp", "num_speculative_tokens": 3}
    return Case(directory, prompts, asked, asked, {"skip_tokenizer_init": True, "max_model_len": 256})


NUM_MODULES = {"MTP": 1, "MTP with three modules": 3}


def with_one_key_norm(path):
    """The checkpoint with one norm of keys for all layers, since vLLM on a CPU takes the first for all."""
    tensors = load_file(path / "model.safetensors")
    first = tensors["layers.0.self_attn.k_norm.weight"]
    norms = {name: first.clone() for name in tensors if name.endswith("self_attn.k_norm.weight")}
    assert len(norms) > 1
    save_file(tensors | norms, path / "model.safetensors")
    return path


def without_bias(source, path):
    """EAGLE-1 without the bias of `fc`, which vLLM has no place for."""
    path.mkdir()
    tensors = load_file(source / "model.safetensors")
    del tensors["fc.bias"]
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"bias": False}))
    return path


MADE = {
    "draft_model": (3, "draft_model", lambda _: packaged("tiny/draft")),
    "eagle": (3, "eagle", lambda path: without_bias(packaged("tiny/eagle"), path)),
    "eagle, biased attention": (3, "eagle", lambda path: make_eagle.eagle1_with_biased_attention(path).save().path),
    "eagle3": (3, "eagle3", lambda _: packaged("tiny/eagle3")),
    "dflash": (7, "dflash", lambda path: with_one_key_norm(shutil.copytree(packaged("tiny/dflash"), path))),
    "dflash of z-lab": (8, "dflash", lambda path: with_one_key_norm(make_dflash.z_lab(path).save().path)),
    "PARD": (4, "draft_model", lambda path: pard_checkpoints.pard(path).save().path),
    "dspark": (7, "dspark", lambda _: packaged("tiny/dspark")),
    "dflash2": (8, "dflash", lambda path: with_one_key_norm(make_walks.dflash2(path).save().path)),
    "lilicorr": (8, "dflash", lambda path: with_one_key_norm(make_walks.lilicorr(path).save().path)),
}
"""K, the method, and what makes the checkpoint in a folder or finds it. A block is as long as the trained one."""


def as_it_is(made):
    return made


def without(made, *beginnings):
    """Without the tensors of these names, which vLLM has no place for."""
    made.tensors = {name: each for name, each in made.tensors.items() if not name.startswith(beginnings)}
    return made


def with_norm_of_ones(made):
    """With the norm that vLLM applies to the final state too. ModelOpt's files have none, and specdec applies none."""
    made.tensors["layers.0.hidden_norm.weight"] = torch.ones(make_eagle.H)
    return made


def one_layer(made):
    """With the number of layers that the file has: vLLM believes the configuration."""
    made.config["num_hidden_layers"] = 1
    return made


def boundaries(made):
    """With layer ids that are one more: SpecForge names a layer for its output, vLLM for its input."""
    fields = made.config["eagle_config"]
    ids = [each + 1 for each in fields["eagle_aux_hidden_state_layer_ids"]]
    made.config["eagle_config"] = fields | {"eagle_aux_hidden_state_layer_ids": ids}
    return made


def residual_not_normed(made):
    """With what speculators takes for granted stated: vLLM takes the opposite."""
    made.config["norm_before_residual"] = False
    return made


EAGLE_LAYOUTS = {
    "EAGLE-3 of SafeAILab": (make_eagle.safeailab, one_layer),
    "EAGLE-3 of SafeAILab without a draft vocabulary": (make_eagle.safeailab_same_vocabulary, as_it_is),
    "EAGLE-3 of AngelSlim": (make_eagle.angelslim, as_it_is),
    "EAGLE-3 of ModelOpt": (make_eagle.modelopt, as_it_is),
    "EAGLE-3 of ModelOpt, final state": (
        lambda path: with_norm_of_ones(make_eagle.modelopt_final_state(path)),
        as_it_is,
    ),
    "EAGLE-3 of SpecForge": (lambda path: without(make_eagle.specforge(path), "d2t", "t2d"), boundaries),
    "EAGLE-3 of SpecForge, norm before fc": (
        lambda path: without(make_eagle.specforge_norm_before_fc(path), "d2t", "t2d"),
        boundaries,
    ),
    "EAGLE-3 of speculators": (lambda path: without(make_eagle.speculators(path), "verifier_"), as_it_is),
    "EAGLE-3 of speculators, Qwen3's layer": (
        lambda path: without(make_eagle.speculators_qwen3(path), "verifier_"),
        residual_not_normed,
    ),
    "P-EAGLE": (lambda path: without(make_eagle.peagle(path), "verifier_"), as_it_is),
}
"""What makes a checkpoint with random weights, and what is changed in vLLM's copy of it. K is 3."""

CASES_OF_V2 = ("dspark", "dflash2", "lilicorr", *NUM_MODULES)
CASES = (*(name for name in MADE if name not in CASES_OF_V2), *EAGLE_LAYOUTS, "Gemma 4")
"""What vLLM 0.32 drafts alike with on a CPU. docs/reference/vllm-methods.md has the others, with the reasons."""


def drafts_of_the_core(target, prompts, config, longest=512):
    """As `stepwise` of run_vllm.py."""
    settings = EngineConfig(model=target, device="cpu", dtype="float32", max_num_seqs=8, max_model_len=longest)
    engine = Engine(settings, config)
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
    return [[text] for text in texts], drafts


def compared_drafts(ours, theirs):
    """How many draft tokens were compared, all of them equal. Both: by prompt, and tokens before the draft."""
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() <= other.keys(), "steps begin at the same tokens, so as many drafts were accepted"
        for place, tokens in mine.items():  # ours end with what the request can still use
            assert other[place][: len(tokens)] == tokens
            compared += len(tokens)
    return compared
