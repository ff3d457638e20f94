"""Batches that `calibrate` takes: as data loaders give them, and which arguments of the model they fill."""

from collections import OrderedDict

import pytest
import torch
from same_ranges import ROWS, assert_same_ranges, simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize(
    "batch",
    [
        ROWS,
        (ROWS, torch.zeros(32)),
        [ROWS, torch.zeros(32), "more"],
        {"x": ROWS, "label": 3},
        OrderedDict(x=ROWS),
        ((ROWS,), torch.zeros(32)),
        ({"x": ROWS}, torch.zeros(32)),
    ],
    ids=["tensor", "tuple", "list", "dict", "mapping", "nested", "nested dict"],
)
def test_batches_as_loaders_give_them(batch):
    keywords = isinstance(batch, dict) or isinstance(batch[0], dict)
    sim = simulated(example={"x": ROWS} if keywords else ROWS)
    expected = simulated(example={"x": ROWS} if keywords else ROWS)
    sim.calibrate([batch], progress=False)
    expected.calibrate([ROWS], progress=False)
    assert_same_ranges(sim, expected)


def test_data_loaders_and_generators():
    loader = DataLoader(TensorDataset(ROWS, torch.zeros(32)), batch_size=5)
    sim, other = simulated(), simulated()
    report = sim.calibrate(loader)
    assert (report.batches, report.counts["input"].elements) == (7, ROWS.numel())
    other.calibrate((batch for batch in loader), progress=False)
    assert_same_ranges(sim, other)


def test_forward_takes_what_does_not_fit():
    sim, expected = simulated(), simulated()
    sim.calibrate([{"rows": ROWS}], forward=lambda model, batch: model(batch["rows"]), progress=False)
    expected.calibrate([ROWS], progress=False)
    assert_same_ranges(sim, expected)


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


@pytest.mark.parametrize(("extra", "told"), [("mask", True), ("labels", False), ("number of the row", False)])
def test_arguments_that_no_example_had_are_told(extra, told, recwarn):
    sim = simulated(Masked(6, 4), example={"x": ROWS})
    sim.calibrate([{"x": ROWS, extra: torch.zeros(6)}] * 2, progress=False)
    left_out = [
        str(w.message)
        for w in recwarn
        if "'mask', which forward takes and no example with the rest of them had: left out" in str(w.message)
    ]
    assert len(left_out) == told
    assert any("'mask'" in note for note in sim.summary().notes) == told
    both = simulated(Masked(6, 4), example={"x": ROWS, "mask": torch.ones(6)})
    both.calibrate([{"x": ROWS, "mask": torch.zeros(6)}], progress=False)
    assert not any("left out" in str(w.message) for w in recwarn.list[told:])


@pytest.mark.parametrize(
    ("example", "batch", "message"),
    [
        (ROWS, {"x": ROWS}, "a dict with 'x'"),
        ({"x": ROWS}, {"y": ROWS}, "a dict without 'x'"),
        ((ROWS,), (), "0 values"),
    ],
)
def test_batches_that_do_not_fit_say_so(example, batch, message):
    with pytest.raises(ValueError, match=f"{message}.*forward="):
        simulated(example=example).calibrate([batch], progress=False)


@pytest.mark.parametrize("data", [ROWS, {"x": ROWS}, "rows", 3])
def test_data_must_be_batches(data):
    with pytest.raises(TypeError, match="expected an iterable of batches"):
        simulated().calibrate(data, progress=False)
