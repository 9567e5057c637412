"""A proposer that declares layers of the target reads what they cached, and can write none of it."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, make_llm
from inside import proposer_of
from torch.nn.functional import scaled_dot_product_attention

from specdec import LLM
from specdec.core.cache.block_pool import BlockPool
from specdec.core.cache.kv_cache import KVCache, LayerShape
from specdec.core.cache.row_table import RowTable
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cuda.addressing import DeviceAddressing
from specdec.core.model.attention import CONTEXT
from specdec.core.proposing.target_access import CachedKV, TargetCache
from specdec.sdk import Draft, Needs, Refusal
from specdec.sdk.extensions import TargetKV

LAYERS = (1, 6)


class Reading:
    """Keeps a fingerprint of what the cache holds of each request, and overwrites its copies."""

    needs = Needs(history=True, extensions=(TargetKV(layers=LAYERS),))

    def __init__(self, config):
        self.found = {}

    def bind(self, target, services):
        self.kv = services.target_kv()

    def propose(self, step):
        for name, row, length in zip(
            step.request_ids, step.slots.tolist(), step.kept.next_position.tolist(), strict=True
        ):
            for layer in LAYERS:
                keys, values = self.kv.read(layer, row, length)
                self.found[name, layer, length] = keys.clone(), values.clone()
                keys.zero_()
                values.fill_(torch.nan)
        return Draft.from_lists([[1, 2][:budget] for budget in step.budget.tolist()], step.width)


class Greedy(Reading):
    """Reads a layer that it did not declare."""

    def propose(self, step):
        self.kv.attention(step.slots, step.kept.next_position, (0, 1))


class Silent(Reading):
    needs = Needs()


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "block_size": 16}], ids=["whole", "chunked"])
def test_it_reads_what_the_target_computed_and_changes_nothing(prompts, reference_model, settings):
    asked = [{"prompt_token_ids": prompt[:40]} for prompt in prompts[:3]]
    params = GREEDY.replace(max_tokens=8)
    plain = [list(output.outputs[0].token_ids) for output in make_llm().generate(asked, params)]
    llm = make_llm("test_target_kv:Reading", k=2, **settings)
    outputs = llm.generate(asked, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    found = proposer_of(llm).found
    for output in outputs:
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            cache = reference_model(torch.tensor([text]), use_cache=True).past_key_values
        shown = {(layer, length): kv for (name, layer, length), kv in found.items() if name == output.request_id}
        assert len(shown) >= 2 * 4
        for (layer, length), (keys, values) in shown.items():
            expected = cache.layers[layer].keys[0, :, :length], cache.layers[layer].values[0, :, :length]
            assert torch.allclose(keys.transpose(0, 1), expected[0], atol=1e-3)
            assert torch.allclose(values.transpose(0, 1), expected[1], atol=1e-3)


def test_each_query_sees_its_rows_committed_positions_and_a_window_the_last_of_them():
    generator = torch.Generator().manual_seed(0)
    cache = KVCache([LayerShape(2, 8, 8)], 12, 4, torch.float32, torch.device("cpu"))
    for stored in (*cache.keys, *cache.values):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    addressing = addressing_of_two_rows()
    made = TargetCache()
    made.kv, made.addressing = cache, addressing
    kv = CachedKV(made, (0,))
    query = torch.randn(3, 4, 8, generator=generator)
    rows, lengths = torch.tensor([1, 0, 1]), torch.tensor([13, 5, 2])
    for window in (None, 4):
        context = kv.attention(rows, lengths, [0])[CONTEXT]
        output = context.attend(0, query, query[:, :2], query[:, :2], AttentionSpec(0.3, window=window))
        for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            keys, values = kv.read(0, row, length)
            seen = slice(max(0, length - (window or length)), length)
            expected = scaled_dot_product_attention(
                query[index][:, None],
                keys[seen].transpose(0, 1),
                values[seen].transpose(0, 1),
                scale=0.3,
                enable_gqa=True,
            )[:, 0]
            assert torch.allclose(output[index], expected, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(before, (*cache.keys, *cache.values), strict=True))


def addressing_of_two_rows():
    """A block table in which two rows own blocks that are not adjacent."""
    addressing = DeviceAddressing(RowTable(2, BlockPool(11, 4, 4)), 2, 4, torch.device("cpu"))
    addressing.table.update([(0, 1, [7, 2]), (1, 1, [1, 5, 3, 9])])
    return addressing


class Curious(Reading):
    """Reads a layer that it did not declare, as a copy."""

    def propose(self, step):
        self.kv.read(0, 0, 1)


@pytest.mark.parametrize(("reader", "read"), [("Greedy", r"\[0, 1\]"), ("Curious", r"\[0\]")])
def test_a_layer_that_was_not_declared_is_refused(reader, read, prompts):
    llm = make_llm(f"test_target_kv:{reader}", k=2)
    with pytest.raises(Exception, match=rf"layers {read} of the target are read, and 1, 6 declared"):
        llm.generate([{"prompt_token_ids": prompts[0][:20]}], GREEDY)


def test_nothing_declared_is_nothing_lent():
    with pytest.raises(Refusal, match="target_kv belongs to target_kv@1"):
        make_llm("test_target_kv:Silent", k=2)


def test_layers_that_are_not_there_or_keep_a_state_are_refused_by_name():
    class_path = "test_target_kv:Reading"
    with pytest.raises(Refusal, match=r"(?s)layer 6 of tiny/moe.*layers 0 \.\. 3"):
        LLM("tiny/moe", speculative_config={"method": class_path, "num_speculative_tokens": 2})
    with pytest.raises(Refusal, match="stores none of them"):
        LLM("tiny/hybrid", speculative_config={"method": class_path, "num_speculative_tokens": 2})
