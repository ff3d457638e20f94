"""What the oracles of `tests/fuzz/programs` say of programs that are written by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.programs.examine import examine
from tests.fuzz.programs.ir import Apply, Container, Helper, Invoke, Member, Program, Run


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
