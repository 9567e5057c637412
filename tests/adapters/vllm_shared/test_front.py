"""What the adapter does around vLLM's own classes, here of classes that stand in for them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from specdec.adapters.vllm_shared.ignored_keys import refuse_ignored
from specdec.adapters.vllm_shared.prepare import Prepared
from specdec.adapters.vllm_shared.rows import RequestRows, _draft_seed
from specdec.adapters.vllm_shared.supervised_host import Retries
from specdec.adapters.vllm_shared.workers_page import SUFFIX, Workers
from specdec.adapters.vllm_shared.wrapping import wrap
from specdec.adapters.vllm_v2.agreement import Agreement
from specdec.adapters.vllm_v2.plugin import _check_as_written
from specdec.core.request.metrics import EngineMetrics
from specdec.sdk import ConfigError
from specdec.sdk.errors import PluginId
from specdec.testing.fakes import fake_target_info


@dataclass
class Speculative:
    """As vLLM's SpeculativeConfig: some defaults stand in a Field."""

    model: str | None = None
    method: str | None = None
    num_speculative_tokens: int = Field(default=None)
    quantization: str | None = Field(default=None)
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: int | None = Field(default=None)
    rate: float | None = None
    synthetic_acceptance_rate: float | None = None
    target_model_config: object = None
    rejection_sample_method: str = "standard"


def test_keys_that_are_read_or_filled_in_by_vllm_or_say_what_is_so_anyway_are_taken():
    given = Speculative("specdec.adapters.vllm.ngram", "custom_class", 3, None, 0, 1, target_model_config=object())
    refuse_ignored(given)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("rate", 0.5, "leave it out: vLLM's own drafters alone read it"),
        ("quantization", "fp8", 'additional_config["specdec"]["quantization"]'),
        ("draft_tensor_parallel_size", 2, "leave it out: every worker has the whole draft network"),
        ("prompt_lookup_max", 4, 'additional_config["specdec"]["proposer_config"]["prompt_lookup_max"]'),
        ("synthetic_acceptance_rate", 0.5, 'additional_config["specdec"]["synthetic_acceptance_rate"]'),
    ],
)
def test_a_key_that_nobody_reads_is_refused_with_what_to_write(name, value, fix):
    with pytest.raises(ConfigError, match="SD-E215") as raised:
        refuse_ignored(Speculative(num_speculative_tokens=3, **{name: value}))
    assert raised.value.facts == {f"{name}={value!r}": fix}


def test_such_a_key_is_refused_by_a_worker_too_whose_entry_point_did_not_see_it():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(is_hybrid=False, is_attention_free=False, enable_prompt_embeds=False),
        speculative_config=Speculative(num_speculative_tokens=3, quantization="fp8"),
        additional_config={},
    )
    with pytest.raises(ConfigError, match="SD-E215"):
        Prepared.of("ngram", config)


OURS = "specdec.adapters.vllm.ngram"
RECORDS = "specdec.lab.recording.vllm_worker.RecordingDrafter"


def written(model, method, **settings):
    """What vLLM makes of a configuration with our entry point."""
    return _check_as_written(lambda speculative: "vLLM's", Speculative(model, method, **settings))


@pytest.mark.parametrize(
    ("model", "method"),
    [(OURS, None), (OURS, "custom_class"), (RECORDS, None), ("other/model", "eagle3"), (None, "ngram")],
)
def test_a_class_of_ours_alone_and_models_of_others_are_taken(model, method):
    assert written(model, method) == "vLLM's"


def test_a_folder_that_is_named_like_this_package_is_another_model(tmp_path, monkeypatch):
    (tmp_path / "specdec").mkdir()
    monkeypatch.chdir(tmp_path)
    assert written("specdec", "eagle3", quantization="fp8") == "vLLM's"


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        (OURS, "ngram", "names a method beside the class"),
        ("specdec.adapters.vllm", None, "names no class of the adapter"),
        ("specdec.adapters.vllm.", None, "names no class of the adapter"),
        ("specdec.plugins.ngram", None, "names no class of the adapter"),
        ("specdec.plugins.ngram.NgramProposer", None, "names no class of the adapter"),
        ("specdec.no_such.Drafter", None, "names no class of the adapter"),
        ("specdec.some-idea", None, "names no class of the adapter"),
        ("specdec.", None, "names no class of the adapter"),
    ],
)
def test_what_vllm_would_not_run_as_a_drafter_is_refused(model, method, said):
    with pytest.raises(ConfigError, match="SD-E215") as raised:
        written(model, method)
    assert said in str(raised.value)


def test_only_runners_with_a_drafter_of_ours_behave_otherwise():
    class Runner:
        def __init__(self, drafter=None):
            if drafter is not None:
                self.drafter = drafter

        def step(self, number, *, more):
            return ("theirs", number, more)

    def ours(drafter, original, runner, number, *, more):
        return (drafter, original(runner, number + 1, more=more), more)

    wrap(Runner, "step", ours, "drafter", str)
    assert Runner("mine").step(1, more=2) == ("mine", ("theirs", 2, 2), 2)
    assert Runner(7).step(1, more=2) == Runner().step(1, more=2) == ("theirs", 1, 2)
    assert Runner.step.__name__ == "step"


@pytest.fixture
def tensor_parallel(monkeypatch):
    """A group whose first rank drafted something, and what it was asked to send from."""
    module, sent = ModuleType("vllm.distributed"), SimpleNamespace(table=None, sources=[])
    group = SimpleNamespace(ranks=[4, 5], cpu_group=object(), broadcast=lambda rows, src: rows + 1 + src)
    module.get_tp_group = lambda: group
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", module)

    def broadcast(table, src, group):
        sent.sources.append(src)
        table.copy_(sent.table)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    return sent


def test_one_rank_agrees_with_itself():
    drafts = [[1, 2], []]
    assert Agreement(1).on(drafts, 3) is drafts


def test_the_first_ranks_drafts_are_taken_and_the_first_difference_is_told_once(tensor_parallel, caplog):
    agreement, own = Agreement(2), [[1, 2], []]
    tensor_parallel.table = torch.tensor([[2, 1, 2, 0], [0, 0, 0, 0]])
    assert agreement.on(own, 3) == own
    assert not caplog.records
    tensor_parallel.table = torch.tensor([[2, 1, 2, 0], [3, 7, 8, 9]])
    assert [agreement.on(own, 3) for _ in range(2)] == [[[1, 2], [7, 8, 9]]] * 2
    (record,) = caplog.records
    assert "SD-W240" in record.getMessage()
    assert tensor_parallel.sources == [4, 4, 4]
    logits = torch.zeros(3, 2)
    agreement.on_rows(logits, torch.tensor([0, 2]))
    assert logits.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_rows_of_ones_own_have_room_for_the_longest_text_and_what_is_drafted_behind_it():
    info = fake_target_info(max_num_seqs=3, max_model_len=32, block_size=16)
    assert RequestRows.with_blocks(info, None).pool.num_blocks == 0
    rows = RequestRows.with_blocks(info, 4)
    assert (rows.num_free, rows.pool.num_blocks, rows.pool.block_size) == (3, 9, 16)


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_a_seed_is_kept_within_the_range_of_a_tensor(seed):
    assert _draft_seed("a", seed) == _draft_seed("a", seed + 2**63) == seed
    assert 0 <= _draft_seed("a", None) < 2**56
    assert _draft_seed("a", None) != _draft_seed("b", None)


class Host:
    """What is switched on and off."""

    plugin = PluginId("mine", "x_mod:Mine", "dist-x", "0.3.1")
    enabled, told = True, ()

    def resume(self):
        self.enabled, self.told = True, (*self.told, "resume")

    def forgive(self):
        self.told = (*self.told, "forgive")


def test_a_proposer_is_asked_again_after_pauses_that_double_and_shrink_when_it_has_worked_as_long():
    host, metrics = Host(), EngineMetrics("model", "mine")
    retries = Retries(host, metrics, 2)

    def steps(count):
        for _ in range(count):
            retries.begin_step()
        return host.told, metrics.counts["proposer_retries"]

    assert steps(20) == ((), 0)
    host.enabled = False
    assert steps(2) == ((), 0)
    assert steps(1) == (("resume",), 1)
    assert steps(3) == (("resume",), 1)
    assert steps(1) == (("resume", "forgive"), 1)
    host.enabled = False
    assert steps(3) == (("resume", "forgive", "resume"), 2)
    host.enabled = False
    assert steps(4) == (("resume", "forgive", "resume"), 2)
    retries.stop()
    assert steps(20) == (("resume", "forgive", "resume"), 2)


def test_a_figure_on_the_page_has_its_name_text_and_kind(tmp_path):
    (tmp_path / f"7{SUFFIX}").write_text("# HELP a what it counts\n# TYPE a gauge\na 3.0\n")
    found, *_ = Workers(tmp_path).collect()
    assert (found.name, found.documentation, found.type) == ("a", "what it counts", "gauge")
    assert [(each.name, each.labels, each.value) for each in found.samples] == [("a", {"worker": "7"}, 3.0)]
