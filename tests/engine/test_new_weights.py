"""A proposer takes new weights between two steps: all of them or none, and drafts with them from then on."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from inside import proposer_of
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.core.model.model_support import locate_model
from specdec.core.proposing.proposer_host import as_tensors
from specdec.plugins.eagle.proposer import Eagle3Proposer
from specdec.plugins.ngram import NgramProposer
from specdec.sdk import ConfigError, hookimpl
from specdec.sdk.combinators import Chain
from specdec.sdk.errors import RequestError

EAGLE3 = {"model": "tiny/eagle3", "num_speculative_tokens": 3}
HEADS = {
    "eagle3": EAGLE3,
    "draft_model": {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": 3},
    "experts": {"method": "draft_model", "model": "tiny/moe_draft", "num_speculative_tokens": 3},
    "eagle": {"model": "tiny/eagle", "num_speculative_tokens": 3},
    "dflash": {"model": "tiny/dflash", "num_speculative_tokens": 4},
    "medusa": {"model": "tiny/medusa", "num_speculative_tokens": 2},
}
QUICK = ("eagle3", "draft_model", "experts")  # tensors of a file, a model of transformers, and one that joins tensors
FORMS = [
    {"dtype": "bfloat16", "cpu_kernels": "torch"},  # weights in oneDNN's blocks
    {"quantization": "int8_weight_only"},
    {"torch_compile": True},
]
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return "
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class LookUpThenHead(Chain):
    parts = (NgramProposer, Eagle3Proposer)


@cache
def changed(name):
    """A checkpoint whose matrices are others, and these matrices."""
    folder = Path(mkdtemp(prefix="specdec-changed-")) / name
    shutil.copytree(locate_model(HEADS[name]["model"]), folder)
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {
        tensor_name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for tensor_name, tensor in stored.items()
        if tensor.is_floating_point() and tensor.ndim == 2 and "embed_tokens" not in tensor_name
    }
    save_file(stored | new, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, new


def engine(name, **changes):
    own = {key: changes.pop(key) for key in ("model", "quantization") if key in changes}
    return LLM("tiny", speculative_config=HEADS[name] | own, max_model_len=128, max_num_seqs=2, **changes)


def drafts(llm):
    """Of every step of one request."""
    return [update.draft_token_ids for update in llm.stream([PROMPT], GREEDY)]


def tensors_of(network):
    return dict(network.named_parameters()) | dict(network.named_buffers())


def weights(llm):
    return {name: each.clone() for name, each in tensors_of(proposer_of(llm).network).items()}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(pytest.param(name, {}, marks=() if name in QUICK else pytest.mark.full) for name in HEADS),
        *(pytest.param("eagle3", form, marks=pytest.mark.full) for form in FORMS),
    ],
)
def test_drafts_are_those_of_an_engine_that_was_loaded_with_the_weights(name, form):
    folder, new = changed(name)
    with engine(name, model=str(folder), **form) as llm:
        expected = drafts(llm)
    with engine(name, **form) as llm:
        before = drafts(llm)
        llm.update_proposer_weights(new)
        after = drafts(llm)
    assert after == expected != before


def test_updates_add_up_and_a_training_loop_may_go_on_with_its_tensors():
    _, new = changed("eagle3")
    with engine("eagle3") as together, engine("eagle3") as apart:
        together.update_proposer_weights(new)
        for name, tensor in new.items():
            mine = tensor.float()
            apart.update_proposer_weights({name: mine})
            mine.zero_()
        for name, tensor in weights(together).items():
            assert torch.equal(tensor, weights(apart)[name]), name


def test_drafts_that_wait_are_dropped_and_the_request_goes_on():
    texts = {}
    for update in (False, True):
        with engine("eagle3") as llm:
            request_id = llm.engine.add_request(PROMPT, GREEDY)
            request = llm.engine.get_request(request_id)
            while not llm.engine.step()[0].draft_token_ids:
                pass
            if update:
                llm.update_proposer_weights(changed("eagle3")[1])
            (committed,) = llm.engine.step()
            assert (committed.draft_token_ids == []) is update
            while llm.engine.has_unfinished_requests:
                llm.engine.step()
            texts[update] = list(request.output_token_ids)
    assert texts[True] == texts[False]


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"fc.wieght": torch.zeros(256, 768)}, "fc.wieght .*no tensor of the checkpoint"),
        ({"fc.weight": torch.zeros(256, 512)}, r"fc.weight .*expected \[256, 768\], found \[256, 512\]"),
        ({"fc.weight": torch.zeros(256, 768, dtype=torch.int64)}, "found torch.int64"),
        ({"fc.weight": torch.full((256, 768), torch.nan)}, "a NaN"),
        ({"fc.weight": [[0.0]]}, "'fc.weight': list"),
        ([torch.zeros(1)], "list"),
    ],
)
def test_what_does_not_fit_changes_nothing(tensors, found):
    with engine("eagle3") as llm:
        before = weights(llm)
        fitting = {"norm.weight": torch.zeros(256)}
        with pytest.raises(ConfigError, match=f"(?s)SD-E228.*{found}"):
            llm.update_proposer_weights(fitting | tensors if isinstance(tensors, dict) else tensors)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(llm).items())


def test_one_expert_may_be_new_and_one_that_is_not_there_is_named():
    _, new = changed("experts")
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    with engine("experts") as llm:
        before = drafts(llm)
        llm.update_proposer_weights({expert.format(0): 50 * new[expert.format(0)].float()})
        assert drafts(llm) != before
        with pytest.raises(ConfigError, match=r"(?s)SD-E228(?!.*experts\.0).*experts\.9\.up_proj.*no tensor"):
            llm.update_proposer_weights({expert.format(9): new[expert.format(0)]})


def test_a_table_that_is_shared_with_the_target_cannot_become_another():
    with engine("eagle3") as llm:
        before = weights(llm)
        table = load_file(Path(locate_model("tiny/eagle3")) / "model.safetensors")["embed_tokens.weight"]
        llm.update_proposer_weights({"embed_tokens.weight": table})
        with pytest.raises(ConfigError, match=r"(?s)SD-E229.*embedding"):
            llm.update_proposer_weights({"embed_tokens.weight": table + 1, "norm.weight": torch.zeros(256)})
        with pytest.raises(ConfigError, match=r"(?s)SD-E229.*draft vocabulary"):
            llm.update_proposer_weights({"d2t": torch.arange(2048)})
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(llm).items())


@pytest.mark.parametrize("asked", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_who_has_no_weights_says_so(asked):
    llm = LLM("tiny", speculative_config=asked, max_model_len=64, max_num_seqs=1)
    with llm, pytest.raises(ConfigError, match="SD-E227"):
        llm.update_proposer_weights({})


def test_weights_are_not_taken_within_a_step():
    with engine("eagle3") as llm:

        class Impatient:
            @hookimpl
            def on_verified(self, step):
                with pytest.raises(RequestError, match="SD-E177"):
                    llm.update_proposer_weights({})
                self.was_refused = True

        llm.add_hooks(hook := Impatient())
        llm.generate([PROMPT], GREEDY.replace(max_tokens=2))
        assert hook.was_refused


def test_a_combinator_hands_weights_to_the_part_that_they_are_named_after():
    _, new = changed("eagle3")
    config = {"method": f"{__name__}:LookUpThenHead", "num_speculative_tokens": 3}
    config["proposer_config"] = {"eagle3": {"model": "tiny/eagle3"}}
    with LLM("tiny", speculative_config=config, max_model_len=128, max_num_seqs=1) as llm, engine("eagle3") as alone:
        llm.update_proposer_weights({f"eagle3.{name}": tensor for name, tensor in new.items()})
        alone.update_proposer_weights(new)
        part = proposer_of(llm).members[1].proposer
        assert all(torch.equal(each, weights(alone)[name]) for name, each in tensors_of(part.network).items())
        for wrong in (
            new,
            {"ngram.x": torch.zeros(1)},
            {"eagle3.norm.weight": torch.zeros(256), "x.y": torch.zeros(1)},
        ):
            with pytest.raises(ConfigError, match=r"(?s)SD-E228.*eagle3.NAME"):
                llm.update_proposer_weights(wrong)


@pytest.mark.parametrize("weights", [{7: torch.zeros(2)}, {"a": torch.zeros(2), 7: torch.zeros(2)}, {"a": 1.0}, [1]])
def test_what_is_no_mapping_of_names_to_tensors_is_no_weights(weights):
    with pytest.raises(ConfigError) as raised:
        as_tensors(weights)
    assert raised.value.code == "SD-E228"
