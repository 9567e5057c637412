"""The draft model: it drafts what a fresh pass of transformers would, reports what it drew from, and has to fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from inside import host_of
from plugin_helpers import GREEDY, TINY, drafted_by_engine
from safetensors.torch import save_file
from scripts.small_models import small_config
from sweeps import pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.draft_model.recognise import is_language_model
from specdec.sdk import ConfigError, DistributionKind, ProposerConfig, Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.extensions import DraftKV
from specdec.testing import fake_target_info

TARGET = TINY / "target"
VOCAB_SIZE = 4096
KS = (1, 3, 5, 8)
ROOMS = {"roomy": {}, "chunked": {"max_num_batched_tokens": 32}, "scarce": {"num_kv_blocks": 28}}
SOME_KS = [pytest.param(k, marks=[pytest.mark.full] if k in (1, 5) else []) for k in KS]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    every = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    return [*every[::3], *every[1::3]]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """The target with noise in its weights: often right, often wrong."""
    folder = tmp_path_factory.mktemp("noisy")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder, model


def copy_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder / name)


def llm_with(model, k=4, **settings):
    extra = settings.pop("speculative", {})
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": k, **extra}
    return LLM("tiny", speculative_config=config, **{"max_model_len": 512} | settings)


@torch.no_grad()
def greedy(model, tokens, draft):
    """What the model finds likeliest after `tokens` and after each token of `draft` but the last, in one fresh pass."""
    logits = model(torch.tensor([[*tokens, *draft]]), use_cache=False).logits[0]
    return logits[len(tokens) - 1 : -1].argmax(-1).tolist()


def agreement(draft, truth):
    return [*(ours == theirs for ours, theirs in zip(draft, truth, strict=True)), False].index(False)


def token_ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def as_prompts(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.mark.parametrize("k", SOME_KS)
def test_the_target_as_its_own_drafter_is_accepted_whole(k, prompts):
    with llm_with(TARGET, k) as llm:
        seen = drafted_by_engine(llm, prompts[0])
    assert seen
    assert all(each.num_accepted == len(each.draft) for each in seen)
    assert len(seen[0].draft) == k


@pytest.mark.parametrize("k", SOME_KS)
def test_replay_gives_the_same_drafts_and_the_same_acceptance(k, prompts, noisy, target):
    folder, model = noisy
    with llm_with(folder, k) as llm:
        seen = drafted_by_engine(llm, prompts[1])
    for each in seen:
        assert each.draft == greedy(model, each.committed, each.draft)
        assert each.num_accepted == agreement(each.draft, greedy(target, each.committed, each.draft))
    histories = {min(each.num_accepted, 1) + (each.num_accepted == len(each.draft)) for each in seen}
    assert len(histories) > 1, "drafts were accepted and rejected"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 32}, marks=pytest.mark.slow),
        {"num_kv_blocks": 20, "max_num_batched_tokens": 48},
    ],
    ids=["chunked", "preempted"],
)
def test_drafts_after_any_history_are_those_of_a_fresh_pass(settings, prompts, noisy):
    folder, model = noisy
    with llm_with(folder, 3, max_num_seqs=8, **settings) as llm:
        committed: dict[str, list[int]] = {}
        checked = 0
        for update in llm.stream(as_prompts(prompts[:5]), GREEDY):
            if update.request_id not in committed:
                committed[update.request_id] = list(llm.engine.get_request(update.request_id).prompt_token_ids)
            if update.draft_token_ids and checked < 40:
                expected = greedy(model, committed[update.request_id], update.draft_token_ids)
                assert list(update.draft_token_ids) == expected
                checked += 1
            committed[update.request_id] += update.token_ids
        assert checked > 20
        assert ("num_kv_blocks" in settings) == (llm.engine.metrics.counts["num_preemptions"] > 0)


@pytest.fixture(scope="module")
def plain(prompts):
    with LLM("tiny", max_model_len=512) as llm:
        return token_ids(llm.generate(as_prompts(prompts), GREEDY))


@pytest.mark.parametrize(
    ("k", "count", "settings"),
    [
        (1, 1, {}),
        (3, 4, {"max_num_batched_tokens": 32}),
        pytest.param(8, 16, {}, marks=pytest.mark.slow),
        (5, 6, {"num_kv_blocks": 20, "max_num_batched_tokens": 48}),
        (5, 4, {"max_num_seqs": 2}),
    ],
    ids=["single", "chunked", "sixteen", "preempted", "rows-reused"],
)
def test_greedy_text_is_the_plain_one(k, count, settings, prompts, plain, noisy):
    with llm_with(noisy[0], k, **settings) as llm:
        assert token_ids(llm.generate(as_prompts(prompts[:count]), GREEDY)) == plain[:count]
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 0
        assert ("num_kv_blocks" in settings) == (llm.engine.metrics.counts["num_preemptions"] > 0)


@pytest.mark.full
@pytest.mark.parametrize(("k", "count", "room"), pairs(KS, [1, 4, 16], list(ROOMS)))
def test_greedy_text_is_the_plain_one_throughout(k, count, room, prompts, plain, noisy):
    with llm_with(noisy[0], k, **ROOMS[room]) as llm:
        assert token_ids(llm.generate(as_prompts(prompts[:count]), GREEDY)) == plain[:count]


def test_text_may_fill_max_model_len(prompts, noisy):
    prompt, params = prompts[0][:40], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM("tiny", max_model_len=64) as llm:
        expected = token_ids(llm.generate(as_prompts([prompt]), params))
    with llm_with(noisy[0], 8, max_model_len=64) as llm:
        found = token_ids(llm.generate(as_prompts([prompt]), params))
    assert found == expected
    assert len(found[0]) == 64 - len(prompt)


class Recording(DraftModelProposer):
    """Keeps every step and what was drafted in it; named by class path."""

    seen: ClassVar[list] = []

    def propose(self, step):
        draft = super().propose(step)
        names, budget = step.request_ids, step.budget.tolist()
        self.seen.append((names, budget, step.sampling, draft, [step.random.uniform(i) for i in range(4)]))
        return draft


@pytest.fixture
def recorded():
    Recording.seen = []
    yield Recording.seen
    Recording.seen = []


def recording_llm(model, form, **settings):
    config = {
        "method": f"{__name__}:Recording",
        "model": str(model),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
        "proposer_config": {"draft_distribution": form},
    }
    return LLM("tiny", speculative_config=config, max_model_len=512, **settings)


def reference_distribution(logits, params):
    """Temperature, top-k, min-p, top-p, each over what the one before it left: float64 [V]."""
    probs = (logits.double() / params.temperature).softmax(-1)
    if params.top_k > 0:
        probs = torch.where(probs >= probs.topk(params.top_k).values[-1], probs, 0.0)
        probs = probs / probs.sum()
    keep = probs >= params.min_p * probs.max()
    ordered, order = probs.sort(descending=True)
    inside = torch.zeros_like(keep)
    inside[order] = ordered.cumsum(0) - ordered < params.top_p
    probs = torch.where(keep & inside, probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize("form", ["sparse", "dense"])
@torch.no_grad()
def test_a_reported_distribution_is_the_one_drawn_from(form, prompts, noisy, recorded):
    folder, model = noisy
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, max_tokens=12, seed=3, ignore_eos=True)
    with recording_llm(folder, form) as llm:
        committed, num_checked = list(prompts[2]), 0
        for update in llm.stream(as_prompts([prompts[2]]), params):
            committed += update.token_ids
            if len(recorded) == num_checked:  # nothing was drafted: one token is left to produce
                continue
            num_checked = len(recorded)
            _, (budget,), _, draft, uniforms = recorded[-1]
            drawn = draft.token_ids[0, :budget].tolist()
            logits = model(torch.tensor([committed + drawn])).logits[0, len(committed) - 1 :]
            for index, token in enumerate(drawn):
                distribution = reported_distribution(draft.distribution, index)
                expected = reference_distribution(logits[index], params)
                assert torch.allclose(distribution, expected, atol=2e-5)
                probs, order = expected.sort(descending=True)
                below = float(probs.cumsum(0)[order.tolist().index(token)])
                assert below - float(expected[token]) - 1e-4 <= float(uniforms[index][0]) <= below + 1e-4
    assert len(recorded) > 3


def reported_distribution(distribution, index):
    """Of row 0 at one draft position, over the whole vocabulary: float64 [V]."""
    if DistributionKind(int(distribution.kind[0])) is DistributionKind.DENSE_LOGITS:
        return distribution.logits[0, index].double().softmax(-1)
    whole = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    ids, probs = distribution.sparse_ids[0, index], distribution.sparse_probs[0, index].double()
    return whole.index_add(0, ids.clamp(min=0), torch.where(ids >= 0, probs, 0.0))


def test_an_all_greedy_batch_reports_no_distribution(prompts, noisy, recorded):
    with recording_llm(noisy[0], "sparse") as llm:
        llm.generate(as_prompts(prompts[:2]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert recorded
    assert all(draft.distribution is None for *_, draft, _ in recorded)


def test_greedy_rows_of_a_mixed_batch_are_one_hot(prompts, noisy, recorded, plain):
    params = [SamplingParams(temperature=t, max_tokens=8, ignore_eos=True, seed=1) for t in (0, 1.0)]
    with recording_llm(noisy[0], "sparse") as llm:
        outputs = token_ids(llm.generate(as_prompts(prompts[:2]), params))
    assert outputs[0] == plain[0][:8]
    mixed = [entry for entry in recorded if len(entry[0]) == 2]
    assert mixed
    for _, _, sampling, draft, _ in mixed:
        expected = [
            DistributionKind.SPARSE if t > 0 else DistributionKind.ONE_HOT for t in sampling.temperature.tolist()
        ]
        assert draft.distribution.kind.tolist() == expected


def small_model(folder: Path, **changes) -> Path:
    """A random checkpoint of two layers with the target's tokenizer."""
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    config |= {"max_window_layers": 2, "pad_token_id": None, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", [VOCAB_SIZE - 8, VOCAB_SIZE + 64], ids=["fewer", "more"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_models_padded_to_other_sizes_run_if_their_tokenizers_agree(size, form, prompts, tmp_path):
    draft = small_model(tmp_path / "draft", vocab_size=size)
    config = {"draft_sample_method": "probabilistic", "proposer_config": {"draft_distribution": form}}
    prompt = [*prompts[0][:20], VOCAB_SIZE - 1]  # an id that the smaller one lacks
    with llm_with(draft, 3, speculative=config) as llm:
        (output,) = llm.generate(as_prompts([prompt]), SamplingParams(max_tokens=10, seed=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 10
        assert llm.engine.metrics.acceptance.num_draft_tokens > 0


def test_another_vocabulary_is_refused_with_the_numbers(tmp_path):
    draft = small_model(tmp_path / "draft")
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (300, 301))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(Refusal, match=r"has 4096 tokens and the target's 4096; token .* is 300 there and 301"):
        llm_with(draft, speculative={"vocabulary": "same"})


def test_another_size_is_refused_before_loading_where_no_tokenizer_can_tell(tmp_path):
    draft = small_model(tmp_path / "draft", vocab_size=500)
    (draft / "tokenizer.json").unlink()
    (draft / "model.safetensors").unlink()
    with pytest.raises(Refusal, match="vocabulary has 500 tokens, the target's 4096"):
        llm_with(draft)


def test_fewer_positions_than_the_target_are_refused(tmp_path):
    draft = small_model(tmp_path / "draft", max_position_embeddings=128)
    with pytest.raises(Refusal, match="serves 128 positions, and max_model_len is 512"):
        llm_with(draft)
    with llm_with(draft, max_model_len=128) as llm:
        assert host_of(llm) is not None


def test_rotary_tables_that_depend_on_the_longest_text_are_refused_as_those_of_heads_are(tmp_path):
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope |= {"factor": 8.0, "original_max_position_embeddings": 64}
    draft = small_model(tmp_path / "draft", rope_parameters=longrope)
    with pytest.raises(Refusal, match="'longrope' rotary scaling keeps its tables up to 64 positions"):
        llm_with(draft)
    with llm_with(draft, max_model_len=64) as llm:
        assert host_of(llm) is not None


@pytest.fixture
def with_code(tmp_path):
    """A draft model whose configuration and modelling code come with its checkpoint."""
    folder = small_model(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "of_its_own", "auto_map": classes}))
    lines = ["from transformers import Qwen3Config, Qwen3ForCausalLM", "class Config(Qwen3Config):"]
    lines += ["    model_type = 'of_its_own'", "class Model(Qwen3ForCausalLM):", "    config_class = Config"]
    (folder / "code.py").write_text("\n".join(lines))
    return folder


def test_code_of_a_checkpoint_of_the_hub_is_fetched_and_trusted_without_a_question(with_code, tmp_path, monkeypatch):
    def download(name, allow_patterns):
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in with_code.glob(pattern):
                shutil.copy(file, snapshot)
        return snapshot

    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    with llm_with("owner/draft", speculative={"trust_remote_code": True}) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert llm.engine.metrics.acceptance.num_draft_tokens > 0
    assert asked == []


def test_it_drafts_one_token_after_the_other_where_that_is_asked_for(tmp_path):
    with llm_with(small_model(tmp_path / "draft", pard_token=63), speculative={"parallel_drafting": False}) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert llm.engine.metrics.acceptance.num_draft_tokens > 0


def test_the_draft_kv_is_that_of_every_layer():
    config = ProposerConfig(num_draft_tokens=5, model=str(TARGET), options=DraftModelProposer.Options())
    kv = DraftModelProposer.needs(config, fake_target_info(vocab_size=VOCAB_SIZE)).extension(DraftKV)
    assert (kv.num_layers, kv.num_heads, kv.head_dim, kv.lookahead) == (8, 2, 64, 5)
    assert not kv.depends_on_next_token


def test_layers_with_heads_of_their_own_are_refused_before_weights_are_loaded(tmp_path):
    small_config("gemma4_text").save_pretrained(tmp_path)
    config = ProposerConfig(num_draft_tokens=2, model=str(tmp_path), options=DraftModelProposer.Options())
    with pytest.raises(Refusal, match="layers 1 have heads of their own"):
        DraftModelProposer.needs(config, fake_target_info(max_model_len=64, vocab_size=128))


@pytest.mark.parametrize(
    ("model", "code"), [(None, "SD-E133"), ("no/such/place/at all", "SD-E105")], ids=["none-given", "absent"]
)
def test_without_a_checkpoint_the_user_is_told(model, code):
    config = ProposerConfig(num_draft_tokens=2, model=model, options=DraftModelProposer.Options())
    with pytest.raises(ConfigError) as caught:
        DraftModelProposer.needs(config, fake_target_info())
    assert caught.value.code == code


def test_an_unreadable_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows_this"}')
    config = ProposerConfig(num_draft_tokens=2, model=str(tmp_path), options=DraftModelProposer.Options())
    with pytest.raises(ConfigError, match="nobody_knows_this") as caught:
        DraftModelProposer.needs(config, fake_target_info())
    assert caught.value.code == "SD-E143"


LAYER = {"self_attn.q_proj.weight": (8, 8), "mlp.down_proj.weight": (8, 16)}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 32}


def checkpoint(folder, config, *shapes):
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.zeros(shape) for part in shapes for name, shape in part.items()}
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def layers(prefix, count):
    return {f"{prefix}{index}.{name}": shape for index in range(count) for name, shape in LAYER.items()}


EMBEDDING = {"model.embed_tokens.weight": (32, 8)}
FC = {"fc.weight": (8, 16)}
EXPERTS = {f"model.layers.0.mlp.experts.{index}.down_proj.weight": (8, 4) for index in range(6)}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (LLAMA, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"num_hidden_layers": 3}, (EMBEDDING, layers("model.layers.", 3))),
        (LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}, (EMBEDDING, layers("model.layers.", 1), EXPERTS)),
        (
            {"architectures": ["GPT2LMHeadModel", "GPT2ForCausalLM"][1:], "n_layer": 2, "vocab_size": 32},
            ({"wte.weight": (32, 8)}, layers("h.", 2)),
        ),
        (LLAMA | {"mask_token_id": None, "num_nextn_predict_layers": 0}, (EMBEDDING, layers("model.layers.", 1))),
    ],
    ids=["one-layer", "three-layers", "experts", "old-names", "keys-without-a-value"],
)
def test_language_models_are_recognised(config, shapes, tmp_path):
    assert is_language_model(checkpoint(tmp_path, config, *shapes))


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (LLAMA, (EMBEDDING, layers("layers.", 1), FC)),
        (LLAMA, ({"embed_tokens.weight": (32, 8)}, layers("midlayer.", 1), FC)),
        (LLAMA | {"num_hidden_layers": 40}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"draft_vocab_size": 16}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"architectures": ["DFlashDraftModel"], "dflash_config": {}}, (layers("layers.", 1),)),
        (LLAMA | {"target_layer_ids": [1], "mask_token_id": 3}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"medusa_num_heads": 3}, (EMBEDDING, layers("model.layers.", 1))),
        ({"medusa_num_heads": 3}, ({"0.0.linear.weight": (8, 8)},)),
        (LLAMA | {"num_nextn_predict_layers": 1}, (EMBEDDING, layers("model.layers.", 2))),
        (LLAMA, (EMBEDDING, layers("model.layers.", 1), {"mtp.fc.weight": (8, 16)})),
        (LLAMA | {"speculators_model_type": "eagle3"}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA, (layers("model.layers.", 1),)),
        (LLAMA | {"architectures": ["LlamaModel"]}, (EMBEDDING, layers("model.layers.", 1))),
        (LLAMA | {"architectures": ["LlavaForConditionalGeneration"]}, (EMBEDDING, layers("model.layers.", 1))),
    ],
    ids=[
        "features-and-token", "three-features", "fewer-layers-than-stated", "draft-vocabulary", "head-by-name",
        "block-drafter", "block-drafter-flattened", "heads-on-a-model", "heads", "next-token-layers",
        "next-token-tensors", "speculators", "no-embedding", "no-head", "images",
    ],
)  # fmt: skip
def test_what_another_family_marks_is_not_claimed(config, shapes, tmp_path):
    assert not is_language_model(checkpoint(tmp_path, config, *shapes))


def test_weights_are_not_looked_at_where_the_configuration_tells(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"medusa_num_heads": 3}))
    assert not is_language_model(Checkpoint.open(tmp_path))


def shipped(folder):
    return pytest.param(folder, marks=pytest.mark.skipif(not (TINY / folder).is_dir(), reason="not trained here"))


@pytest.mark.parametrize("folder", [shipped("draft"), shipped("moe"), shipped("moe_draft")])
def test_shipped_models_are_recognised(folder):
    assert is_language_model(Checkpoint.open(TINY / folder))


@pytest.mark.parametrize("folder", [shipped("eagle"), shipped("eagle3"), shipped("dflash"), shipped("medusa")])
def test_shipped_heads_are_not_claimed(folder):
    assert not is_language_model(Checkpoint.open(TINY / folder))


@pytest.mark.skipif(not (TINY / "draft").is_dir(), reason="not trained here")
def test_the_shipped_draft_model_is_accepted_for_the_greater_part(prompts):
    with llm_with(TINY / "draft", 3) as llm:
        seen = [each for prompt in prompts[:4] for each in drafted_by_engine(llm, prompt)]
    assert sum(each.num_accepted for each in seen) / sum(len(each.draft) for each in seen) > 0.4
