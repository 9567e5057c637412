"""Drafting at a known acceptance, in three engines, for a model whose greedy continuation is known: it goes in circles.

Its tokens form circles of 16, and the token after t is the next one of its circle. A draft follows the circle, and each
of its tokens is wrong with a stated probability. Drafting costs nothing.
"""

from __future__ import annotations

import random

import torch
from pydantic import Field
from transformers import LlamaForCausalLM
from transformers.generation import CandidateGenerator

from specdec.sdk import Draft, Needs, ProposerConfig, StepView, StrictModel

CIRCLE = 16


def successor(token: int) -> int:
    """The next token of the circle."""
    return token - token % CIRCLE + (token + 1) % CIRCLE


@torch.no_grad()
def put_in_circles(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Have a model with random weights say, after every token, the next one of its circle.

    The head is the embedding table, turned by one token in each circle, and the layers add little to what they are
    given. So the text is the same however sums are rounded, and every engine generates the same one.
    """
    table = model.model.embed_tokens.weight
    following = torch.tensor([successor(token) for token in range(len(table))], device=table.device)
    model.lm_head.weight[following] = table
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.01)
        layer.mlp.down_proj.weight.mul_(0.01)
    return model


class Spoiled:
    """The continuation of a token, each token of it left as it is with probability `acceptance`."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance
        self._random = random.Random(0)

    def after(self, token: int, count: int) -> list[int]:
        draft = []
        for _ in range(count):
            token = successor(token)
            draft.append(token if self._random.random() < self._acceptance else successor(token))
        return draft


class Successors:
    """For our engine."""

    class Options(StrictModel):
        acceptance: float = Field(ge=0, le=1)

    needs = Needs()

    def __init__(self, config: ProposerConfig) -> None:
        self._spoiled = Spoiled(config.options.acceptance)

    def propose(self, step: StepView) -> Draft:
        """As many tokens as each row's budget."""
        rows = zip(step.newest_token.tolist(), step.budget.tolist(), strict=True)
        return Draft.from_lists([self._spoiled.after(*row) for row in rows], step.width)


class VllmSuccessors:
    """For vLLM, which loads it by its path."""

    def __init__(self, vllm_config) -> None:
        self._k = vllm_config.speculative_config.num_speculative_tokens
        self._spoiled = Spoiled(vllm_config.additional_config["acceptance"])

    def load_model(self, target_model) -> None:
        """There is none."""

    def propose(self, sampled_token_ids, *_, **__) -> list[list[int]]:
        """K tokens after the newest one of each row that sampled."""
        return [self._spoiled.after(ids[-1], self._k) if ids else [] for ids in sampled_token_ids]


class SuccessorsLlama(LlamaForCausalLM):
    """For transformers: a Llama with this drafter in the place of prompt lookup. Set `spoiled` before it generates."""

    spoiled: Spoiled

    def _get_candidate_generator(self, generation_config, **_) -> CandidateGenerator:
        return _Candidates(self.spoiled, generation_config.prompt_lookup_num_tokens, generation_config.max_length)


class _Candidates(CandidateGenerator):
    def __init__(self, spoiled: Spoiled, k: int, max_length: int) -> None:
        self._spoiled, self._k, self._max_length = spoiled, k, max_length

    def get_candidates(self, input_ids, **_):
        count = min(self._k, self._max_length - input_ids.shape[1] - 1)
        draft = self._spoiled.after(int(input_ids[0, -1]), count)
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1) if draft else input_ids, None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """The number of drafts stays."""
