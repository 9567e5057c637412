"""The engine as a GPU addresses its cache, run on a CPU: block tables, paged attention, device forms of views."""

from __future__ import annotations

import pytest
import torch
from device_steps import address_by_table
from engine_helpers import GREEDY, assert_same_tokens, counter, make_llm, tokens
from inside import addressing_of

from specdec.core.cache.block_pool import BlockPool
from specdec.core.cache.row_table import RowTable
from specdec.core.engine.device import PROFILES
from specdec.core.kernels.cuda.addressing import DeviceAddressing
from specdec.core.kernels.cuda.block_table import BlockTable
from specdec.plugins.dflash.proposer import DFlashProposer
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.eagle.proposer import Eagle3Proposer

CPU = torch.device("cpu")
PAD = 99
SETTINGS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 48},
    "scarce": {"num_kv_blocks": 20, "max_num_batched_tokens": 60},
}


class OnDevice:
    """Mixed into a proposer: the form of kept tokens that a device would be shown."""

    @classmethod
    def needs(cls, config, target):
        return super().needs(config, target).replace(placement="device")


class DeviceEagle3(OnDevice, Eagle3Proposer):
    pass


class DeviceDFlash(OnDevice, DFlashProposer):
    pass


class DeviceDraftModel(OnDevice, DraftModelProposer):
    pass


DRAFTERS = {"eagle3": DeviceEagle3, "dflash": DeviceDFlash, "draft": DeviceDraftModel}


BY_LISTS = PROFILES["cpu"]


@pytest.fixture(autouse=True)
def by_table(monkeypatch):
    address_by_table(monkeypatch)


def generate(llm, prompts):
    assert isinstance(addressing_of(llm), DeviceAddressing)
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_equals_transformers(name, prompts, truth, sequences, reference_model):
    options = {"sequences": sequences, "wrong_every": 3, "ragged": True}
    llm = make_llm("Scripted", options=options, **SETTINGS[name])
    assert_same_tokens(generate(llm, prompts[:6]), truth[:6], prompts[:6], reference_model)
    assert (counter(llm, "num_preemptions") > 0) == (name == "scarce")


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_with_kv_of_their_own_draft_as_they_do_by_lists(name, prompts, truth, target_path, monkeypatch):
    """The same tokens, and exactly as many drafts accepted: their KV holds the same rows."""
    method = f"{__name__}:{DRAFTERS[name].__name__}"
    accepted = {}
    for way in ("cuda", "cpu"):
        with monkeypatch.context() as patched:
            if way == "cpu":
                patched.setitem(PROFILES, "cpu", BY_LISTS)
            llm = make_llm(method, k=3, speculative={"model": str(target_path.parent / name)}, max_num_seqs=3)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:5]], GREEDY)
            assert tokens(outputs) == truth[:5]
            accepted[way] = counter(llm, "spec_decode_num_accepted_tokens")
    assert accepted["cuda"] == accepted["cpu"] > 0


def test_block_table_sends_only_what_is_new():
    table = BlockTable(3, 4, PAD, CPU)
    table.update([(0, 1, [5, 6]), (2, 1, [7])])
    version = table.blocks._version
    table.update([(0, 1, [5, 6]), (2, 1, [7])])
    assert table.blocks._version == version
    table.update([(0, 1, [5, 6, 8])])
    assert table.blocks.tolist() == [[5, 6, 8, PAD], [PAD] * 4, [7, PAD, PAD, PAD], [PAD] * 4]


def test_a_row_that_changes_hands_forgets_its_predecessors_blocks():
    table = BlockTable(1, 4, PAD, CPU)
    table.update([(0, 1, [5, 6, 8])])
    table.update([(0, 2, [9])])
    assert table.blocks[0].tolist() == [9, PAD, PAD, PAD]


def test_what_an_interrupted_step_did_not_write_is_sent_again():
    table = BlockTable(2, 4, PAD, CPU)
    table.changes([(0, 1, [5, 6]), (1, 1, [7])])  # and nobody writes
    table.update([(0, 1, [5, 6])])
    table.update([(1, 1, [7])])
    assert table.blocks[:2].tolist() == [[5, 6, PAD, PAD], [7, PAD, PAD, PAD]]


def test_what_an_interrupted_step_wrote_for_somebody_else_is_written_over():
    table = BlockTable(1, 4, PAD, CPU)
    places, entries = table.changes([(0, 1, [5, 6, 8])])
    table.table.view(-1)[torch.tensor(places)] = torch.tensor(entries, dtype=torch.int32)  # interrupted here
    table.update([(0, 2, [9])])
    assert table.blocks[0].tolist() == [9, PAD, PAD, PAD]


def test_positions_behind_a_request_lie_in_the_pad_block():
    table = BlockTable(2, 3, PAD, CPU)
    table.update([(0, 1, [5]), (1, 1, [6, 7, 8])])
    rows, positions = torch.tensor([0, 0, 0, 0, table.pad_row, 1]), torch.tensor([0, 15, 16, 1000, 3, 48])
    found = table.slots(rows, positions, block_size=16).tolist()
    assert found[:2] == [80, 95]
    assert all(slot // 16 == PAD for slot in found[2:])


def test_an_engine_that_keeps_a_block_for_nobody_needs_no_other():
    pool = BlockPool(6, 16, null_block=0)
    addressing = DeviceAddressing(RowTable(2, pool), 2, 3, CPU)
    assert addressing.num_pad_blocks == 0
    assert addressing.table.blocks.tolist() == [[0] * 3] * 3
    assert DeviceAddressing(RowTable(2, BlockPool(6, 16)), 2, 3, CPU).num_pad_blocks == 1
