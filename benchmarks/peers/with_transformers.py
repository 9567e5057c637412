"""transformers' `generate` as a contender: eager, sdpa attention, dynamic cache; batches padded on the left."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .contender import Batch, Contender, Generate, NotOfferedError, Task
from .successors import Spoiled, SuccessorsLlama

REASONS = {
    "eagle": "transformers has no EAGLE",
    "eagle3": "transformers has no EAGLE",
    "medusa": "transformers has no Medusa",
    "mtp": "transformers has MTP only for models that declare its layers; this head is stored beside the model",
    "dflash": "transformers has DFlash only for drafters with a model class of its own, not for this checkpoint",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def configuration(contender: Contender, task: Task) -> dict[str, Any]:
    """The arguments of `generate` that depend on the method; a draft model is named, not loaded."""
    if contender.precision not in DTYPES:
        raise NotOfferedError("transformers quantizes on a CPU only through further packages")
    if contender.method in REASONS:
        raise NotOfferedError(REASONS[contender.method])
    if contender.method == "ngram":
        return {"prompt_lookup_num_tokens": task.k, "max_matching_ngram_size": 5}
    if contender.method == "synthetic":
        return {"prompt_lookup_num_tokens": task.k}
    if contender.method == "draft_model":
        return {"assistant_model": task.target.drafters["draft_model"], "num_assistant_tokens": task.k}
    return {}


def build(contender: Contender, task: Task) -> Generate:
    """Load the model, and its assistant where there is one."""
    settings = configuration(contender, task)
    dtype = DTYPES[contender.precision]
    model = load(task.target.path, dtype, contender.method == "synthetic")
    if contender.method == "synthetic":
        model.spoiled = Spoiled(task.acceptance)
    if "assistant_model" in settings:
        assistant = load(settings["assistant_model"], dtype)
        assistant.generation_config.num_assistant_tokens = settings.pop("num_assistant_tokens")
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        settings["assistant_model"] = assistant

    def generate(prompts: Batch) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(longest) >= longest - lengths[:, None]
        done = model.generate(
            ids,
            attention_mask=mask.long(),
            max_new_tokens=task.output_len,
            min_new_tokens=task.output_len,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
        return done[:, longest:].tolist()

    return generate


@cache
def load(path: str, dtype: torch.dtype, drafts_successors: bool = False) -> Any:
    """A model, once for all contenders that share it."""
    loader = SuccessorsLlama if drafts_successors else AutoModelForCausalLM
    return loader.from_pretrained(path, dtype=dtype).eval()
