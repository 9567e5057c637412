"""What an engine and a drafter in another process say to each other: MessagePack of tokens, and nothing that runs.

The client begins with `Hello`, and the server answers `Welcome` or `Refused`. `Start` brings a request's prompt, each
`Ask` what was committed since, and `End` its end. Every `Ask` is answered once, by `Drafts` or `Failed`, in order.
Where drafts are drawn, `AskDrawn` brings what they are drawn with, and `DrawnDrafts` what they were drawn from. In an
engine's own process, `AskStates` tells of hidden states.

A later version adds fields at the end of a message, with defaults, or messages. Whoever does not know a field leaves it
aside, so `PROTOCOL` changes only with the meaning of what is there. It needs the extra `remote`, and loads no torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from . import errors
from .errors import PluginId, ProposerError, Refusal, SpecdecError

if TYPE_CHECKING:
    from .needs import Needs

PROTOCOL = 1
"""Both sides speak the same version, or the server refuses."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""Neither side reads a longer message: a prompt of half a million tokens fits."""

MOST_ROWS = 4096
MOST_TOKENS = 2**20
"""Of a prompt, or of a row."""
MOST_DRAFTS = 4096
MOST_UNIFORMS = 1024
"""Of a row: K, or the nodes of a tree."""

MOST_NAME = 512
MOST_TEXT = 20_000
"""Characters."""

Name = Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Tokens = Annotated[list[Token], Meta(max_length=MOST_TOKENS)]


Method = Literal["metrics", "save", "load", "update_weights"]


class Message(msgspec.Struct, array_like=True):
    """An array that begins with the number of its kind."""


class Form(msgspec.Struct, array_like=True, frozen=True):
    """How draft distributions are reported."""

    name: Literal["dense", "sparse"]
    width: Count  # entries for each draft, at most
    own_vocabulary: bool = False  # the entries of a dense one are those of a draft vocabulary

    @classmethod
    def of(cls, needs: Needs, vocab_size: int) -> Form | None:
        """That of a proposer's drafts. None means that it reports no distribution."""
        if needs.stored_form == "sparse":
            return cls("sparse", needs.sparse_top_m)
        ids = needs.draft_vocabulary
        width = vocab_size if ids is None else len(ids)
        return cls("dense", width, ids is not None) if needs.stored_form == "dense" else None

    def __str__(self) -> str:
        of = " of a draft vocabulary" if self.own_vocabulary else ""
        return f"{self.name} of {self.width} entries{of}"

    def holds(self, other: Form) -> bool:
        """Whether distributions of another form can be told in this one."""
        return self == other or (self.name == other.name == "sparse" and self.width >= other.width)


class Hello(Message, tag=1):
    """A client's first message. The server holds its requests apart from those of others."""

    protocol: Count
    vocab_size: Count  # of the target that is drafted for
    max_model_len: Count
    num_draft_tokens: Count  # the most drafts of a request that the client can use
    client: Text = ""  # for people who read the server's log
    form: Form | None = None  # of drawn drafts' distributions. None means that no drafts are to be drawn


class Welcome(Message, tag=2):
    """The server takes the client in."""

    protocol: Count
    proposer: Name  # its label
    num_draft_tokens: Count  # the most that it drafts for a request
    num_uniforms: Annotated[int, Meta(ge=0, le=MOST_UNIFORMS)] = 0  # that drawing the drafts of a request takes


class Refused(Message, tag=3):
    """The server does not take the client in, or no longer. An error's code, sentence and facts."""

    code: Name
    summary: Text
    facts: dict[Name, Text] = {}


class Unknown(Message, tag=4):
    """The server knows no such client: it was started again, or the client was silent for long. Say hello again."""


class Start(Message, tag=5):
    """A request, before its first step or sent once more."""

    request_id: Name
    prompt: Tokens
    namespace: Text = ""
    options: Text = ""  # its RequestOptions as a JSON object


class Row(msgspec.Struct, array_like=True, gc=False):
    """What was committed to a request since its last row, or since its start."""

    request_id: Name
    start: Count  # the position of the first of `tokens`
    tokens: Tokens
    budget: Count  # the most drafts that are of use behind them; 0 asks for none
    num_drafted: Count = 0  # that were verified in the newest step
    num_accepted: Count = 0


class Ask(Message, tag=6):
    """A step of the client's engine."""

    number: Count
    rows: Annotated[list[Row], Meta(max_length=MOST_ROWS)]


class Drawing(msgspec.Struct, array_like=True, gc=False):
    """What the draft of a row is drawn with."""

    uniforms: Annotated[list[Annotated[float, Meta(gt=0, lt=1)]], Meta(max_length=MOST_UNIFORMS)]  # by draft index
    temperature: Annotated[float, Meta(ge=0, le=1e7)] = 1.0  # 0 means greedy; here and below as in `SamplingView`
    top_k: Count = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0


class AskDrawn(Ask, tag=13):
    """A step of the client's engine in which drafts are drawn."""

    drawings: Annotated[list[Drawing], Meta(max_length=MOST_ROWS)]  # one for each row


class AskStates(AskDrawn, tag=15):
    """A step with hidden states, which lie by row in memory that both sides have. Without drawings nothing is drawn."""

    counts: Annotated[list[Count], Meta(max_length=MOST_ROWS)]  # hidden states of each row


class End(Message, tag=7):
    """A request ended. `tokens` from position `start` on are its last; the server may hold some too many."""

    request_id: Name
    reason: Name
    start: Count
    tokens: Tokens


class Bye(Message, tag=8):
    """The client leaves."""


class Drafted(msgspec.Struct, array_like=True, gc=False):
    """A draft that follows `length` committed tokens of a request."""

    request_id: Name
    length: Count
    tokens: Annotated[list[Token], Meta(max_length=MOST_DRAFTS)]
    state: Count = 0  # DRAFTED, UNKNOWN or FULL


DRAFTED = 0
UNKNOWN = 1
"""The server lacks the text before the row: the request is started again, with all of it."""
FULL = 2
"""The server has no slot for the request: it is asked for again after a while."""


class Drafts(Message, tag=9):
    """The answer to an `Ask`, a draft for each of its rows."""

    number: Count
    rows: Annotated[Sequence[Drafted], Meta(max_length=MOST_ROWS)]
    micros: Count = 0  # that the server worked on it


class Distribution(msgspec.Struct, array_like=True, gc=False):
    """What the n drafts of a row were drawn from, in m entries each. Numbers are in the machine's order of bytes."""

    kind: Literal[1, 2, 3]  # DistributionKind, other than one-hot
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    values: bytes  # [n, m] of that type: probabilities, or logits
    ids: bytes = b""  # [n, m] int32, of a sparse one: target ids, padded with -1


class DrawnDraft(Drafted):
    """A draft with its distribution."""

    distribution: Distribution | None = None  # None means that the draft is one-hot


class DrawnDrafts(Drafts, tag=14):
    """The answer to an `AskDrawn`."""

    rows: Annotated[Sequence[DrawnDraft], Meta(max_length=MOST_ROWS)]


class Failed(Message, tag=10):
    """The proposer raised. The error as it would be in one process; `number` is that of the ask, or 0."""

    number: Count
    code: Name
    summary: Text
    facts: dict[Name, Text] = {}
    proposer: tuple[Name, Name, Text, Text] | None = None  # name, class path, distribution, version
    kind: Name = "ProposerError"  # the class in specdec.sdk.errors
    traceback: Text = ""
    request_id: Text = ""  # of a request that the server does not take; empty: the error is no request's


class Call(Message, tag=11):
    """Calls a method of the proposer. All but `metrics` are for the engine that started the process, which repeats them
    to its next process, before it says hello.
    """

    number: Count
    method: Method
    path: Text = ""  # a directory; of `update_weights`, a file of safetensors


class Returned(Message, tag=12):
    """A call returned."""

    number: Count
    figures: dict[Name, float] = {}  # of `metrics`


ToServer = Hello | Start | Ask | AskDrawn | AskStates | End | Bye | Call
ToClient = Welcome | Refused | Unknown | Drafts | DrawnDrafts | Failed | Returned

encode = msgspec.msgpack.Encoder().encode
at_server = msgspec.msgpack.Decoder(ToServer).decode
"""A client's message of bytes. Raises one of UNREADABLE for anything else; runs and imports nothing that it reads."""
at_client = msgspec.msgpack.Decoder(ToClient).decode
"""A server's message of bytes. Raises one of UNREADABLE for anything else."""

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What decoding raises for bytes that are no message."""


class TheirTracebackError(Exception):
    """The cause of an error that was raised in another process: the traceback there, as a text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}\n"


def as_failed(error: SpecdecError, number: int = 0, request_id: str = "") -> Failed:
    """The message of an error. `request_id`: of a request that is not taken. Empty: the error is no request's."""
    plugin = error.plugin
    names = (plugin.name, plugin.target, plugin.distribution or "", plugin.version or "") if plugin else None
    text = "".join(traceback.format_exception(error.__cause__ or error))[-MOST_TEXT:]
    kind = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
    summary = as_text(error.summary)
    return Failed(number, error.code, summary, as_texts(error), names, kind, as_text(text), request_id)


def as_error(failed: Failed, plugin: PluginId | None = None) -> SpecdecError:
    """The error of a message, whose cause shows the traceback there.

    plugin: who it is here. None means that the message says so.
    """
    if plugin is None and failed.proposer is not None:
        name, target, distribution, version = failed.proposer
        plugin = PluginId(name, target, distribution or None, version or None)
    kind = KINDS.get(failed.kind, ProposerError)
    if kind is Refusal:
        error: SpecdecError = Refusal(failed.facts.get("reason", ""), failed.facts.get("works"), plugin=plugin)
    else:
        error = kind(failed.code, failed.summary, failed.facts, plugin=plugin)
    error.__cause__ = TheirTracebackError(failed.traceback) if failed.traceback else None
    return error


def as_refused(error: SpecdecError) -> Refused:
    """The message of an error that ends what a client and a server have to say to each other."""
    return Refused(error.code, as_text(error.summary), as_texts(error))


def as_texts(error: SpecdecError) -> dict[str, str]:
    """The facts of an error, for a message."""
    return {as_text(name, MOST_NAME) or "?": as_text(str(value)) for name, value in error.facts.items()}


def as_text(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text to what a message takes. What no message can hold, such as half a surrogate pair, becomes "?"."""
    return text[:most].encode(errors="replace").decode()


KINDS = {
    each.__name__: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SpecdecError)
}
