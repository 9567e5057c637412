"""vLLM's prefix cache in its V2 runner: what is drafted after a cached prefix is what is drafted without the cache."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.full

BLOCK_SIZE = 32
SHARED = 3 * BLOCK_SIZE  # tokens


@pytest.fixture(scope="module")
def batches(batch):
    """A prompt, another that overwrites what its row held, it again, and one that parts from it where a block ends."""
    first, other = (batch[0] * 8)[: SHARED + 12], (batch[3] * 12)[:200]
    return [[first], [other], [first], [first[:SHARED] + batch[5][:12]]]


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "ngram"])
def test_a_warm_cache_changes_neither_text_nor_drafts(run_engine, batches, record, tiny_drafter, method):
    specdec = {} if method == "ngram" else {"model": tiny_drafter(method)}
    asked = {"k": 3, "specdec": specdec, "batches": batches, "sampling": {"max_tokens": 24}, "stepwise": True}
    cold, warm = (run_engine(method, enable_prefix_caching=cached, **asked) for cached in (False, True))
    assert cold["error"] is None
    assert warm["error"] is None
    again = SHARED - BLOCK_SIZE if method == "eagle3" else SHARED
    assert warm["cached"] == [[0], [0], [again], [again]]
    assert warm["outputs"] == cold["outputs"]
    assert warm["drafts"] == cold["drafts"]
    assert warm["reports"][0]["num_accepted_draft_tokens"] == cold["reports"][0]["num_accepted_draft_tokens"] > 20
    record(warm, *(["a draft network beside a prefix cache"] if specdec else []))


def test_every_row_of_draft_kv_after_a_cached_prefix_is_of_the_requests_own_text(run_engine, batches, record):
    """Also the last one of a block that two prompts share, where a row is computed from the token after it."""
    witness = {"method": "everywhere:KVWitness", "on_proposer_error": "raise"}
    run = run_engine("Configured", k=3, specdec=witness, batches=batches, sampling={"max_tokens": 8})
    assert run["error"] is None
    assert run["cached"] == [[0], [0], [SHARED - BLOCK_SIZE], [SHARED - BLOCK_SIZE]]
    record(run, "a draft network beside a prefix cache")
