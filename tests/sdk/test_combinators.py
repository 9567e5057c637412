"""Chain and Adaptive: who drafts what, what each part is shown, and what the whole needs of the engine."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from inside import drafts_of
from pydantic import BaseModel, ConfigDict, Field

import specdec
from specdec import LLM, SamplingParams
from specdec.sdk import (
    PADDING_TOKEN_ID,
    ConfigError,
    DistributionKind,
    Draft,
    DraftDistribution,
    HostProposer,
    Needs,
    ProposerConfig,
    ProposerError,
    Refusal,
    RequestView,
    StrictModel,
    lifecycle,
)
from specdec.sdk.combinators import AcceptanceThreshold, Adaptive, Chain, LengthPolicy
from specdec.sdk.combinators.chain import _DeviceAuthors
from specdec.sdk.combinators.host_form import host_form
from specdec.sdk.errors import PluginLoadError
from specdec.sdk.extensions import DraftKV, State
from specdec.testing import FakeServices, fake_target_info, step_view

K = 4
TOKENS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
TARGET = fake_target_info()


class Spy:
    """Drafts its `token`, `lengths[b]` times in row b of the step; keeps what it was shown."""

    needs = Needs(state="per_request")

    class Options(StrictModel):
        token: int = 1
        lengths: tuple[int, ...] = ()

    def __init__(self, config):
        self.config, self.log = config, []
        self.token, self.lengths = config.options.token, config.options.lengths

    def propose(self, step):
        self.log.append(("propose", step))
        lengths = self.lengths or (step.width,) * len(step)
        pairs = zip(lengths, step.budget.tolist(), strict=True)
        return Draft.from_lists([[self.token] * min(pair) for pair in pairs], step.width)

    def observe(self, step):
        self.log.append(("observe", step))

    def on_start(self, request):
        self.log.append(("on_start", request))

    def on_finish(self, request):
        self.log.append(("on_finish", request))


class First(Spy):
    """It keeps its token on disk."""

    needs = Needs(state="per_request", extensions=(State(),))

    def save(self, path):
        (path / "token").write_text(str(self.token))

    def load(self, path):
        self.token = int((path / "token").read_text())


class Second(First):
    pass


class Bare:
    """No options, no lifecycle, no needs."""

    def __init__(self, config):
        self.config = config

    def propose(self, step):
        return Draft.from_lists([[9] * budget for budget in step.budget.tolist()], step.width)


class Short(Spy):
    needs = Needs(max_draft_tokens=2)


class Long(Spy):
    needs = Needs(min_draft_tokens=3)


def part_with(name="Part", **needs):
    return type(name, (Spy,), {"needs": Needs(**needs)})


def config_of(cls, k=K, **options):
    return ProposerConfig(num_draft_tokens=k, options=cls.Options.parse(options, "proposer_config"))


def bound(cls, k=K, **options):
    proposer = cls(config_of(cls, k, **options))
    proposer.bind(TARGET, FakeServices())
    return proposer


@pytest.fixture(params=["host", "device"])
def authors(request, monkeypatch):
    """Who drafted which row is kept in lists on a host, and in a tensor on a device: here too, on the CPU."""
    if request.param == "device":
        on_cpu = partial(_DeviceAuthors, device=torch.device("cpu"))
        monkeypatch.setattr("specdec.sdk.combinators.chain._HostAuthors", on_cpu)


def run_step(proposer, tokens=TOKENS, k=K, **facts):
    step = step_view(tokens, k, **facts)
    proposer.observe(step)
    return proposer.propose(step)


def rows_of(draft):
    assert all(
        ids[length:] == [PADDING_TOKEN_ID] * (len(ids) - length)
        for ids, length in zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)
    )
    return [ids[:length] for ids, length in zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)]


def shown(proposer, index, method="propose"):
    return [step for name, step in proposer.members[index].proposer.log if name == method]


def request(name="a"):
    return RequestView(request_id=name, slot=0, generation=1, prompt_token_ids=())


def merged(*parts, k=K, **options):
    cls = Chain.of(*parts)
    return cls.needs(config_of(cls, k, **options), TARGET)


@pytest.mark.usefixtures("authors")
def test_each_row_is_drafted_by_the_first_part_that_drafts_it():
    chain = bound(Chain.of(First, Second), first={"token": 1, "lengths": (2, 0, 1)}, second={"token": 2})
    assert rows_of(run_step(chain)) == [[1, 1], [2, 2, 2, 2], [1]]


@pytest.mark.usefixtures("authors")
def test_a_part_is_asked_only_for_rows_without_a_draft():
    chain = bound(Chain.of(First, Second), first={"lengths": (2, 0, 1)}, second={"token": 2})
    run_step(chain, budget=[4, 3, 2])
    (step,) = shown(chain, 1)
    assert step.budget.tolist() == [0, 3, 0]
    (observed,) = shown(chain, 1, "observe")
    assert observed.budget.tolist() == [4, 3, 2]


def test_no_part_is_asked_once_every_row_has_a_draft():
    chain = bound(Chain.of(First, Second))
    run_step(chain)
    assert len(shown(chain, 0)) == 1
    assert len(shown(chain, 1)) == 0
    assert len(shown(chain, 1, "observe")) == 1


@pytest.mark.usefixtures("authors")
def test_rows_that_nobody_drafts_stay_empty():
    chain = bound(Chain.of(First, Second), first={"lengths": (0, 0, 1)}, second={"lengths": (0, 2, 0), "token": 2})
    assert rows_of(run_step(chain)) == [[], [2, 2], [1]]


@pytest.mark.usefixtures("authors")
def test_a_part_finds_only_its_own_drafts_among_the_verified_ones():
    chain = bound(Chain.of(First, Second), first={"lengths": (2, 0, 0)}, second={"lengths": (0, 2, 0)})
    run_step(chain)
    run_step(chain, num_drafted=[2, 2, 0], num_accepted=[1, 2, 0])
    for method in ("observe", "propose"):
        first, second = shown(chain, 0, method)[1], shown(chain, 1, method)[1]
        assert (first.num_drafted.tolist(), first.num_accepted.tolist()) == ([2, 0, 0], [1, 0, 0])
        assert (second.num_drafted.tolist(), second.num_accepted.tolist()) == ([0, 2, 0], [0, 2, 0])


@pytest.mark.usefixtures("authors")
@pytest.mark.parametrize("parts", [(First, Second), (Chain.of(First), Second)], ids=["parts", "a chain in a chain"])
def test_every_part_is_told_what_was_committed_whoever_drafted_it(parts):
    chain = bound(Chain.of(*parts))
    run_step(chain)
    run_step(chain, num_drafted=[4, 4, 4], num_accepted=[0, 3, 4])
    second = shown(chain, 1, "observe")[1]
    assert (second.num_accepted.tolist(), second.num_committed.tolist()) == ([0, 0, 0], [1, 4, 5])


@pytest.mark.usefixtures("authors")
def test_authors_are_kept_by_row_whatever_the_order_of_the_step():
    chain = bound(Chain.of(First, Second), first={"lengths": (1, 0)})
    run_step(chain, TOKENS[:2], slots=[5, 3])
    chain.members[0].proposer.lengths = ()
    run_step(chain, TOKENS[:2], slots=[3, 5], num_drafted=[1, 1])
    assert shown(chain, 0, "observe")[1].num_drafted.tolist() == [0, 1]


def test_every_part_hears_of_requests_even_if_one_raises():
    class Broken(Spy):
        def on_finish(self, request):
            raise KeyError(request.request_id)

    chain = bound(Chain.of(Broken, Second, Bare))
    chain.on_start(request())
    with pytest.raises(KeyError, match="a"):
        chain.on_finish(request())
    assert [name for name, _ in chain.members[1].proposer.log] == ["on_start", "on_finish"]


def test_where_a_part_cannot_be_bound_those_bound_before_it_are_closed():
    events = []

    class Bound(Spy):
        def bind(self, target, services):
            events.append(("bind", self.token))
            if self.token == 3:
                raise KeyError("c")

        def close(self):
            events.append(("close", self.token))

    parts = [type(name, (Bound,), {}) for name in "abcd"]
    with pytest.raises(KeyError, match="c"):
        bound(Chain.of(*parts), **{name: {"token": number} for number, name in enumerate("abcd", 1)})
    assert events == [("bind", 1), ("bind", 2), ("bind", 3), ("close", 2), ("close", 1)]


def test_a_method_that_came_after_a_parts_version_is_not_called(monkeypatch):
    class WithHelper(Spy):
        api_version = "1.1"

        def warmup(self, kind):
            raise AssertionError("a helper of its own")

    class Newer(Spy):
        api_version = "1.2"

        def warmup(self):
            self.log.append(("warmup", None))

    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    monkeypatch.setattr(lifecycle, "ADDED_METHODS", {"warmup": (1, 2)})
    chain = bound(Chain.of(WithHelper, Newer))
    chain.warmup()
    assert [name for name, _ in chain.members[1].proposer.log] == ["warmup"]


def test_a_part_of_a_version_that_is_not_served_is_refused_by_its_name():
    class FromTomorrow(Spy):
        api_version = "99.0"

    with pytest.raises(PluginLoadError, match=r"SD-E120 it targets proposer API 99\.0.*FromTomorrow\]"):
        bound(Chain.of(First, FromTomorrow))


def part_of(**attributes):
    return type("Faulty", (Spy,), attributes)


@pytest.mark.parametrize(
    ("part", "code", "told"),
    [
        (part_of(on_finish=lambda self: None), "SD-E111", "Faulty.on_finish cannot be called"),
        (part_of(propose=None), "SD-E110", 'no method "propose"'),
        (part_of(needs=Needs(extensions=(State(),))), "SD-E111", "Faulty.save cannot be called"),
    ],
    ids=["signature", "nothing to call", "extension"],
)
def test_a_part_that_cannot_be_called_is_refused_like_any_proposer_by_its_own_name(part, code, told):
    with pytest.raises(PluginLoadError, match=code) as refused:
        merged(First, part)
    assert told in str(refused.value)
    assert refused.value.plugin.target == f"{__name__}:Faulty"


def test_a_part_whose_needs_return_something_else_is_named():
    with pytest.raises(TypeError, match=r"Faulty.needs returned None, expected an instance of specdec\.sdk\.Needs"):
        merged(First, part_of(needs=classmethod(lambda cls, config, target: None)))


@pytest.mark.parametrize("base", [StrictModel, BaseModel])
def test_a_part_that_requires_values_of_every_request_or_reads_them_loosely_is_refused(base):
    options = type("RequestOptions", (base,), {"__annotations__": {"level": int}})
    with pytest.raises(PluginLoadError, match="SD-E271") as refused:
        merged(First, part_of(RequestOptions=options))
    assert refused.value.plugin.target == f"{__name__}:Faulty"


def test_options_of_requests_are_those_of_the_parts_that_are_there():
    class Asked(Spy):
        class RequestOptions(StrictModel):
            level: int = 0

    class Own(Chain):
        parts = (First,)

        class RequestOptions(StrictModel):
            mood: str = "calm"

    parent = Chain.of(Asked)
    assert parent.RequestOptions.key_names() == {"asked"}
    assert type("Other", (parent,), {"parts": (First,)}).RequestOptions is None
    assert type("Same", (parent,), {}).RequestOptions.key_names() == {"asked"}
    assert Own.of(Second).RequestOptions is Own.RequestOptions


def test_parts_save_and_load_below_their_names(tmp_path):
    cls = Chain.of(First, Second)
    bound(cls, first={"token": 5}, second={"token": 6}).save(tmp_path)
    loaded = bound(cls)
    loaded.load(tmp_path)
    assert [part.proposer.token for part in loaded.members] == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_part_that_was_not_there_to_save_begins_anew(tmp_path):
    bound(Chain.of(First), first={"token": 5}).save(tmp_path)
    loaded = bound(Chain.of(First, Second), second={"token": 6})
    loaded.load(tmp_path)
    assert [part.proposer.token for part in loaded.members] == [5, 6]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "its part faulty returned None, expected a Draft"),
        (Draft.from_trees([[(-1, 5), (-1, 6)]] * len(TOKENS), K), "its part faulty returned a draft with parents"),
    ],
    ids=["None", "a tree"],
)
def test_what_is_no_draft_of_a_chain_is_refused_with_the_parts_name(returned, told):
    chain = bound(Chain.of(First, part_of(propose=lambda self, step: returned)), first={"lengths": (1, 0, 0)})
    with pytest.raises((TypeError, ValueError), match=told):
        run_step(chain)


@pytest.mark.parametrize("together", [False, True])
def test_a_part_sees_its_own_hidden_states_in_its_own_order(together):
    one = part_with("One", hidden_states=(2, "final"))
    two = part_with("Two", hidden_states=("final", 1))
    cls = Chain.of(one, two, First) if together else Chain.of(one)
    needs = cls.needs(config_of(cls), TARGET)
    assert needs.hidden_states == ((2, "final", 1) if together else (2, "final"))
    blocks = {2: 20.0, "final": 30.0, 1: 10.0}
    num_rows = sum(len(ids) - 1 for ids in TOKENS)
    hidden = [torch.full((num_rows, 16), blocks[layer]) for layer in needs.hidden_states]
    chain = bound(cls)
    run_step(chain, hidden=hidden)
    for part, member in zip((one, two, First) if together else (one,), chain.members, strict=True):
        (view,) = shown(chain, member.index, "observe")
        if not part.needs.hidden_states:
            assert view.kept.hidden == ()
            continue
        expected = [blocks[layer] for layer in part.needs.hidden_states for _ in range(16)]
        assert view.kept.hidden_cat().tolist() == [expected] * num_rows


def test_a_part_sees_only_what_it_declared():
    chain = bound(Chain.of(part_with("Reads", history=True, sampling=("temperature",)), First))
    run_step(chain, temperature=[0.0, 1.0, 0.5])
    reads, first = shown(chain, 0, "observe")[0], shown(chain, 1, "observe")[0]
    assert reads.history is not None
    assert reads.sampling.temperature.tolist() == [0.0, 1.0, 0.5]
    assert (first.history, first.sampling) == (None, None)


def test_needs_are_what_all_parts_need():
    kv = DraftKV(num_layers=2, num_heads=2, head_dim=8, lookahead=3)
    needs = merged(
        part_with("A", history=True, state="shared", sampling=("min_p", "temperature")),
        part_with("B", extensions=(kv,), hidden_states=(1,), sampling=("top_k",), deterministic=False),
    )
    assert needs == Needs(
        hidden_states=(1,),
        state="shared",
        history=True,
        sampling=("temperature", "top_k", "min_p"),
        deterministic=False,
        extensions=(kv,),
    )


@pytest.mark.parametrize(
    ("placements", "whole"), [(("host", "host"), "host"), (("host", "device"), "device"), (("device",), "device")]
)
def test_the_whole_is_on_the_host_if_all_parts_are(placements, whole):
    assert merged(*(part_with(f"P{i}", placement=each) for i, each in enumerate(placements))).placement == whole


def test_the_richest_distribution_and_the_widest_sparse_one_are_declared():
    wide, narrow = (
        part_with("A", distributions=("sparse",), sparse_top_m=7),
        part_with("B", distributions=("sparse",), sparse_top_m=3),
    )
    assert (merged(narrow, wide, First).distributions, merged(narrow, wide, First).sparse_top_m) == (("sparse",), 7)
    mapped = part_with("C", distributions=("dense",), draft_vocabulary=(1, 5))
    assert merged(First, mapped).draft_vocabulary == (1, 5)


def test_parts_that_exclude_each_other_are_refused_with_the_numbers():
    kv = DraftKV(num_layers=2, num_heads=2, head_dim=8)
    with pytest.raises(Refusal, match=r"a and b: two parts keep draft KV \(2 and 2 layers\)"):
        merged(part_with("A", extensions=(kv,)), part_with("B", extensions=(kv,)))
    with pytest.raises(Refusal, match=r"distributions of two forms: dense ones \(a\) and sparse ones \(b\)"):
        merged(part_with("A", distributions=("dense",)), part_with("B", distributions=("sparse",), sparse_top_m=4))
    with pytest.raises(Refusal, match="a: 2 tokens, b: the target's"):
        merged(
            part_with("A", distributions=("dense",), draft_vocabulary=(1, 2)), part_with("B", distributions=("dense",))
        )
    with pytest.raises(Refusal, match="Chain has no parts"):
        Chain.needs(ProposerConfig(num_draft_tokens=2), TARGET)


def test_a_part_that_can_draft_less_is_asked_for_less():
    chain = bound(Chain.of(Short, First), first={"token": 2})
    assert rows_of(run_step(chain, budget=[4, 1, 0])) == [[1, 1], [1], []]
    (step,) = shown(chain, 0)
    assert (step.width, step.budget.tolist()) == (2, [2, 1, 0])
    assert chain.members[0].proposer.config.num_draft_tokens == 2
    assert merged(Short, First).max_draft_tokens is None
    assert merged(Short).max_draft_tokens == 2


def test_a_part_that_drafts_no_less_is_not_asked_for_less():
    chain = bound(Chain.of(Long, First), first={"token": 2})
    assert merged(Long, First).min_draft_tokens == 0
    assert rows_of(run_step(chain, budget=[4, 2, 3])) == [[1] * 4, [2] * 2, [1] * 3]
    with pytest.raises(Refusal, match="part long drafts at least 3 tokens, and may draft 2"):
        merged(Long, First, k=2)


def test_a_part_of_the_wrong_width_is_named():
    class Wide(Spy):
        def propose(self, step):
            return Draft.from_lists([[1]] * len(step), 9)

    with pytest.raises(ValueError, match=r"part wide returned token_ids \(3, 9\) .* expected \(3, 4\)"):
        run_step(bound(Chain.of(Wide, First)))


class Distributions(Spy):
    """Drafts row b with a sparse or dense distribution if `lengths[b]` is positive; which one is told by `needs`."""

    def propose(self, step):
        draft = super().propose(step)
        shape, form = (len(step), step.width), type(self).needs
        if "sparse" in form.distributions:
            ids = torch.full((*shape, form.sparse_top_m), PADDING_TOKEN_ID)
            ids[..., 0] = self.token
            distribution = DraftDistribution(
                kind=torch.full(shape[:1], DistributionKind.SPARSE, dtype=torch.uint8),
                sparse_ids=ids,
                sparse_probs=(ids >= 0).float(),
            )
        else:
            probs = torch.zeros(*shape, 64)
            probs[..., self.token] = 1
            distribution = DraftDistribution(
                kind=torch.full(shape[:1], DistributionKind.DENSE_PROBS, dtype=torch.uint8), probs=probs
            )
        return Draft(draft.token_ids, draft.lengths, distribution=distribution)


@pytest.mark.parametrize(("entries", "depth"), [(4, K), (2, K), (3, K + 1), (3, 1)])
def test_a_distribution_of_another_form_than_its_part_declares_is_refused_with_the_parts_name(entries, depth):
    class Other(Distributions):
        needs = Needs(distributions=("sparse",), sparse_top_m=3)

        def propose(self, step):
            draft = super().propose(step)
            given = draft.distribution
            ids = torch.full((len(step), depth, entries), self.token)
            wrong = DraftDistribution(kind=given.kind, sparse_ids=ids, sparse_probs=ids / ids.sum(-1, keepdim=True))
            return Draft(draft.token_ids, draft.lengths, distribution=wrong)

    wide = type("Wide", (Distributions,), {"needs": Needs(distributions=("sparse",), sparse_top_m=5)})
    found = rf"part other returned distribution\.sparse_ids \(3, {depth}, {entries}\), expected \(3, 4, 3\)"
    for cls in (Chain.of(Other), Chain.of(Other, wide), Adaptive.of(Other)):
        with pytest.raises(ValueError, match=found):
            run_step(bound(cls))


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_distributions_of_several_parts_are_mixed_by_row(form):
    widths = (3, 5) if form == "sparse" else (0, 0)
    one, two = (
        type(name, (Distributions,), {"needs": Needs(distributions=(form,), sparse_top_m=width)})
        for name, width in zip(("One", "Two"), widths, strict=True)
    )
    cls = Chain.of(one, First, two)
    options = {
        "one": {"lengths": (2, 0, 0), "token": 11, "num_speculative_tokens": 2},
        "first": {"lengths": (0, 3, 0), "token": 12},
        "two": {"token": 13},
    }
    draft = run_step(bound(cls, **options))
    assert rows_of(draft) == [[11] * 2, [12] * 3, [13] * 4]
    distribution, tag = (
        draft.distribution,
        DistributionKind.SPARSE if form == "sparse" else DistributionKind.DENSE_PROBS,
    )
    assert distribution.kind.tolist() == [tag, DistributionKind.ONE_HOT, tag]
    for row, length, token in ((0, 2, 11), (2, 4, 13)):
        if form == "sparse":
            assert distribution.sparse_ids.shape == distribution.sparse_probs.shape == (3, K, 5)
            assert distribution.sparse_ids[row, :length].tolist() == [[token, -1, -1, -1, -1]] * length
            assert distribution.sparse_probs[row, :length].tolist() == [[1, 0, 0, 0, 0]] * length
        else:
            assert distribution.probs.shape == (3, K, 64)
            assert distribution.probs[row, :length].argmax(-1).tolist() == [token] * length


def test_options_of_each_part_are_validated_under_its_name():
    cls = Chain.of(First, First, Bare)
    assert cls.names() == ("first", "first_2", "bare")
    config = config_of(cls, first={"token": 3}, first_2={"token": 4, "model": "there", "dtype": "bfloat16"})
    one, two, three = cls.plans(config.replace(model="here"), TARGET)
    assert (one.config.options.token, one.config.model, one.config.network.dtype) == (3, "here", None)
    assert (two.config.options.token, two.config.model, two.config.network.dtype) == (4, "there", "bfloat16")
    assert three.config.model == "here"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"frist": {}}, "SD-E131", "did you mean 'first'?"),
        ({"first": {"tokn": 3}}, "SD-E131", "did you mean 'token'?"),
        ({"first": {"token": "x"}}, "SD-E132", "token"),
        ({"first": {"num_speculative_tokens": 0}}, "SD-E132", "num_speculative_tokens"),
        ({"first": {"num_speculative_tokens": True}}, "SD-E132", "num_speculative_tokens"),
        ({"first": {"trust_remote_code": "yes"}}, "SD-E132", "trust_remote_code"),
    ],
)
def test_unusable_options_are_refused(options, code, words):
    with pytest.raises(ConfigError) as caught:
        Chain.of(First).Options.parse(options, "proposer_config")
    assert caught.value.code == code
    assert words in str(caught.value)


def test_an_error_in_a_nested_section_names_the_place_where_it_stands():
    class Nested(Chain):
        parts = (First,)

    options = {"nested": {"first": {"typo": 1}}}
    for cls in (Chain.of(Nested), Adaptive.of(Nested)):
        with pytest.raises(ConfigError, match=r"proposer_config\.nested\.first has a key that nobody declares"):
            cls.Options.parse(options, "proposer_config")
    with pytest.raises(ConfigError, match=r"proposer_config\.first has a key"):
        Nested.Options.parse(options["nested"], "proposer_config")


def test_an_option_of_a_part_named_like_a_key_of_its_section_is_refused():
    class Options(StrictModel):
        dtype: str = "int8"
        model: str = ""
        token: int = 1

    with pytest.raises(TypeError, match=r"Faulty\.Options has dtype, model, .*; rename them"):
        Chain.of(First, part_of(Options=Options))
    with pytest.raises(TypeError, match=r"ChainOfModel\.Options has model,"):
        Adaptive.of(Chain.of(type("Model", (Spy,), {})))


def test_a_nested_class_of_options_of_the_whole_is_refused_and_not_lost():
    with pytest.raises(TypeError, match=r"Mine\.Options would be lost: own_options\(\) adds options"):
        type("Mine", (Chain,), {"parts": (First,), "Options": type("Options", (StrictModel,), {})})


def test_options_of_requests_for_the_whole_are_refused_beside_those_of_a_part():
    wants = type("Wants", (Spy,), {"RequestOptions": type("RequestOptions", (StrictModel,), {})})
    own = type("RequestOptions", (StrictModel,), {})
    with pytest.raises(TypeError, match=r"Mine\.RequestOptions would be lost: wants declares its own"):
        type("Mine", (Chain,), {"parts": (wants, First), "RequestOptions": own})
    assert type("Mine", (Chain,), {"parts": (First,), "RequestOptions": own}).RequestOptions is own


def test_a_part_named_like_an_option_of_the_whole_is_refused():
    with pytest.raises(TypeError, match="a part of AdaptiveOfPolicy is named like its option policy; rename its class"):
        Adaptive.of(type("Policy", (Spy,), {}))


def test_options_of_a_part_may_have_aliases_and_take_any_key():
    class Options(BaseModel):
        model_config = ConfigDict(extra="allow")
        shortest: int = Field(default=1, alias="prompt-lookup-min")

    class Aliased(Bare):
        pass

    Aliased.Options = Options
    cls = Chain.of(Aliased)
    (plan,) = cls.plans(config_of(cls, aliased={"prompt-lookup-min": 2, "more": 3, "model": "there"}), TARGET)
    options = plan.config.options
    assert (options.shortest, options.more, plan.config.model) == (2, 3, "there")


def test_a_part_may_not_draft_more_than_all():
    with pytest.raises(Refusal) as refused:
        merged(First, first={"num_speculative_tokens": 9})
    assert refused.value.reason == "its part first is to draft 9 tokens, and all parts together 4"


def test_options_have_a_schema_with_those_of_the_parts():
    schema = Chain.of(First, Bare).Options.model_json_schema()
    assert set(schema["properties"]) == {"first", "bare"}
    assert "token" in next(part for name, part in schema["$defs"].items() if "first" in name)["properties"]


def test_a_host_part_beside_a_device_part_is_shown_compacted_rows():
    """A device form with the entries of one rejected row between two requests."""
    step = step_view([[1, 2, 3], [4, 5, 6]], K, hidden=[torch.arange(4.0)[:, None]])
    index = torch.tensor([0, 1, 1, 2, 3])  # the third entry was computed and rejected
    device_form = {name: getattr(step.kept, name)[index] for name in ("positions", "token_ids", "next_token_ids")}
    kept = type(step.kept)(
        **device_form,
        hidden=(step.kept.hidden[0][index],),
        token_offsets=torch.tensor([0, 3, 5]),
        num_kept=step.kept.num_kept,
        kept_start=step.kept.kept_start,
    )
    kept.token_ids[2] = 63
    compacted = host_form(type(step)(**(vars(step) | {"kept": kept}))).kept
    for name, expected in vars(step.kept).items():
        found = getattr(compacted, name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected), name
    assert torch.equal(compacted.hidden[0], step.kept.hidden[0])


class Fixed(LengthPolicy):
    """The same length always."""

    length: int = 2

    def lengths(self, num_accepted, num_tested, num_draft_tokens):
        return torch.full_like(num_tested, self.length, dtype=torch.int64)


class Counting(Fixed):
    """Keeps what it was told."""

    def lengths(self, num_accepted, num_tested, num_draft_tokens):
        SEEN.append((num_accepted.tolist(), num_tested.tolist(), num_draft_tokens))
        return super().lengths(num_accepted, num_tested, num_draft_tokens)


SEEN: list = []
TARGET_PATH = Path(specdec.__file__).parent / "assets" / "tiny" / "target"


def adaptive_with(policy, *parts, **needs):
    return type("Mine", (Adaptive,), {"parts": parts or (First,), "Policy": policy})


def test_a_draft_is_no_longer_than_the_policy_says():
    proposer = bound(adaptive_with(Fixed), policy={"length": 3})
    assert rows_of(run_step(proposer, budget=[4, 2, 0])) == [[1] * 3, [1] * 2, []]
    assert shown(proposer, 0)[0].budget.tolist() == [3, 2, 0], "nothing is drafted to be cut off"


def test_every_row_drafts_at_least_one_token_and_what_its_part_needs():
    proposer = bound(adaptive_with(Fixed), policy={"length": 0})
    assert rows_of(run_step(proposer)) == [[1]] * 3
    proposer = bound(adaptive_with(Fixed, Long), policy={"length": 1})
    assert rows_of(run_step(proposer, budget=[4, 3, 2])) == [[1] * 3, [1] * 3, []]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        (2, "2"),
        (None, "None"),
        ([2, 2, 2], r"\[2, 2, 2\]"),
        (torch.tensor([2.0, 1.5, 2.0]), r"\[3\] torch\.float32"),
        (torch.tensor(2), r"\[\] torch\.int64"),
        (torch.tensor([2]), r"\[1\] torch\.int64"),
    ],
    ids=["int", "None", "list", "floats", "a number", "one row"],
)
def test_a_policy_whose_lengths_are_no_tensor_of_integers_by_row_is_named(lengths, found):
    policy = type("Odd", (Fixed,), {"lengths": lambda self, *facts: lengths})
    with pytest.raises(TypeError, match=rf"its policy Odd returned {found} .* expected a tensor \[3\] torch\.int64"):
        run_step(bound(adaptive_with(policy)))


@pytest.mark.parametrize("part", [First, Chain.of(First), Short])
def test_an_adapted_part_may_draft_less_than_all(part):
    (name,) = Adaptive.of(part).names()
    proposer = bound(Adaptive.of(part), **{name: {"num_speculative_tokens": 2}})
    draft = run_step(proposer, budget=[4, 1, 0])
    assert rows_of(draft) == [[1, 1], [1], []]
    assert draft.token_ids.shape == (3, K)


def test_an_adapted_part_that_drafts_less_reports_its_distributions():
    needs = Needs(distributions=("sparse",), sparse_top_m=2)
    sparse = type("One", (Distributions,), {"needs": needs})
    draft = run_step(bound(Adaptive.of(sparse), one={"num_speculative_tokens": 2}))
    assert rows_of(draft) == [[1, 1]] * 3
    assert draft.distribution.kind.tolist() == [DistributionKind.SPARSE] * 3
    assert draft.distribution.sparse_ids.shape == (3, K, 2)


def test_acceptance_is_counted_by_row_and_fades():
    proposer = bound(adaptive_with(Counting), policy={"memory": 0.5})
    run_step(proposer, TOKENS[:2], slots=[4, 2])
    run_step(proposer, TOKENS[:2], slots=[4, 2], num_drafted=[3, 2], num_accepted=[1, 2])
    run_step(proposer, TOKENS[:2], slots=[2, 4], num_drafted=[3, 0], num_accepted=[0, 0])
    SEEN.clear()
    run_step(proposer, TOKENS[:2], slots=[4, 2], num_drafted=[2, 0], num_accepted=[2, 0])
    assert SEEN[-1] == ([0.5 * 1 + 2, 0.5 * 2], [0.5 * 2 + 2, 0.5 * 2 + 1], K)


def test_acceptance_is_counted_in_single_precision_whatever_the_default_is():
    def counted():
        proposer = bound(adaptive_with(Counting), policy={"memory": 0.9})
        run_step(proposer, TOKENS[:1])
        for _ in range(5):
            run_step(proposer, TOKENS[:1], num_drafted=[4], num_accepted=[3])
        return SEEN[-1]

    expected, before = counted(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert counted() == expected
    finally:
        torch.set_default_dtype(before)


def test_a_row_that_changes_hands_starts_anew():
    proposer = bound(adaptive_with(Counting))
    run_step(proposer, TOKENS[:1])
    run_step(proposer, TOKENS[:1], num_drafted=[4], num_accepted=[4])
    SEEN.clear()
    run_step(proposer, TOKENS[:1], generation=[2])
    assert SEEN[-1] == ([0.0], [0.0], K)


@pytest.mark.parametrize(
    ("rate", "threshold", "length"), [(0.5, 0.3, 1), (0.5, 0.25, 2), (0.9, 0.3, 8), (0.99, 0.3, 8)]
)
def test_the_threshold_policy_gives_the_longest_draft_that_is_likely_enough(rate, threshold, length):
    policy = AcceptanceThreshold(threshold=threshold, expected_rate=rate)
    nothing = torch.zeros(1)
    assert policy.lengths(nothing, nothing, 8).tolist() == [length]


def test_the_threshold_policy_follows_what_is_measured():
    policy = AcceptanceThreshold(expected_weight=1.0)
    accepted, tested = torch.tensor([0.0, 10.0, 100.0]), torch.tensor([5.0, 20.0, 100.0])
    low, middle, high = policy.lengths(accepted, tested, 8).tolist()
    assert low < middle < high == 8


@pytest.mark.parametrize("settings", [{"expected_rate": 1 - 1e-12}, {"expected_weight": 1e-12}])
def test_the_threshold_policy_drafts_the_most_where_all_is_accepted(settings):
    everything = torch.tensor([5.0])
    assert AcceptanceThreshold(**settings).lengths(everything, everything, 8).tolist() == [8]


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
def test_the_expected_rate_counts_for_a_finite_weight(weight):
    with pytest.raises(ConfigError, match="expected_weight"):
        AcceptanceThreshold(expected_weight=weight)


def test_adaptive_has_exactly_one_part():
    with pytest.raises(TypeError, match="has 2 parts"):
        Adaptive.of(First, Second)


def test_lengths_do_not_depend_on_what_is_drawn():
    """The same prefix and history, other random numbers: the same lengths, before anything is drawn."""
    lengths = []
    for seed in range(5):
        proposer = bound(Adaptive.of(First))
        run_step(proposer, seed=seed)
        run_step(proposer, num_drafted=[4, 3, 2], num_accepted=[0, 3, 1], seed=seed)
        lengths.append(shown(proposer, 0)[1].budget.tolist())
    assert lengths == [lengths[0]] * 5
    assert len(set(lengths[0])) > 1


PACKAGE = '''
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.ngram import NgramProposer
from specdec.plugins.suffix import SuffixProposer
from specdec.sdk import HostProposer
from specdec.sdk.combinators import Adaptive, Chain


class Repeat(HostProposer):
    def draft(self, request, tokens, k):
        return [tokens[-1]] * k


class Failing(HostProposer):
    def draft(self, request, tokens, k):
        raise RuntimeError("out of ideas")


class Both(Chain):
    """N-grams first, then repetition."""

    parts = (NgramProposer, Repeat)


class LookUpThenModel(Chain):
    parts = (NgramProposer, DraftModelProposer)


AdaptiveBoth = Adaptive.of(Both)
AdaptiveChain = Adaptive.of(LookUpThenModel)
SuffixThenFailing = Chain.of(SuffixProposer, Failing)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "combined_proposers.py").write_text(textwrap.dedent(PACKAGE))
    sys.path.insert(0, str(folder))
    yield "combined_proposers"
    sys.path.remove(str(folder))
    sys.modules.pop("combined_proposers", None)


PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 5, 6], [9] * 30, list(range(100, 180)))]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Both", {"ngram": {"prompt_lookup_min": 1}}),
        ("AdaptiveBoth", {"both": {"ngram": {}}, "policy": {"memory": 0.5}}),
    ],
)
def test_the_engine_runs_them_by_class_path_and_the_text_is_the_plain_one(name, options, package):
    plain = token_ids(LLM("tiny", max_model_len=256).generate(PROMPTS, PARAMS))
    config = {"method": f"{package}:{name}", "num_speculative_tokens": 4, "proposer_config": options}
    with LLM("tiny", speculative_config=config, max_model_len=256, max_num_batched_tokens=32) as llm:
        assert token_ids(llm.generate(PROMPTS, PARAMS)) == plain
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["LookUpThenModel", "AdaptiveChain"])
def test_a_model_with_draft_kv_and_distributions_stands_beside_a_look_up(name, package):
    """The target drafts for itself: what is greedy equals plain text, and every row of the model is accepted whole."""
    options = {"draft_model": {"model": str(TARGET_PATH), "sparse_top_m": 64}, "ngram": {"prompt_lookup_min": 3}}
    options = options if name == "LookUpThenModel" else {"look_up_then_model": options}
    config = {"method": f"{package}:{name}", "num_speculative_tokens": 3, "proposer_config": options}
    config |= {"draft_sample_method": "probabilistic"}
    params = [PARAMS, PARAMS.replace(temperature=1.0, seed=5), PARAMS]
    with LLM("tiny", max_model_len=256) as llm:
        plain = token_ids(llm.generate(PROMPTS, PARAMS))
    with LLM("tiny", speculative_config=config, max_model_len=256, max_num_batched_tokens=32) as llm:
        outputs = token_ids(llm.generate(PROMPTS, params))
        acceptance = llm.engine.metrics.acceptance
        assert drafts_of(llm).num_one_hot_fallbacks > 0, "rows without a distribution beside rows with one"
    assert [outputs[0], outputs[2]] == [plain[0], plain[2]]
    assert acceptance.num_accepted_tokens > 0.5 * acceptance.num_draft_tokens


def test_what_a_part_raises_is_the_engines_to_handle(package):
    config = {"method": f"{package}:SuffixThenFailing", "num_speculative_tokens": 3}
    with LLM("tiny", speculative_config=config, max_model_len=256) as llm, pytest.raises(ProposerError) as caught:
        llm.generate(PROMPTS, PARAMS)
    assert "out of ideas" in str(caught.value)
    with LLM("tiny", speculative_config=config | {"on_proposer_error": "skip_step"}, max_model_len=256) as llm:
        plain = token_ids(LLM("tiny", max_model_len=256).generate(PROMPTS, PARAMS))
        assert token_ids(llm.generate(PROMPTS, PARAMS)) == plain


def test_a_host_proposer_is_a_part():
    class Repeat(HostProposer):
        def draft(self, request, tokens, k):
            return [tokens[-1]] * k

    chain = bound(Chain.of(First, Repeat), first={"lengths": (0, 1, 0)})
    assert rows_of(run_step(chain, budget=[2, 2, 2])) == [[3, 3], [1], [9, 9]]
