"""Of many batches some run in half precision: those that matter, and the doctor says how many."""

import pytest
import torch
from torch import nn

import qsim


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


def batches(*, large=15):
    torch.manual_seed(0)
    found = [torch.randn(4, 16) for _ in range(20)]
    found[large] += 20_000.0
    return found


def true_level(given):
    """Of the worst batch, in float16."""
    model = Centred()
    levels = []
    for x in given:
        exact, found = model(x), model(x.half()).float()
        levels.append(float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum())))
    return min(levels)


@pytest.mark.parametrize("large", [1, 15, 19])
def test_the_batch_with_large_numbers_counts_wherever_it_is(large):
    diagnosis = qsim.doctor(Centred(), batches(large=large), target="tensorrt-fp16", progress=False)
    assert true_level(batches(large=large)) < 20
    assert diagnosis.sqnr < 35
    assert not diagnosis.healthy
    assert diagnosis.batches == 20
    (note,) = [note for note in diagnosis.notes if note.startswith("ran in half precision on")]
    assert "8 of 20 batches" in note
    assert note in str(diagnosis)


def test_nothing_is_said_where_all_did():
    diagnosis = qsim.doctor(Centred(), batches()[:8], target="tensorrt-fp16", progress=False)
    assert not [note for note in diagnosis.notes if "half precision on" in note]


def test_overflows_are_counted_beside_the_elements_of_the_same_batches():
    class Squares(nn.Module):
        def forward(self, x):
            return x * x

    sizes = (4, 4, 1)
    diagnosis = qsim.doctor(Squares(), [torch.full((n, 8), 300.0) for n in sizes], target="tensorrt-fp16", progress=False)
    (finding,) = [finding for finding in diagnosis.findings if finding.code == "QS010"]
    assert finding.evidence["overflowed"] == finding.evidence["elements"] == 8 * sum(sizes)
