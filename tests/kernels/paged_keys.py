"""How many attention kernels one kind of layer asks for, over batches of every size: see `tests/rejection/keys.py`."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rejection"))

from keys import Keys

from specdec.core.kernels.attention import Pages
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cuda.paged_attention import kernel

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


def attend(num_requests, each, max_keys, skew):
    def numbers(count):
        return torch.zeros(count + skew, dtype=torch.int32)[skew:]

    query = torch.empty(num_requests * each, HEADS, DIM, dtype=torch.bfloat16)
    stored = torch.empty(4 * BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16)
    table = torch.zeros(num_requests, max_keys // BLOCK, dtype=torch.int32)
    pages = Pages(table, numbers(num_requests), numbers(num_requests + 1), BLOCK, each, max_keys)
    kernel.attend_pages(query, stored, stored, pages, AttentionSpec(0.1))


if __name__ == "__main__":
    keys = Keys()
    for max_keys in (4096, 131072):
        keys.found.clear()
        for num_requests, each, skew in product((1, 2, 3, 16, 65, 128, 300, 513), (1, 2, 5, 8, 16, 600), (0, 1)):
            attend(num_requests, each, max_keys, skew)
        print(json.dumps(keys.report(str(max_keys), set(keys.found))))
