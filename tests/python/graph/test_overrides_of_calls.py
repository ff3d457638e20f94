"""Overrides of layers that run several times: the name of a layer is for all of its calls."""

import pytest
import torch
import torch.nn.functional as F
from models import Calls
from torch import nn

import qsim

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """Layers that run on two levels, as in heads of detectors."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        fine = F.relu(self.stem(x))
        return self.head(F.relu(self.fc(fine))) + self.head(F.relu(self.fc(fine * 0.5)))


def bits(config, model=None):
    return {key: quantizer.spec.bits for key, quantizer in qsim.QuantSim(model or Shared(), X, config).quantizers().items()}


@pytest.mark.parametrize("pattern", ["fc", "f[c]", lambda site: "fc" in (site.name, site.layer)])
def test_the_name_of_a_layer_is_for_all_of_its_calls(pattern):
    found = bits(qsim.int8().override(pattern, bits=4))
    assert {key for key, count in found.items() if count == 4} == {"fc.weight", "fc.output", "fc_2.output"}


def test_the_name_of_a_later_call_is_for_that_call():
    found = bits(qsim.int8().override("fc_2", activation={"bits": 4}))
    assert {key for key, count in found.items() if count == 4} == {"fc_2.output"}


def test_the_first_call_alone():
    config = qsim.int8().override("fc", activation={"bits": 4}, one_call=True)
    assert {key for key, count in bits(config).items() if count == 4} == {"fc.output"}
    assert qsim.Config.from_json(config.to_json()) == config
    with pytest.raises(TypeError, match="one_call"):
        qsim.int8().override("fc", bits=4, one_call="yes")


def test_what_is_called_alike_and_is_no_layer_goes_by_its_own_name():
    found = bits(qsim.int8().override("add", bits=4), Calls(lambda x: ((x + 1) * 2 + 3) * 2))
    assert {key for key, count in found.items() if count == 4} == {"add.output"}


def test_the_last_layer_is_last_in_all_of_its_calls():
    config = qsim.int4().override(position="first", bits=8).override(position="last", bits=6)
    found = bits(config)
    assert {key for key, count in found.items() if count == 6} == {"head.weight", "head.output", "head_2.output"}
    assert {key for key, count in found.items() if count == 8} == {"input", "stem.weight", "stem.output"}


def test_a_plan_keeps_the_calls_that_it_names():
    plan = qsim.Plan(("fc",), "int8", "default")
    left = {entry.name for entry in qsim.QuantSim(Shared(), X, qsim.int8().with_plan(plan)).summary().left}
    assert "fc" in left
    assert "fc_2" not in left
