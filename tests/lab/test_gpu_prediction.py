"""The model of a step on a GPU: its floor is arithmetic, and each part follows from what it is said to follow from."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import prediction
from benchmarks.gpu.prediction import BATCH_SIZES, ENGINES, VLLM, Device, Engine, Model, floor, step_parts

DEVICE, MODEL = Device(), Model()


def test_the_model_is_as_large_as_llama():
    assert MODEL.weights + MODEL.vocab * MODEL.hidden == pytest.approx(8.03e9, rel=1e-3)
    assert MODEL.kv_bytes == 131_072


@pytest.mark.parametrize(("batch", "expected"), [(1, 284), (8, 2139), (64, 11_661)])
def test_the_floor_is_that_of_the_second_reading(batch, expected):
    assert floor(DEVICE, MODEL, batch) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("batch", "expected"), [(1, 212), (8, 1600), (64, 9100)])
def test_the_estimate_for_vllm_is_that_of_the_second_reading(batch, expected):
    assert prediction.tokens_per_second(DEVICE, MODEL, VLLM, batch) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("engine", [*ENGINES, VLLM], ids=lambda each: each.name)
@pytest.mark.parametrize("batch", BATCH_SIZES)
def test_nobody_is_faster_than_the_floor(batch, engine):
    assert prediction.tokens_per_second(DEVICE, MODEL, engine, batch) < floor(DEVICE, MODEL, batch)


def test_how_long_a_text_may_become_costs_a_full_batch_nothing():
    short, long = (step_parts(DEVICE, MODEL, ENGINES[0], 64, max_model_len=length) for length in (4096, 131_072))
    assert short == long
    assert long["idle programs"] == 0


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"bytes_per_second": 1e12}, "keys and values"),
        ({"small_kernel": 9e-6}, "small kernels"),
        ({"idle_program": 9e-6}, "idle programs"),
    ],
)
def test_a_slower_device_makes_the_part_longer_that_depends_on_it(changed, part):
    before, after = (step_parts(device, MODEL, ENGINES[0], 1) for device in (DEVICE, replace(DEVICE, **changed)))
    assert after[part] > before[part]
    assert after["host"] == before["host"]


def test_everything_assumed_is_printed_before_what_follows_from_it():
    page = list(prediction.lines(DEVICE, MODEL))
    assumed = "\n".join(page[: 3 + len(ENGINES) + 1])
    for kind in (Device, Model, Engine):
        assert all(f"{field.name}=" in assumed for field in fields(kind))
    assert sum(line.startswith("batch ") for line in page) == len(BATCH_SIZES)
