"""Classes as users write them for vLLM's `custom_class` and for transformers: nothing of specdec is imported."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator


class Lookup:
    """What followed the newest token where it last occurred."""

    def __init__(self, vllm_config):
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.calls = []
        Lookup.newest = self

    def load_model(self, *args, **kwargs):
        pass

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        assert token_ids_cpu.dtype == num_tokens_no_spec.dtype == np.int32
        drafts = []
        for b, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[b])
            text = token_ids_cpu[b, :length].tolist()
            self.calls.append((list(sampled), text))
            drafts.append(self.continuation(text) if sampled and length < self.longest else [])
        return drafts

    def continuation(self, text):
        places = [place for place, token in enumerate(text[:-1]) if token == text[-1]]
        return text[places[-1] + 1 :][: self.k] if places else []


class Tensor(Lookup):
    """Returns a [B, k] tensor padded with -1."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, **kwargs):
        rows = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        return torch.tensor([[*row, *[-1] * (self.k - len(row))] for row in rows])


class Misuse(Lookup):
    """Returns what kills vLLM's engine, or what it lets stand."""

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.how = vllm_config.additional_config["how"]

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        rows = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        if self.how == "raises":
            raise RuntimeError("out of ideas")
        return {
            "longer than K": [row * 5 + [1] * 9 for row in rows],
            "ndarray rows": [np.array(row, dtype=np.int64) for row in rows],
            "numpy scalars": [[np.int64(token) for token in row] for row in rows],
            "padding inside": [[*row[:1], -1, *row[1:]] for row in rows],
            "too few rows": rows[:-1],
            "too many rows": [*rows, [1, 2]],
            "beyond the vocabulary": [[10**6] for _ in rows],
            "nothing": None,
        }[self.how]


class WantsTheModel(Lookup):
    def load_model(self, target_model):
        self.layers = target_model.model.layers


class WantsParallelism(Lookup):
    def __init__(self, vllm_config):
        self.rank = vllm_config.parallel_config.rank


class Repeat(CandidateGenerator):
    """The newest token again, as often as the options say."""

    made: ClassVar[list[Repeat]] = []

    def __init__(self, times: int, vocab_size: int):
        self.times, self.vocab_size = times, vocab_size
        self.updates = []
        Repeat.made.append(self)

    def get_candidates(self, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:].expand(1, self.times)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.updates.append((input_ids.shape[1], scores, num_matches))


class WantsOutputs(CandidateGenerator):
    requires_model_outputs = True

    def get_candidates(self, input_ids, model_outputs=None, **kwargs):
        return input_ids, None
