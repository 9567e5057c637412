"""What a replay of a token reader costs does not depend on the target whose text was recorded."""

from contextlib import closing

import pytest
from benchmarks.replay import enlarged
from recordings import shared
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.lab.replay.assembly import ReplayEngine
from specdec.lab.replay.run import params_of, replay

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return enlarged(shared(), tmp_path_factory.mktemp("large") / "x")


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator gave."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))])
        return result


def test_a_recording_of_a_70b_target_is_replayed_like_any_other(large):
    assert large.manifest.target["vocab_size"] == 128_256
    assert replay(large, NGRAM).steps == replay(shared(), NGRAM).steps


def test_token_readers_read_no_hidden_states(large):
    (states,) = large.folder.glob("*.safetensors")
    aside = states.rename(states.with_suffix(".aside"))
    try:
        assert replay(large, NGRAM).steps == replay(shared(), NGRAM).steps
    finally:
        aside.rename(states)


def test_the_tensors_of_a_step_are_no_larger_than_for_a_small_target(large):
    assert most_elements(large) == most_elements(shared())


def most_elements(recording):
    """Of what the steps of a replay make, apart from the start of its engine."""
    with closing(ReplayEngine(recording, NGRAM)) as engine, Largest() as largest:
        for request in recording:
            engine.add_request(list(request.prompt_token_ids), params_of(recording, request), request.request_id)
        while engine.has_unfinished_requests:
            engine.step()
    return largest.numel
