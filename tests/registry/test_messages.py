"""What users and authors read: every message is provoked for real and compared with its file in `messages/`.

SPECDEC_WRITE_MESSAGES=1 writes the files anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import PluginSettings, Registry, load_proposer
from specdec.core.registry.hooks import load_hooks
from specdec.sdk import DistributionKind, Draft, DraftDistribution, SpecdecError, lifecycle
from specdec.sdk.hooks import StepStats
from specdec.testing import check_proposer

MESSAGES = Path(__file__).parent / "messages"
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["def main(", "import os\n", "class A:\n    "]

ANY = """
class Mine:
    def __init__(self, config): ...
    def propose(self, step):
        raise AssertionError("not asked")
"""


@pytest.fixture
def same(site, tmp_path):
    """Compare a message with its file, all but paths, versions and times."""

    def same(name, text):
        text = str(text).replace(str(site), "SITE").replace(str(tmp_path), "TMP")
        text = re.sub(r"(installed +).*\[specdec-sdk:.*\n", r"\1(first-party ones)\n", text)
        text = "\n".join(line for line in text.splitlines() if "[specdec-sdk:" not in line)
        text = re.sub(r"(specdec-sdk |installed is )\d\S*", r"\1VERSION", text)
        text = re.sub(r"\d+\.\d+ ms", "N ms", text)
        text = re.sub(r"\d+\.\d\d(?= tokens at)", "N", text)
        file = MESSAGES / f"{name}.txt"
        if os.environ.get("SPECDEC_WRITE_MESSAGES"):
            file.write_text(f"{text}\n")
        assert text == file.read_text().removesuffix("\n")
        assert all(len(line) <= 140 for line in text.splitlines())

    return same


@pytest.fixture
def author(install, write_module):
    """A distribution specdec-plugin-x 0.3.1 with a proposer "mine" in mypkg/proposer.py."""

    def author(source=ANY, **metadata):
        write_module("mypkg.__init__", "")
        install("specdec-plugin-x", "0.3.1", proposers=["mine = mypkg.proposer:Mine"], **metadata)
        return write_module("mypkg.proposer", source)

    return author


@pytest.fixture
def refused(target):
    """The error of loading a proposer the way an engine does."""

    def refused(settings=None, **config):
        asked = SpeculativeConfig.parse({"num_speculative_tokens": 4} | config)
        settings = settings or PluginSettings()
        with pytest.raises(SpecdecError) as caught:
            load_proposer(Registry.discover(settings).resolve(asked), asked, target)
        return caught.value

    return refused


def test_unknown_name(same, author, refused):
    author()
    same("E101-unknown-name", refused(method="mien"))


def test_class_path_of_no_module(same, author, refused):
    author()
    same("E102-no-module", refused(model="mypkg.proposr.Mine"))


def test_class_path_whose_import_fails(same, author, refused):
    author("import numba_of_another_world\n")
    same("E102-import-inside", refused(method="mine"))


def test_class_path_of_no_attribute(same, author, refused):
    author()
    same("E102-no-attribute", refused(model="mypkg.proposer.Min"))


def test_file_name_instead_of_a_class_path(same, author, refused):
    author()
    same("E102-file-name", refused(model="mypkg.proposer.py"))


def test_import_that_raises(same, author, refused):
    author("def table():\n    return {}['licence']\nTABLE = table()\n")
    same("E103-import-raises", refused(method="mine"))


def test_blocked(same, author, refused):
    author()
    same("E104-blocked", refused(PluginSettings(deny=frozenset({"specdec-plugin-x"})), method="mine"))


def test_missing_method(same, author, refused):
    author("class Mine:\n    def __init__(self, config): ...\n    def proposes(self, step): ...\n")
    same("E110-no-propose", refused(method="mine"))


def test_wrong_signature(same, author, refused):
    author("class Mine:\n    def __init__(self, config): ...\n    def propose(self, input_ids, k): ...\n")
    same("E111-signature", refused(method="mine"))


def test_two_plugins_with_one_name(same, author, refused, install):
    author()
    install("fast-mine", "2.0", proposers=["mine = fastmine.core:Mine"])
    same("E112-two-of-one-name", refused(method="mine"))


def test_api_version_of_the_class(same, author, refused, monkeypatch):
    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    author(ANY + '    api_version = "2.1"\n')
    same("E120-api-version", refused(method="mine"))


def test_api_version_of_an_older_major(same, author, refused, monkeypatch):
    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    author(ANY + '    api_version = "0.2"\n')
    same("E120-older-major", refused(method="mine"))


def test_api_version_that_is_no_version(same, author, refused, monkeypatch):
    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    author(ANY + "    api_version = 1.0\n")
    same("E119-no-version", refused(method="mine"))


def test_api_version_read_from_metadata_without_an_import(same, author, refused):
    author("raise AssertionError('imported')\n", requires=["specdec-sdk>=2.1,<3"])
    same("E120-from-metadata", refused(method="mine"))


def test_refusal(same, author, refused):
    author(
        "from specdec.sdk import Refusal\n" + ANY + "    @classmethod\n    def needs(cls, config, target):\n"
        '        raise Refusal(f"a vocabulary of {target.vocab_size} is too small", "a target with 32000 tokens")\n'
    )
    same("E121-refusal", refused(method="mine"))


def test_unknown_option(same, author, refused):
    author("from specdec.sdk import StrictModel\n" + ANY + "    class Options(StrictModel):\n        window: int = 4\n")
    same("E131-unknown-option", refused(method="mine", proposer_config={"windw": 8}))


HOOKS = "from specdec.sdk import hookimpl\n@hookimpl\ndef {hook}(stats):\n    raise KeyError('table')\n"
STATS = StepStats(
    step=1,
    num_requests=1,
    num_tokens_computed=1,
    num_drafts=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_committed_tokens=1,
)


def test_unknown_hook(same, install, write_module, caplog):
    write_module("mypkg", HOOKS.format(hook="on_stepp"))
    install("specdec-plugin-x", "0.3.1", plugins=["watch = mypkg"])
    load_hooks(PluginSettings(allow=frozenset({"watch"})))
    (record,) = caplog.records
    same("W101-unknown-hook", record.getMessage())


def test_hook_that_keeps_raising(same, install, write_module, caplog):
    write_module("mypkg", HOOKS.format(hook="on_step"))
    install("specdec-plugin-x", "0.3.1", plugins=["watch = mypkg"])
    observers = load_hooks(PluginSettings(allow=frozenset({"watch"}))).observers
    for _ in range(5):
        observers.on_step(stats=STATS)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    same("W102-unregistered", record.getMessage())


RUNNING = """
from specdec.sdk import Needs

class Mine:
    needs = Needs({needs})

    def __init__(self, config): ...

    def propose(self, step):
        return self.answer(step)

    def answer(self, step):
        raise KeyError(step.request_ids[-1])
"""


def a_draft(step, distribution=None):
    return Draft(torch.zeros(len(step), step.width, dtype=torch.int64), step.budget.clone(), distribution=distribution)


def with_distribution(step, **distribution):
    return a_draft(
        step,
        DraftDistribution(
            kind=torch.full((len(step),), DistributionKind.DENSE_PROBS, dtype=torch.uint8), **distribution
        ),
    )


def half_the_mass(step):
    probs = torch.full((len(step), step.width, 4096), 1 / 4096)
    probs[1, 1] /= 2
    return with_distribution(step, probs=probs)


def writing(step):
    step.newest_token[1:].add_(1)
    return a_draft(step)


ANSWERS = {
    "E200-nothing": lambda step: None,
    "E200-generator": lambda step: ([1, 2] for _ in step.request_ids),
    "E201-transposed-floats": lambda step: Draft(torch.zeros(step.width, len(step)), step.budget.clone()),
    "E201-wrong-device": lambda step: Draft(a_draft(step).token_ids.to("meta"), step.budget.clone()),
    "E202-over-the-budget": lambda step: Draft(a_draft(step).token_ids, step.budget + 3),
    "E203-outside-the-vocabulary": lambda step: Draft(a_draft(step).token_ids + 4096, step.budget.clone()),
    "E210-raises": None,
    "E220-writes": writing,
    "E201-floats": lambda step: Draft(a_draft(step).token_ids.float(), step.budget.clone()),
    "E210-without-lengths": lambda step: Draft(a_draft(step).token_ids),
}
DISTRIBUTIONS = {
    "E201-another-vocabulary": lambda step: with_distribution(step, probs=torch.ones(len(step), step.width, 100)),
    "E204-undeclared-form": lambda step: a_draft(
        step, DraftDistribution(kind=torch.full((len(step),), DistributionKind.SPARSE, dtype=torch.uint8))
    ),
    "E205-half-the-mass": half_the_mass,
}


@pytest.mark.parametrize(
    ("needs", "answers", "method"),
    [("", ANSWERS, "greedy"), ('distributions=("dense",)', DISTRIBUTIONS, "probabilistic")],
    ids=["ids", "distributions"],
)
def test_every_step(same, author, monkeypatch, needs, answers, method):
    author(RUNNING.format(needs=needs))
    config = {"method": "mine", "num_speculative_tokens": 4, "draft_sample_method": method}
    llm = LLM("tiny", speculative_config=config, max_model_len=128, max_num_seqs=8)
    mine = import_module("mypkg.proposer").Mine
    for number, (name, answer) in enumerate(answers.items()):
        llm.engine.metrics.counts["num_steps"] = 0
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add_request(prompt, PARAMS, f"req-{number}{index}")
        with monkeypatch.context() as patch:
            patch.setattr(mine, "answer", staticmethod(answer) if answer else mine.answer)
            with pytest.raises(SpecdecError) as caught:
                llm.engine.step()
        for index in range(len(PROMPTS)):
            llm.abort(f"req-{number}{index}")
        same(name, caught.value)


@pytest.mark.slow
def test_too_slow(same, author, monkeypatch, caplog):
    author(RUNNING.format(needs=""))
    llm = LLM("tiny", speculative_config={"method": "mine", "num_speculative_tokens": 2}, max_model_len=256)

    def slow(step):
        time.sleep(0.01)
        return Draft(torch.full((len(step), 2), 4095), step.budget.clone())

    monkeypatch.setattr(import_module("mypkg.proposer").Mine, "answer", staticmethod(slow))
    llm.generate(PROMPTS[:1], PARAMS.replace(max_tokens=140))
    (record,) = (record for record in caplog.records if "SD-W301" in record.getMessage())
    same("W301-too-slow", record.getMessage())


KEEPS_BY_ROW = """
from specdec.sdk import Draft

class Mine:
    def __init__(self, config):
        self.seen = {}

    def propose(self, step):
        drafts = []
        for row, token, budget in zip(step.slots.tolist(), step.newest_token.tolist(), step.budget.tolist()):
            drafts.append([self.seen.get(row, token)] * budget)
            self.seen[row] = token
        return Draft.from_lists(drafts, step.width)
"""


def test_state_kept_across_requests(same, author):
    author(KEEPS_BY_ROW)
    (result,) = check_proposer("mine", only=["reused_slots"])
    same("check-state-across-requests", result.text)
