"""Tensors on their way into a network: each is taken once; what is missing, misshapen or left over is said by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.sdk import ConfigError
from specdec.sdk.model_proposer import Weights, load_module


def tensors():
    return {
        "fc.weight": torch.arange(6.0).reshape(2, 3),
        "fc.bias": torch.tensor([7.0, 8.0]),
        "norm.weight": torch.ones(2),
    }


def weights(**more):
    return Weights(tensors() | more, "the checkpoint")


def refused(action):
    with pytest.raises(ConfigError) as caught:
        action()
    assert "the checkpoint" in str(caught.value), "the error names where the tensors are from"
    return caught.value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(2))


def test_a_tensor_is_taken_once():
    held = weights()
    assert held.take("fc.weight", 2, 3).shape == (2, 3)
    assert "fc.weight" not in held
    assert refused(lambda: held.take("fc.weight", 2, 3)).code == "SD-E172"


@pytest.mark.parametrize("shape", [(2, 3), (-1, 3), (2, -1), (-1, -1)])
def test_any_size_fits_minus_one(shape):
    assert weights().take("fc.weight", *shape).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (-1, 2), (6,), (2, 3, 1)])
def test_another_shape_is_refused_with_both(shape):
    error = refused(lambda: weights().take("fc.weight", *shape))
    assert error.code == "SD-E175"
    assert error.facts["fc.weight"] == f"expected {list(shape)}, found [2, 3]"


def test_a_missing_tensor_is_named_with_what_there_is():
    error = refused(lambda: weights().take("lm_head.weight", 5, 2))
    assert error.code == "SD-E172"
    assert error.facts["tensor"] == "lm_head.weight [5, 2]"
    assert error.facts["has"] == "fc.bias, fc.weight, norm.weight"


def test_what_may_be_left_out_must_fit_if_it_is_there():
    assert weights().take_if_there("lm_head.weight", 5, 2) is None
    assert refused(lambda: weights().take_if_there("fc.bias", 3)).code == "SD-E175"


def test_names_are_replaced_at_their_beginning_only():
    held = Weights({"model.fc.weight": torch.ones(1), "other.model.fc": torch.ones(1)}, "the checkpoint")
    held.rename("model.", "")
    assert "fc.weight" in held
    assert "other.model.fc" in held


def test_a_tensor_under_two_names_is_an_error():
    held = Weights({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}, "the checkpoint")
    error = refused(lambda: held.rename("model.", ""))
    assert error.code == "SD-E174"
    assert error.facts["tensor"] == "fc.weight, also as model.fc.weight"


def test_dropped_tensors_are_not_reported():
    held = weights(t2d=torch.ones(3), **{"verifier_norm.weight": torch.ones(2)})
    held.drop("t2d", "verifier_*")
    held.fill(Net())
    held.finish()


def test_a_module_is_filled_with_the_tensors_of_its_names():
    net, held = Net(), weights()
    held.fill(net)
    held.finish()
    for name, value in net.state_dict().items():
        assert torch.equal(value, tensors()[name]), name


def test_a_prefix_is_looked_below():
    net = Net()
    held = Weights({f"layers.0.{name}": value for name, value in tensors().items()}, "the checkpoint")
    held.fill(net, "layers.0.")
    held.finish()
    assert net.fc.bias.tolist() == [7, 8]


def test_every_missing_tensor_is_listed_and_nothing_is_filled():
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    held = Weights({"fc.weight": torch.ones(2, 3)}, "the checkpoint")
    error = refused(lambda: held.fill(net))
    assert error.code == "SD-E172"
    assert error.facts["tensors"] == "fc.bias [2], norm.weight [2]"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_every_misshapen_tensor_is_listed_and_nothing_is_filled():
    net = Net()
    before = net.norm.weight.clone()
    error = refused(lambda: weights(**{"fc.weight": torch.ones(2, 4), "fc.bias": torch.ones(3)}).fill(net))
    assert error.code == "SD-E175"
    assert error.facts["fc.weight"] == "expected [2, 3], found [2, 4]"
    assert error.facts["fc.bias"] == "expected [2], found [3]"
    assert torch.equal(net.norm.weight, before)


def test_values_are_cast_to_the_modules_dtype():
    net = Net().to(torch.bfloat16)
    weights().fill(net)
    assert net.fc.weight.dtype == torch.bfloat16
    assert net.fc.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_that_nobody_took_is_an_error_with_its_name():
    held = weights(**{"markov.weight": torch.ones(2)})
    held.fill(Net())
    error = refused(held.finish)
    assert error.code == "SD-E174"
    assert error.facts["tensors"] == "markov.weight"


def test_long_lists_are_cut_with_their_number():
    held = Weights({f"layer{index:02}": torch.ones(1) for index in range(20)}, "the checkpoint")
    assert refused(held.finish).facts["tensors"].endswith("layer11, and 8 more")


def test_the_mapping_that_was_given_is_left_as_it_was():
    given = tensors()
    held = Weights(given, "the checkpoint")
    held.rename("fc.", "x.")
    held.take("x.bias", 2)
    assert list(given) == list(tensors())


@pytest.mark.parametrize(
    ("change", "code"),
    [({}, None), ({"more": torch.ones(1)}, "SD-E174"), ({"fc.bias": torch.ones(9)}, "SD-E175")],
    ids=["exactly", "one-more", "misshapen"],
)
def test_a_module_is_loaded_from_exactly_its_tensors(change, code):
    net = Net()
    if code is None:
        load_module(net, tensors(), "the checkpoint")
        assert net.fc.bias.tolist() == [7, 8]
    else:
        assert refused(lambda: load_module(net, tensors() | change, "the checkpoint")).code == code
