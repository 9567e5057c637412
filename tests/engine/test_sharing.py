"""A drafter that uses the target's embedding and head reads the target's own storage: there is no copy of either."""

from __future__ import annotations

import pytest
import torch
from inside import proposer_of, target_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec import LLM, SamplingParams

SHARING = {
    "eagle": {"model": "tiny/eagle"},
    "eagle3": {"model": "tiny/eagle3"},
    "dflash": {"model": "tiny/dflash"},
    "mtp": {"method": "mtp"},
}


class TablesRead(TorchDispatchMode):
    """Keeps every tensor of a token table's size that an operation is given."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.sizes = {vocab_size, hidden_size}
        self.tables = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and set(leaf.shape) == self.sizes:
                self.tables.append(leaf)
        return operation(*args, **(kwargs or {}))


def place(tensor):
    """Where a tensor's values lie; of a layout without a storage, which object it is."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


@pytest.mark.parametrize("quantization", [None, "int8_weight_only"])
@pytest.mark.parametrize("drafter", SHARING)
def test_drafting_reads_the_targets_embedding_and_head_and_no_other_table(drafter, quantization):
    config = SHARING[drafter] | {"num_speculative_tokens": 3}
    with LLM("tiny", speculative_config=config, quantization=quantization, max_model_len=64, max_num_seqs=1) as llm:
        target, network = target_of(llm), proposer_of(llm).network
        vocab_size, hidden_size = target.config.vocab_size, target.config.hidden_size
        embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        with TablesRead(vocab_size, hidden_size) as seen:
            output = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=12, detokenize=False))[0]
        assert output.outputs[0].spec_decode_metrics["num_draft_tokens"] > 0
        shared = [embedding.weight, *head.parameters(), *head.buffers()]
        assert seen.tables, "the target itself reads its tables"
        assert {place(table) for table in seen.tables} <= {place(tensor) for tensor in shared}
        held = [*network.parameters(), *network.buffers()]
        assert not any(set(tensor.shape) == {vocab_size, hidden_size} for tensor in held)
