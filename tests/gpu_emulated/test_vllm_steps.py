"""What a step inside vLLM's V2 runner asks of a device. vLLM's own part, its scheduler and verifier, is scripted."""

from __future__ import annotations

import json
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_cuda import emulated_cuda, plain_kernels
from figures import CHECKED_STEPS
from serving import DEVICE, FORMS, TINY, K, speculation
from sweeps import covering
from transformers import AutoModelForCausalLM

from specdec.adapters.vllm_shared.driver import Driver
from specdec.adapters.vllm_shared.rows import RequestRows
from specdec.adapters.vllm_v2.agreement import Agreement
from specdec.adapters.vllm_v2.drafting import Drafting
from specdec.adapters.vllm_v2.requests import Requests
from specdec.adapters.vllm_v2.step import StepReader
from specdec.core.host import Speculation, registry
from specdec.testing.fakes import fake_target_info

CONFIG = json.loads((TINY / "target" / "config.json").read_text())
LONGEST, NUM_ROWS = 128, 4
PROMPTS = {"a": list(range(5, 15)), "b": list(range(30, 36)), "c": list(range(700, 720))}
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "max_tokens": 200, "min_tokens": 0}
SAMPLING |= {"extra_args": None, "structured_outputs": None, "stop_token_ids": [], "eos_token_id": None}


class Runner:
    """vLLM's side of the steps of three requests, whose rows lie in another order than those of the batch."""

    def __init__(self, name, form, device, *, read_late):
        self.device = torch.device(device)
        self.texts = {name: list(ids) for name, ids in PROMPTS.items()}
        self.rows, self.num_computed = {"a": 2, "b": 0, "c": 3}, dict.fromkeys(PROMPTS, 0)
        states = SimpleNamespace(
            device=self.device,
            max_model_len=LONGEST,
            total_len=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, dtype=torch.int32, device=self.device)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, LONGEST, dtype=torch.int32, device=self.device)),
        )
        self.states, self.requests = states, Requests()
        self.temperature = torch.full((NUM_ROWS,), 0.0 if form == "greedy" else 0.8, device=self.device)
        sampling = SimpleNamespace(**SAMPLING | {"temperature": 0.0 if form == "greedy" else 0.8})
        for name_, ids in PROMPTS.items():
            new = SimpleNamespace(req_id=name_, prefill_token_ids=ids, prompt_len=len(ids))
            self.requests.add([SimpleNamespace(**vars(new), sampling_params=sampling, mm_features=[], block_ids=[])])
        self.slots = torch.zeros(NUM_ROWS, K, dtype=torch.int64, device=self.device)
        self.driver, self.logits = self._driver(name, form, read_late)
        reader = StepReader(K, states, self.requests)
        self.drafting = Drafting(self.driver, reader, Agreement(1), self.logits)
        self.num_steps = 0

    def _driver(self, name, form, read_late):
        info = fake_target_info(
            config=CONFIG,
            vocab_size=CONFIG["vocab_size"],
            hidden_size=CONFIG["hidden_size"],
            num_layers=CONFIG["num_hidden_layers"],
            head_dim=CONFIG["head_dim"],
            device=str(self.device),
            max_model_len=LONGEST,
            max_num_seqs=NUM_ROWS,
            checkpoint_dir=TINY / "target",
        )
        settings = registry.PluginSettings()
        hooks = registry.load_hooks(settings)
        config = speculation(name, form) | {"on_proposer_error": "raise"}
        prepared = Speculation.prepare(config, info, settings, hooks)
        model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).to(self.device)
        self.target = SimpleNamespace(model=model, device=self.device, dtype=torch.float32)
        self.width = len(prepared.loaded.needs.hidden_states)
        torch.manual_seed(0)
        self.states_of = torch.randn(CONFIG["vocab_size"], self.width * CONFIG["hidden_size"]).to(self.device)
        rows = RequestRows.with_blocks(info, prepared.lookahead)
        driver = Driver(prepared, hooks.observers, self.target, None, rows, read_late=read_late)
        driver.lay_out()
        logits = None
        if form != "greedy":
            logits = torch.zeros(NUM_ROWS, K, CONFIG["vocab_size"], device=self.device)
        return driver, logits

    def step(self, counting=None):
        """Compute what is not computed yet and all drafts, accept a few of them, and draft. Returns the slots."""
        order = sorted(PROMPTS, key=lambda name: (self.num_steps + ord(name)) % 3)
        known, drafts = self.slots.tolist(), {}
        ids, positions, counts, num_sampled = [], [], [], []
        for place, name in enumerate(order):
            text, start = self.texts[name], self.num_computed[name]
            drafts[name] = known[self.rows[name]] if start else []
            computed = [*text[start:], *drafts[name]]
            accepted = min(len(drafts[name]), (self.num_steps + place) % (K + 1))
            text += [*drafts[name][:accepted], (7 * self.num_steps + place) % 4000]
            self.num_computed[name] = len(text) - 1
            ids += computed
            positions += range(start, start + len(computed))
            counts.append(len(computed))
            num_sampled.append(accepted + 1)
        self._publish(order)
        self.num_steps += 1
        batch = self._batch(order, drafts, ids, positions, counts)
        sampled = torch.tensor(num_sampled).to(self.device)
        hidden = self.states_of[batch.input_ids].chunk(self.width, dim=1) if self.width else ()
        newest = torch.tensor([[self.texts[each][-1]] for each in sorted(self.rows, key=self.rows.get)])
        last_sampled = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
        last_sampled[sorted(self.rows.values())] = newest
        given = batch, sampled, last_sampled.to(self.device), self.temperature, hidden, None, K
        with torch.inference_mode():
            slots = counting(lambda: self.drafting.drafts(*given)) if counting else self.drafting.drafts(*given)
        self.slots[batch.idx_mapping] = slots
        return dict(zip(order, slots.tolist(), strict=True))

    def _publish(self, order):
        for name in order:
            text = torch.tensor(self.texts[name], dtype=torch.int32).to(self.device)
            self.states.all_token_ids.gpu[self.rows[name], : len(text)] = text
            self.states.total_len.gpu[self.rows[name]] = len(text)

    def _batch(self, order, drafts, ids, positions, counts):
        bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return SimpleNamespace(
            req_ids=order,
            num_reqs=len(order),
            idx_mapping=torch.tensor([self.rows[name] for name in order]).to(self.device),
            num_draft_tokens_per_req=np.array([len(drafts[name]) for name in order]),
            num_scheduled_tokens=np.array(counts),
            query_start_loc=bounds.to(self.device),
            positions=torch.tensor(positions).to(self.device),
            input_ids=torch.tensor(ids, dtype=torch.int32).to(self.device),
        )


NAMES = [name for name in DEVICE if name != "mtp"]  # which needs a target of its own


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), covering(NAMES, list(FORMS)))
def test_a_step_waits_once_where_drafts_stay_on_the_device(cuda, name, form):
    runner = Runner(name, form, "cuda:0", read_late=True)
    for _ in range(CHECKED_STEPS):
        runner.step()
    counted = []

    def counting(step):
        with cuda.counting() as counts:
            slots = step()
        counted.append(counts)
        return slots

    runner.step(counting)
    assert list(counted[0].waits.values()) == [1], counted[0].waits
    assert "vllm_v2/step.py" in next(iter(counted[0].waits)), "what was sampled"


@pytest.mark.parametrize("form", FORMS)
def test_the_verifier_is_told_what_each_draft_was_drawn_from(form):
    runner = Runner("medusa", form, "cpu", read_late=False)
    for _ in range(3):
        slots = runner.step()
    for name, row in runner.rows.items():
        drafts = runner.requests[name].drafts
        assert slots[name][: len(drafts)] == drafts
        if runner.logits is not None:
            q = (runner.logits[row] / runner.temperature[row]).softmax(dim=-1)
            of_slots = q.gather(1, torch.tensor(slots[name])[:, None]).squeeze(1)
            assert (of_slots > 0).all()
            assert (of_slots[: len(drafts)] < 1).any(), "drawn"


def counted(runner):
    """What does not tell when drafts were read."""
    metrics = runner.driver.metrics
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    accepted = {name: metrics.acceptance.as_dict()[name] for name in names}
    return accepted | {"calls": metrics.counts["proposer_propose_calls"], "errors": dict(metrics.proposer_errors)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash", "medusa"])
def test_drafts_that_are_read_a_step_later_are_the_same_and_counted_alike(name):
    on_host = Runner(name, "greedy", "cpu", read_late=True)
    expected = [on_host.step() for _ in range(12)]
    assert not on_host.driver.reads_late, "networks on a CPU are placed on the host"
    with emulated_cuda() as cuda, plain_kernels(cuda):
        late = Runner(name, "greedy", "cuda:0", read_late=True)
        assert late.driver.reads_late
        assert [late.step() for _ in range(12)] == expected
        assert counted(late) == counted(on_host)
    assert counted(on_host)["num_accepted_draft_tokens"] > 20
