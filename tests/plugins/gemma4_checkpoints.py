"""A tiny Gemma 4 and assistants for it, and what transformers' own modelling code drafts with them."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

VOCAB, HIDDEN, CLUSTERS = 64, 32, 8
PROMPTS = [[5, 7, 9], list(range(3, 32))]  # one longer than the window
SHARED = {
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


@contextmanager
def sizes(**changed):
    """Targets and assistants have other sizes."""
    before = dict(SHARED)
    SHARED.update(changed)
    yield
    SHARED.update(before)


def _random(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.eval()


def make_target(num_shared=0):
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"hidden_size": HIDDEN, "num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": num_shared}
    config = Gemma4TextConfig(**SHARED | own | {"tie_word_embeddings": False})  # a tied one repeats its last token
    return _random(Gemma4ForCausalLM(config))


def make_assistant(target, texts, *, ordered):
    """Random layers, and a head that is fitted to texts of the target in one least-squares solution."""
    kinds = ["sliding_attention", "full_attention"]
    text = Gemma4TextConfig(hidden_size=16, num_hidden_layers=2, layer_types=kinds, num_kv_shared_layers=2, **SHARED)
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=2,
    )
    assistant = _random(Gemma4AssistantForCausalLM(config))
    if ordered:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
        assistant.masked_embedding.token_ordering.copy_(order)
    features, following = [], []
    handle = assistant.model.register_forward_hook(lambda module, args, out: features.append(out.last_hidden_state[0]))
    for whole in texts:
        for length in range(2, len(whole)):
            drafts(target, assistant, whole[:length], 1)
            following.append(whole[length])
    handle.remove()
    wanted = torch.nn.functional.one_hot(torch.tensor(following), VOCAB).float()
    with torch.no_grad():
        head = torch.linalg.lstsq(torch.cat(features), wanted).solution.T
        assistant.lm_head.weight.copy_(head)
        if ordered:
            members = assistant.masked_embedding.token_ordering.view(CLUSTERS, -1)
            assistant.masked_embedding.centroids.weight.copy_(head[members].amax(dim=1))
    return assistant


def generate(target, prompt, count):
    """The prompt with the target's greedy text."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


@torch.inference_mode()
def drafts(target, assistant, text, count, ahead=1):
    """What the assistant drafts after a text, in transformers' code: one pass of the target without a cache, and the
    committed keys and values of its last layer of each kind.

    ahead: how far before the newest token the queries stand.
    """
    computed = len(text) - 1
    output = target.model(input_ids=torch.tensor([text[:computed]]), use_cache=False, return_shared_kv_states=True)
    shared = dict(output.shared_kv_states)
    shared["sliding_attention"] = tuple(each[:, :, -SHARED["sliding_window"] :] for each in shared["sliding_attention"])
    state, token, drafted = output.last_hidden_state[:, -1:], text[-1], []
    for _ in range(count):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(
            inputs_embeds=torch.cat([embedded, state], dim=-1),
            position_ids=torch.tensor([[computed - ahead]]),
            shared_kv_states=shared,
        )
        state, token = output.last_hidden_state, int(output.logits[0, -1].argmax())
        drafted.append(token)
    return drafted
