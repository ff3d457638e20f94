"""Errors of calls that do not fit, and that what is decorated so stays what it is to who looks at it."""

import doctest
import inspect
import pickle

import pytest

import qsim
from qsim.call_fit import tells_arguments
from qsim.quantsim import ranges


@tells_arguments("f", "Ask.")
def several(a, /, b, *rest, c, d=None, **others):
    return a, b, rest, c, d, others


@tells_arguments()
def few(first, second=None):
    return first, second


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: several(), "f: got no 'a' and no 'b' and no 'c'; expected f(a, b, *rest, c, d=None, **others)"),
        (lambda: several(1, 2), "f: got no 'c'; expected f(a, b, *rest, c, d=None, **others)"),
        (lambda: several(1, 2, b=2, c=3), "f: got an argument twice; expected f(a, b, *rest, c, d=None, **others)"),
        (lambda: few(1, 2, 3), "few: got 3 arguments by position; expected few(first, second=None)"),
        (lambda: few(1, secand=2), "few: got the argument 'secand'; expected few(first, second=None); close to it: 'second'"),
        (lambda: few(1, other=2), "few: got the argument 'other'; expected few(first, second=None)"),
    ],
    ids=["nothing", "keyword", "twice", "positions", "close", "unknown"],
)
def test_what_does_not_fit(call, says):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == says


def test_what_fits_is_called():
    assert several(1, 2, 3, c=4, e=5) == (1, 2, (3,), 4, None, {"e": 5})
    assert few(1) == (1, None)


def test_it_is_seen_as_what_it_is():
    """Sphinx and editors ask for signatures, doctest for functions of a module, pickle for a name."""
    assert list(inspect.signature(qsim.QuantSim).parameters) == ["model", "example_inputs", "config", "inplace"]
    assert list(inspect.signature(qsim.QuantSim.calibrate).parameters)[:3] == ["self", "data", "forward"]
    found = {test.name for test in doctest.DocTestFinder().find(ranges) if test.examples}
    assert {"qsim.quantsim.ranges.RangeChoice.calibrate", "qsim.quantsim.ranges.RangeChoice.set_method"} <= found
    assert pickle.loads(pickle.dumps(qsim.int8)) is qsim.int8
    assert pickle.loads(pickle.dumps(qsim.TensorSpec(bits=4))) == qsim.TensorSpec(bits=4)
