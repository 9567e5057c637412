"""What is said of planted changes of public names: additive or breaking, and which number has to rise."""

from __future__ import annotations

import re

import pytest
from scripts import api_check, api_stub

PUBLISHED = """\
# specdec-sdk 1.3.0
# deprecated Draft.confidence since 1.3 until 2.0
# deprecated Phase since 1.2 until 2.0
# deprecated StepView.budget since 1.0 until 2.0
# module specdec
class LLM:
    def generate(self, prompts: str, params: Params = None) -> list[RequestOutput]: ...

# module specdec.sdk
API_VERSION = (1, 4)
Placement = Literal['host', 'device']

@dataclass(frozen=True)
class Draft:
    token_ids: Tensor
    lengths: Tensor
    _: KW_ONLY
    confidence: Tensor | None = None

class HostProposer:
    def __init__(self, config: ProposerConfig) -> None: ...
    def draft(self, request: RequestView, tokens: Sequence[int], k: int) -> Sequence[int]: ...

class Needs(StrictModel):
    history: bool = Field(default=False)
    max_draft_tokens: int | None = Field(default=None, ge=1)

class Phase(IntEnum):
    PREFILL = 0

class Proposer(Protocol):
    def propose(self, step: StepView) -> Draft: ...

class Services(Protocol):
    def embed(self, token_ids: Tensor) -> Tensor: ...

@dataclass(frozen=True, kw_only=True)
class StepView:
    budget: Tensor
    dummy: bool = False

# module specdec.sdk.combinators
class Chain:
    def of(self, first: type, second: type) -> type: ...

# module specdec.sdk.extensions
class Extension(StrictModel):
    version: ClassVar[int]

class Metrics(Extension):
    version: ClassVar[int] = 1

class TreeView(Protocol):
    def path(self, request: int) -> Tensor: ...

class Trees(Extension):
    version: ClassVar[int] = 2
    depth: int = Field(default=4)
"""
SINCE = "Since API 1.5."
API_1_5, API_2_0 = ("(1, 4)", "(1, 5)"), ("(1, 4)", "(2, 0)")
PACKAGE_1_4, PACKAGE_2_0 = ("sdk 1.3.0", "sdk 1.4.0"), ("sdk 1.3.0", "sdk 2.0.0")
TREES_3 = ("version: ClassVar[int] = 2", "version: ClassVar[int] = 3")

ADDITIVE = {
    "a name": ("class Phase", "MAX = 3\n\nclass Phase"),
    "a field of the engine's": ("    budget: Tensor", "    budget: Tensor\n    drafted: Tensor"),
    "a field of an author's, with a default": ("    _: KW_ONLY", "    _: KW_ONLY\n    sure: bool = False"),
    "a need with a default": ("    history:", "    colour: bool = Field(default=False)\n    history:"),
    "a service": ("    def embed(", "    def unembed(self, hidden: Tensor) -> Tensor: ...\n    def embed("),
    "an argument of a service": ("token_ids: Tensor) ->", "token_ids: Tensor, scaled: bool = False) ->"),
    "a method of a base class": ("    def draft(", "    def late(self) -> bool: ...\n    def draft("),
    "a phase": ("PREFILL = 0", "PREFILL = 0\n    REPLAY = 1"),
    "one more literal": ("'device']", "'device', 'both']"),
    "more that a draft may hold": ("confidence: Tensor | None", "confidence: Tensor | float | None"),
    "more that an author returns": ("StepView) -> Draft:", "StepView) -> Draft | None:"),
}
BREAKING = {
    "a name goes": ("class Phase", "class Stage"),
    "a field of the engine's goes": ("    budget: Tensor\n", ""),
    "a field of an author's goes": ("    confidence: Tensor | None = None\n", ""),
    "a field of an author's is required": ("    _: KW_ONLY", "    _: KW_ONLY\n    sure: bool"),
    "a need is required": ("    history:", "    colour: bool = Field(description='')\n    history:"),
    "fields change places": ("token_ids: Tensor\n    lengths: Tensor", "lengths: Tensor\n    token_ids: Tensor"),
    "a default means something else": ("history: bool = Field(default=False)", "history: bool = Field(default=True)"),
    "a bound is tighter": ("ge=1", "ge=2"),
    "an argument of a service is required": ("token_ids: Tensor) ->", "token_ids: Tensor, scaled: bool) ->"),
    "an argument that authors must take": ("k: int) ->", "k: int, late: bool = False) ->"),
    "a method that authors must have": ("    def propose(", "    def vote(self) -> int: ...\n    def propose("),
    "a method becomes a property": ("    def embed(self, token_ids: Tensor)", "    @property\n    def embed(self)"),
    "the engine gives None too": ("budget: Tensor", "budget: Tensor | None"),
    "the engine gives another type": ("token_ids: Tensor) -> Tensor", "token_ids: Tensor) -> list[int]"),
    "a draft may hold less": ("confidence: Tensor | None = None", "confidence: None = None"),
    "one literal less": ("['host', 'device']", "['host']"),
    "another base": ("class Phase(IntEnum)", "class Phase(StrEnum)"),
    "another value": ("PREFILL = 0", "PREFILL = 7"),
}  # fmt: skip


def judged(*changes, prose=SINCE):
    """What is said of the published names after replacements."""
    found = PUBLISHED
    for old, new in changes:
        assert old in found
        found = found.replace(old, new)
    if API_2_0 in changes:
        found = re.sub(r"# deprecated .*\n", "", found)
    return api_check.faults(PUBLISHED, found, lambda path: prose)


def kinds(lines):
    return {line.split()[0] for line in lines} & {"additive", "breaking"}


def test_nothing_is_said_of_no_change():
    assert judged() == []


@pytest.mark.parametrize("change", ADDITIVE.values(), ids=ADDITIVE)
def test_an_addition_demands_a_minor(change):
    lines = judged(change)
    assert kinds(lines) == {"additive"}
    assert lines[-1] == "API_VERSION must be at least (1, 5), and is (1, 4)"
    assert judged(change, API_1_5) == []


@pytest.mark.parametrize("change", BREAKING.values(), ids=BREAKING)
def test_a_break_demands_a_major(change):
    lines = judged(change, API_1_5)
    assert "breaking" in kinds(lines)
    assert lines[-1] == "API_VERSION must be at least (2, 0), and is (1, 5)"
    assert judged(change, API_2_0, prose="Since API 2.0.") == []


@pytest.mark.parametrize("told", ["since 1.4 until 2.0", "since 1.2 until 3.0"])
def test_what_goes_in_a_major_was_announced_in_two_minors(told):
    published = PUBLISHED.replace("Phase since 1.2 until 2.0", f"Phase {told}")
    found = published.replace(*BREAKING["a name goes"]).replace(*API_2_0)
    found = re.sub(r"# deprecated .*\n", "", found)
    [*_, last] = api_check.faults(published, found, lambda path: "Since API 2.0.")
    assert last == "specdec.sdk.Phase goes in (2, 0), and two minors before have to say so with `deprecated`"


@pytest.mark.parametrize("told", ["since 1.4 until 1.6", "since 1.5 until 2.0", "since 1.2 until 1.4"])
def test_a_notice_names_a_major_to_come(told):
    [line] = judged(("Phase since 1.2 until 2.0", f"Phase {told}"))
    assert line.endswith("it goes in a major that comes later, and with it")


def test_notices_are_read_off_the_sources(tmp_path, monkeypatch):
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text(
        "def old():\n    deprecated('old', since='1.3', removed_in='2.0', instead='new')\n"
    )
    monkeypatch.setattr(api_stub, "SOURCES", tmp_path)
    assert api_stub.stub(api_stub.load()) == "# deprecated old since 1.3 until 2.0\n"


def test_the_change_is_named():
    [first, *_] = judged(BREAKING["another value"])
    assert first == "breaking  specdec.sdk.Phase.PREFILL: value was 0, is 7"


@pytest.mark.parametrize(
    ("change", "whose"),
    [
        (("depth: int", "height: int"), "specdec.sdk.extensions.Trees"),
        (("def path(", "def paths("), "the extension that it belongs to"),
    ],
)
def test_a_break_of_an_extension_demands_its_number_and_a_minor(change, whose):
    assert judged(change, API_1_5)[-1].endswith(f"is broken: raise the version of {whose}")
    assert judged(change, TREES_3)[-1] == "API_VERSION must be at least (1, 5), and is (1, 4)"
    assert judged(change, TREES_3, API_1_5) == []


def test_the_number_of_another_extension_does_not_do():
    raised = ("version: ClassVar[int] = 1", "version: ClassVar[int] = 2")
    assert judged(("depth: int", "height: int"), raised, API_1_5) != []


def test_an_addition_to_an_extension_demands_a_minor_only():
    change = ("depth: int", "width: int = Field(default=2)\n    depth: int")
    assert judged(change)[-1] == "API_VERSION must be at least (1, 5), and is (1, 4)"
    assert judged(change, API_1_5) == []


@pytest.mark.parametrize(
    ("change", "least", "raised"),
    [
        (("params: Params = None", "params: Params = None, wait: bool = True"), "1.4", PACKAGE_1_4),
        (("params: Params = None", "params: Params"), "2.0", PACKAGE_2_0),
        (("second: type", "next: type"), "1.4", PACKAGE_1_4),  # provisional
    ],
)
def test_names_beside_the_contract_demand_a_version_of_the_package(change, least, raised):
    assert judged(change)[-1] == f"the package's version must be at least {least}, and is 1.3.0"
    assert judged(change, raised) == []


@pytest.mark.parametrize("prose", ["", "Since API 1.4.", "Since API 1.6."])
def test_a_new_name_must_say_since_when(prose):
    lines = judged(ADDITIVE["a service"], API_1_5, prose=prose)
    assert lines[-1] == 'specdec.sdk.Services.unembed must say "Since API 1.5" in its docstring or comment'


@pytest.mark.parametrize("package", ["0.9.0", "1.3.0rc1"])
def test_what_was_no_release_binds_nobody_and_is_written_anew(package):
    old = PUBLISHED.replace("1.3.0", package)
    change = BREAKING["a name goes"]
    [*_, last] = api_check.faults(old, old.replace(*change), lambda path: "")
    assert last == f"{package} {api_check.UNPUBLISHED}"
    assert api_check.faults(old, PUBLISHED, lambda path: "") == [last], "the release itself has to be written"
