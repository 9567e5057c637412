"""Sessions whose input comes in turns. vLLM keeps the id, and what was said before is part of the next prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings


@pytest.mark.parametrize("may_begin_late", [True, False])
def test_the_next_turn_ends_the_one_before_where_it_can_be_drafted_for(may_begin_late):
    from specdec.adapters.vllm_v1.hooks import REPLACEMENTS

    seen = []
    driver = SimpleNamespace(begin_step=lambda ended, preempted: seen.append((ended, preempted)))
    drafter = SimpleNamespace(driver=driver, may_begin_late=may_begin_late)
    output = SimpleNamespace(
        finished_req_ids={"over"}, preempted_req_ids=None, scheduled_new_reqs=[SimpleNamespace(req_id="turn")]
    )
    REPLACEMENTS["_update_states"](drafter, lambda runner, scheduled: seen.append(scheduled), None, output)
    assert seen == [({"over", "turn"} if may_begin_late else {"over"}, set()), output]
