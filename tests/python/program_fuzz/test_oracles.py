"""What the oracles of `tests/fuzz/programs` say of programs that are written by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.programs.examine import examine
from tests.fuzz.programs.ir import Apply, Branch, Container, Helper, Invoke, Member, Program, Run
from tests.fuzz.programs.ir import Test as Question

import qsim


def writing_after(checkpoint, operation):
    """A program that writes into what it gave to a checkpoint, which a quantizer there makes torch compute again."""
    sums = Helper("helper0", "function", ("u", "v"), (Apply(1, "y0", "add", ("u", "v")),), "y0")
    block = (
        Apply(2, "y1", "add", ("z", "z")),
        Invoke(3, "y2", "helper0", ("x", "y1"), checkpoint),
        Apply(4, "y3", operation, ("y1",)),
    )
    model = Container("Model", ("x", "z"), (), (), (), block, "y2")
    return Program(1, "rows", False, (model,), (sums,), "plain", "tuple", "", "", (), ())


WRITTEN = {"checkpoints": "what a checkpoint took is written to, and the float model computes nothing again"}


@pytest.mark.parametrize(("operation", "unsaid"), [("add_", WRITTEN), ("relu F.relu({0})", {})])
def test_the_float_model_is_no_guide_where_it_computes_nothing_again(operation, unsaid):
    verdict = examine(writing_after("not reentrant", operation), ["checkpoints"])
    assert (verdict.failures, verdict.undecided) == ((), unsaid)


def attention_written_to(options):
    """A program that writes into what attention returned from a reentrant checkpoint."""
    attend = Run(1, "y0", "self.m0", "{m}({0}, {0}, {0}, need_weights=False)[0]", ("u",))
    step = Helper("step0", "method", ("u",), (attend,), "y0")
    block = (Invoke(2, "y1", "self.step0", ("x",), "reentrant"), Apply(3, "", "increment", ("y1", "z")))
    member = Member("m0", f"nn.MultiheadAttention(8, 2{options})")
    model = Container("Model", ("x", "z"), (), (member,), (step,), block, "y1")
    return Program(1, "seq", False, (model,), (), "plain", "tuple", "", "", (), ())


SAME = {"checkpoints": "the float model raises the same without torch's fast path of attention"}


@pytest.mark.parametrize(("options", "unsaid"), [(", batch_first=True", SAME), ("", {})])
def test_the_float_model_is_no_guide_where_only_a_fast_path_lets_it_write(options, unsaid):
    verdict = examine(attention_written_to(options), ["checkpoints"])
    assert (verdict.failures, verdict.undecided) == ((), unsaid)


def writing_where_data_decide(twice):
    """A program that writes where a sum is small, asked where an input is large: a grid's end decides in another way than float data."""
    large = "{0}.abs().amax() > 60.0"
    writes = [Apply(2, "y1", twice[0], ("y0",)), Apply(3, "y2", twice[1], ("y1",))]
    inner = Branch(4, "y3", Question("data", "y0", large), (), "y0", tuple(writes), "y2")
    block = (Apply(1, "y0", "add", ("x", "x")), Branch(5, "y4", Question("data", "z", large), (inner,), "y3", (), "y0"))
    model = Container("Model", ("x", "z"), (), (), (), block, "y4")
    return Program(1, "rows", False, (model,), (), "plain", "tuple", "", "", (), ())


DECIDED = {"savings": "the float model raises RuntimeError on the way that quantized data decide for"}


@pytest.mark.parametrize(("twice", "unsaid"), [(("relu_", "relu in place"), DECIDED), (("mul_", "mul_"), {})])
def test_the_float_model_is_asked_on_the_way_that_quantized_data_decide_for(twice, unsaid):
    verdict = examine(writing_where_data_decide(twice), ["savings"])
    assert (verdict.failures, verdict.undecided) == ((), unsaid)


def test_what_a_simulation_alone_raises_is_a_failure_on_any_way(monkeypatch):
    def raising(*args, **kwargs):
        raise RuntimeError("of the simulation alone")

    monkeypatch.setattr(qsim.QuantSim, "forward", raising)
    (failure,) = examine(writing_where_data_decide(("relu_", "relu in place")), ["savings"]).failures
    assert "of the simulation alone" in failure.detail
