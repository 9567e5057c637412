"""What goes in a later version of the contract says so, at the author's line."""

from __future__ import annotations

import pytest

from specdec.sdk.errors import SpecdecDeprecationWarning, SpecdecWarning, deprecated


class Step:
    """With a field that has another name now."""

    width = 4

    @property
    def num_draft_tokens(self):
        deprecated("StepView.num_draft_tokens", since="1.3", removed_in="2.0", instead="StepView.width")
        return self.width


def test_the_warning_names_the_versions_and_what_to_use_and_the_value_is_the_old_one():
    with pytest.warns(SpecdecDeprecationWarning) as caught:
        value = Step().num_draft_tokens
    assert value == 4
    [warning] = caught
    assert str(warning.message) == (
        "StepView.num_draft_tokens is deprecated since API 1.3 and goes in API 2.0: use StepView.width"
    )
    assert (warning.message.since, warning.message.removed_in) == ("1.3", "2.0")


def test_it_points_at_the_line_that_uses_the_name():
    with pytest.warns(SpecdecWarning) as caught:
        Step().num_draft_tokens  # noqa: B018
    assert caught[0].filename == __file__
