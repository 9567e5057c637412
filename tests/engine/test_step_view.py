"""What a proposer is shown of every step: aligned kept tokens without holes, true hidden states, honest budgets."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from engine_helpers import GREEDY, counter, make_llm, run
from inside import drafts_of, proposer_of, scheduler_of

from specdec import SamplingParams
from specdec.core.cache.transfer import RowLists
from specdec.core.kernels.philox import Stream, uniform
from specdec.core.proposing.views import Computed, DeviceHistory, HostHistory, StepRandom, ViewBuilder
from specdec.core.request.request import Committed, Request, Scheduled
from specdec.sdk import Needs, Phase, Refusal
from specdec.testing import fake_target_info

K = 4
NUM_PROMPTS = 4
HIDDEN = (0, 3, 8, "final")
HIDDEN_SIZE = 256
SETTINGS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 37},
    "preempting": {"num_kv_blocks": 14, "max_num_batched_tokens": 60},
    "few_rows": {"max_num_seqs": 2},
}
BLOCK_SIZE = 16  # tokens, of the engine by default
SCRIPT = {"wrong_every": 3, "ragged": True, "history": True, "sampling": ("temperature", "top_k", "top_p", "min_p")}


def record(prompts, sequences, *, params=GREEDY, script=SCRIPT, **settings):
    """Run prompts, arriving one per step, under a recorder. Returns (llm, recorder, full sequence by request)."""
    llm = make_llm("Recorder", k=K, options=script | {"sequences": sequences}, **settings)
    each = params if isinstance(params, list) else [params] * len(prompts)
    finished = {}
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, each[index].replace(seed=index), f"r{index}")
        committed = llm.engine.step()
        finished |= {c.request.request_id: c.request for c in committed if c.request.finish_reason}
    finished |= run(llm.engine)
    return llm, proposer_of(llm), {name: request.token_ids for name, request in finished.items()}


def by_request(recorder):
    """Everything that was shown of each request, in order."""
    shown = defaultdict(list)
    for step in recorder.steps:
        for each in step:
            shown[each.request_id].append(each)
    return shown


@pytest.fixture(scope="module", params=SETTINGS)
def recorded(request, prompts, sequences):
    llm, recorder, tokens = record(prompts[:NUM_PROMPTS], sequences, **SETTINGS[request.param])
    assert (counter(llm, "num_preemptions") > 0) == (request.param == "preempting")
    return recorder, tokens


def test_kept_rows_are_the_true_sequence_aligned_by_one(recorded):
    recorder, tokens = recorded
    for name, steps in by_request(recorder).items():
        for each in steps:
            first, stop = each.kept_start, each.kept_start + each.num_kept
            assert each.positions == list(range(first, stop))
            assert each.token_ids == tokens[name][first:stop]
            assert each.next_token_ids == tokens[name][first + 1 : stop + 1]


def test_every_position_is_shown_once_per_generation_without_a_hole(recorded):
    recorder, tokens = recorded
    shown = by_request(recorder)
    assert shown.keys() == tokens.keys()
    for steps in shown.values():
        ends, reached = {}, 0
        for each in steps:
            assert each.num_kept > 0
            if each.generation in ends:
                assert each.kept_start == ends[each.generation]
            else:  # it goes on behind blocks that an earlier generation filled, as far as they are found again
                assert each.kept_start in range(0, reached + 1, BLOCK_SIZE)
            end = each.kept_start + each.num_kept
            ends, reached = {each.generation: end}, max(reached, end)  # an older generation never comes back


def test_newest_token_is_the_one_without_kv(recorded):
    recorder, tokens = recorded
    for name, steps in by_request(recorder).items():
        for each in steps:
            assert each.newest_token == tokens[name][each.kept_start + each.num_kept]
            if each.phase != Phase.PREFILL:
                assert each.committed_length == each.kept_start + each.num_kept + 1


def test_phases_follow_one_another(recorded, prompts):
    recorder, _ = recorded
    for name, steps in by_request(recorder).items():
        num_prompt_tokens = len(prompts[int(name[1:])])
        sampled_before = False
        for each in steps:
            computed = each.kept_start + each.num_kept
            samples = computed == each.committed_length - 1
            expected = Phase.PREFILL
            if samples:
                expected = Phase.DECODE if sampled_before else Phase.PREFILL_DONE
            assert each.phase == expected
            if expected == Phase.PREFILL_DONE:
                assert computed == num_prompt_tokens
            sampled_before |= samples


def test_tokens_drafted_and_accepted_explain_the_growth(recorded):
    recorder, _ = recorded
    num_accepted = 0
    for steps in by_request(recorder).values():
        for before, each in pairwise(steps):
            assert 0 <= each.num_accepted <= each.num_drafted <= before.budget
            if each.generation == before.generation and before.phase != Phase.PREFILL:
                assert each.committed_length - before.committed_length == each.num_accepted + 1
            if each.phase != Phase.DECODE or each.generation != before.generation:
                assert each.num_drafted == 0
            num_accepted += each.num_accepted
    assert num_accepted > 0


def test_history_is_the_tokens(recorded):
    recorder, tokens = recorded
    for name, steps in by_request(recorder).items():
        for each in steps:
            assert each.history == tokens[name][: each.committed_length]


def test_a_row_has_one_owner_and_a_generation_one_stay(recorded):
    recorder, _ = recorded
    owners = {}
    for step in recorder.steps:
        rows = [each.row for each in step]
        assert len(set(rows)) == len(rows)
        for each in step:
            owners.setdefault((each.row, each.generation), each.request_id)
            assert owners[each.row, each.generation] == each.request_id


def test_propose_is_asked_exactly_where_a_budget_is_positive(recorded):
    recorder, _ = recorded
    budgets = [[each.budget for each in step] for step in recorder.steps]
    assert recorder.budgets_asked == [asked for asked in budgets if any(asked)]


def test_budgets_shrink_towards_the_end(recorded):
    recorder, tokens = recorded
    for name, steps in by_request(recorder).items():
        for each in steps:
            room = len(tokens[name]) - each.committed_length - 1  # max_tokens ends every request
            assert each.budget == (0 if each.phase == Phase.PREFILL else min(K, room))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_hidden_states_are_those_of_a_plain_forward(settings, prompts, sequences, reference_model):
    script = SCRIPT | {"hidden_states": HIDDEN}
    _, recorder, tokens = record(prompts[:NUM_PROMPTS], sequences, script=script, **settings)
    expected = {name: hidden_states(reference_model, ids) for name, ids in tokens.items()}
    for name, steps in by_request(recorder).items():
        for each in steps:
            rows = expected[name][each.kept_start : each.kept_start + each.num_kept]
            assert each.hidden.shape == (each.num_kept, len(HIDDEN) * HIDDEN_SIZE)
            torch.testing.assert_close(each.hidden, rows, rtol=1e-3, atol=1e-4)


def hidden_states(model, token_ids):
    """[N, 4 * H]: boundaries 0, 3 and 8 of the residual stream, and the state after the final norm."""
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), output_hidden_states=True)
    hook.remove()
    states = output.hidden_states
    return torch.cat([states[0], states[3], before_norm[0], states[-1]], dim=-1)[0]


@pytest.mark.parametrize("settings", ["plain", "preempting"])
def test_device_form_says_the_same_as_host_form(settings, prompts, sequences):
    script = SCRIPT | {"hidden_states": ("final", 1)}
    host, device = (
        record(prompts[:3], sequences, script=script | {"placement": placement}, **SETTINGS[settings])[1]
        for placement in ("host", "device")
    )
    assert len(host.steps) == len(device.steps)
    for ours, theirs in zip(host.steps, device.steps, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.hidden, other.hidden)
            one.hidden = other.hidden = None
            assert one == other


def test_undeclared_fields_are_not_materialised(prompts, sequences):
    llm = make_llm("Peeker", options={"sequences": sequences})
    llm.generate([{"prompt_token_ids": prompts[0]}], GREEDY.replace(max_tokens=6))
    assert proposer_of(llm).seen == [(None, None, ())] * len(proposer_of(llm).seen)
    assert proposer_of(llm).seen


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["plain", "preempting"])
def test_a_host_proposer_is_given_the_tokens_so_far(settings, prompts, sequences):
    llm = make_llm("Echo", **SETTINGS[settings])
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:NUM_PROMPTS]], GREEDY)
    given = proposer_of(llm).given
    assert len(given) > 20
    for tokens in given:
        assert any(tuple(sequence[: len(tokens)]) == tokens for sequence in sequences)
    assert (counter(llm, "num_preemptions") > 0) == (settings == "preempting")


def test_sampling_parameters_are_shown_as_given(prompts, sequences):
    params = [
        SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1, top_k=-1, max_tokens=6, ignore_eos=True),
    ]
    _, recorder, _ = record(prompts[:3], sequences, params=params)
    expected = {
        "r0": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125},
        "r1": {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0},
        "r2": {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0},
    }
    for name, steps in by_request(recorder).items():
        assert [each.sampling for each in steps] == [expected[name]] * len(steps)


def budgets_of(prompts, sequences, params, script=SCRIPT, **settings):
    _, recorder, tokens = record(prompts, sequences, params=params, script=script, **settings)
    return by_request(recorder), tokens


def test_a_request_may_ask_for_fewer_drafts_or_none(prompts, sequences):
    params = [GREEDY, GREEDY.replace(num_speculative_tokens=2), GREEDY.replace(num_speculative_tokens=0)]
    params.append(GREEDY.replace(speculative=False))
    params = [each.replace(max_tokens=20) for each in params]
    shown, _ = budgets_of(prompts[:4], sequences, params)
    most = [max(each.budget for each in shown[f"r{index}"]) for index in range(4)]
    assert most == [4, 2, 0, 0]
    assert all(each.num_drafted == 0 for index in (2, 3) for each in shown[f"r{index}"])
    assert all(each.num_kept > 0 for index in (2, 3) for each in shown[f"r{index}"]), "observed all the same"


def test_a_request_may_not_ask_for_more_drafts_than_the_engine_has(prompts, sequences):
    shown, _ = budgets_of(prompts[:1], sequences, [GREEDY.replace(num_speculative_tokens=9, max_tokens=20)])
    assert max(each.budget for each in shown["r0"]) == K


def test_budgets_end_with_max_model_len(prompts, sequences):
    limit = len(prompts[0]) + 11
    shown, tokens = budgets_of(prompts[:1], sequences, [GREEDY], max_model_len=limit)
    assert len(tokens["r0"]) == limit
    for each in shown["r0"]:
        assert each.budget == min(K, limit - each.committed_length - 1)


def test_a_budget_below_the_least_useful_draft_is_none(prompts, sequences):
    script = {"min_draft_tokens": 3}
    shown, tokens = budgets_of(prompts[:1], sequences, [GREEDY.replace(max_tokens=12)], script=script)
    for each in shown["r0"]:
        room = len(tokens["r0"]) - each.committed_length - 1
        assert each.budget == (min(K, room) if room >= 3 else 0)


def test_hidden_states_beyond_the_last_layer_are_refused_before_loading():
    with pytest.raises(Refusal, match=r"boundaries 0 \.\. 8"):
        make_llm("Recorder", options={"hidden_states": (9,)})


def test_lifecycle_is_start_then_preempt_then_finish_once(prompts, sequences):
    llm, recorder, tokens = record(prompts[:NUM_PROMPTS], sequences, **SETTINGS["preempting"])
    assert recorder.events[:2] == [("bind", "tiny"), ("warmup", "")]
    events = {name: [event for event, who in recorder.events if who == name] for name in tokens}
    for seen in events.values():
        assert seen[0] == "on_start"
        assert seen[-1] == "on_finish"
        assert set(seen[1:-1]) <= {"on_preempt"}
    num_preempted = sum(seen.count("on_preempt") for seen in events.values())
    assert num_preempted == counter(llm, "num_preemptions") > 0
    llm.close()
    llm.close()
    assert recorder.events.count(("close", "")) == 1


def test_aborted_requests_are_finished_once_and_unstarted_ones_never(prompts, sequences):
    llm = make_llm("Recorder", options=SCRIPT | {"sequences": sequences}, max_num_seqs=1)
    recorder = proposer_of(llm)
    llm.engine.add_request(prompts[0], GREEDY, "running")
    llm.engine.add_request(prompts[1], GREEDY, "waiting")
    llm.engine.step()
    llm.engine.abort("waiting")
    llm.engine.abort("running")
    llm.engine.abort("running")
    events = [event for event in recorder.events if event[1] in ("running", "waiting")]
    assert events == [("on_start", "running"), ("on_finish", "running")]
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()


def test_a_preempted_request_has_no_row_and_its_abort_takes_nothing_from_others(prompts, sequences):
    llm = make_llm("Recorder", options={"sequences": sequences}, num_kv_blocks=22)
    engine, drafts = llm.engine, drafts_of(llm)
    for index in range(3):
        engine.add_request(prompts[index], GREEDY, f"r{index}")
    preempted = set()
    while not preempted and engine.has_unfinished_requests:
        engine.step()
        preempted = {name for event, name in proposer_of(llm).events if event == "on_preempt"}
    running = scheduler_of(engine).running
    waiting_drafts = {each.request_id: drafts.length(each.row, each.generation) for each in running}
    for name in preempted:
        engine.abort(name)
        assert proposer_of(llm).rows_at_finish[name] == -1
    assert {each.request_id: drafts.length(each.row, each.generation) for each in running} == waiting_drafts
    assert any(waiting_drafts.values())
    engine.check_integrity()


def uniforms(recorder):
    """The draft stream of each request, by (request, committed length)."""
    return {(each.request_id, each.committed_length): each.uniforms for step in recorder.steps for each in step}


@pytest.mark.slow
def test_draft_numbers_depend_on_the_request_alone(prompts, sequences):
    together = uniforms(record(prompts[:3], sequences)[1])
    chunked = uniforms(record(prompts[:3], sequences, **SETTINGS["chunked"])[1])
    alone = uniforms(record(prompts[:1], sequences, script=SCRIPT | {"placement": "device"})[1])
    for other in (chunked, alone):
        shared = together.keys() & other.keys()
        assert len(shared) >= 10
        assert all(together[key] == other[key] for key in shared)


def test_draft_numbers_lie_strictly_between_zero_and_one_and_differ(prompts, sequences):
    numbers = [number for row in uniforms(record(prompts[:3], sequences)[1]).values() for number in row]
    assert all(0 < number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)


def test_draft_numbers_are_not_the_uniforms_of_the_verifier(prompts, sequences):
    shown = uniforms(record(prompts[:1], sequences)[1])
    positions = torch.arange(len(prompts[0]) + GREEDY.max_tokens)
    streams = torch.tensor([Stream.ACCEPT, Stream.RESAMPLE, Stream.DRAFT]).unsqueeze(1)
    numbers = set(uniform(torch.tensor(0), positions, streams).flatten().tolist())  # the request's seed is 0
    assert numbers.isdisjoint(number for row in shown.values() for number in row)


def test_draft_numbers_of_one_position_differ_between_the_steps_that_draft_for_it():
    """Numbers by absolute position would come again after a rejection, when the block rule has used them already."""
    keys, positions = torch.tensor([5, 5, 5]), torch.tensor([10, 11, 12])
    random = StepRandom(keys, positions, num_draft_tokens=3)
    of_position_12 = [random.uniform(2)[0], random.uniform(1)[1], random.uniform(0)[2]]
    assert len(set(map(float, of_position_12))) == 3
    assert torch.equal(random.uniform(1)[1:], StepRandom(keys[1:], positions[1:], num_draft_tokens=3).uniform(1))


def test_the_end_of_a_text_is_padded_before_its_first_token_on_the_host_and_on_a_device():
    request = Request("a", [7, 8, 9], SamplingParams(), 0, 20, frozenset(), None)
    other = Request("b", [4], SamplingParams(), 0, 20, frozenset(), None)
    histories = [HostHistory([Committed.nothing(each) for each in (request, other)])]
    table = torch.tensor([[4, 0, 0, 0], [7, 8, 9, 0]])
    histories.append(DeviceHistory(table, torch.tensor([1, 0]), torch.tensor([3, 1])))
    for history in histories:
        assert history.tail(5).tolist() == [[-1, -1, 7, 8, 9], [-1, -1, -1, -1, 4]]
        assert history.tail(2).tolist() == [[8, 9], [-1, 4]]
        assert [history.token_ids(0, 1), history.token_ids(1)] == [[8, 9], [4]]


def test_tokens_that_an_interrupted_step_did_not_write_are_sent_again():
    table = RowLists(torch.zeros(2, 8, dtype=torch.int64))
    row = 1, 1, [5, 6, 7]
    table.changes([row])  # and nobody writes
    table.write(*map(torch.LongTensor, table.changes([])))
    table.write(*map(torch.LongTensor, table.changes([row])))
    assert table.table[1, :3].tolist() == [5, 6, 7]
    assert table.changes([row]) == ([], [])


def test_numbers_beyond_those_of_a_draft_go_on_the_same_stream():
    keys, positions = torch.tensor([11, 12]), torch.tensor([5, 9])
    few, many = StepRandom(keys, positions, 2), StepRandom(keys, positions, 6)
    assert all(torch.equal(few.uniform(index), many.uniform(index)) for index in range(5))


def test_texts_of_all_rows_lie_apart_on_a_device():
    info = fake_target_info(max_num_seqs=2, max_model_len=16)
    builder = ViewBuilder(Needs(history=True, placement="device"), K, info, torch.device("cpu"))
    texts = [list(range(13)), list(range(20, 33))]
    shares = [
        Scheduled(Request(str(row), text, SamplingParams(), 0, 16, frozenset(), None, row=row), 0, 12, 0, samples=False)
        for row, text in enumerate(texts)
    ]
    for share in shares:
        share.request.num_computed_tokens = 12
    tokens, positions = torch.tensor(texts)[:, :12].reshape(-1), torch.arange(12).repeat(2)
    batch = Computed(tokens, positions)
    view, _ = builder.build([Committed.now(share, [], 0, []) for share in shares], [0, 0], batch)
    assert [view.history.token_ids(b) for b in range(2)] == texts
