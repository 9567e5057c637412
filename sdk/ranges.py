"""How large the numbers may be that a user writes, so that no later step overflows: integers end up in int64 tables,
the others in float32, bfloat16 or float16. What needs memory is weighed against what there is when it is known."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
"""Of things that each take memory: requests, blocks, tokens of a step."""
Limit = Annotated[int, Field(ge=1, le=INT64_MAX)]
"""At most this many, where fewer come anyway: any integer that a machine calls "no limit" is one."""
LimitOrZero = Annotated[int, Field(ge=0, le=INT64_MAX)]
DraftLength = Annotated[int, Field(ge=1, le=1024)]
"""Draft tokens of one request in one step. Verification has a row of logits for each."""
MOST_NODES = 64
TreeSize = Annotated[int, Field(ge=1, le=MOST_NODES)]
"""Nodes of a tree: one bit each of an integer."""
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(ge=1e-30, le=1)]
"""Above 0 in float32 too."""
Temperature = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
"""Logits are multiplied or divided by it, in float16 too."""
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
"""Added to a logit, in float16 too; 100 bans a token or makes it certain."""
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Seed = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
NaturalSeed = Annotated[int, Field(ge=0, le=INT64_MAX)]
Outputs = Annotated[int, Field(ge=1, le=16_384)]
"""Of one prompt: each is a request of its own."""
Gibibytes = Annotated[float, Field(gt=0, le=2**20, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""More than any machine computes with; a thread takes memory, and a thousand times as many end the process."""
