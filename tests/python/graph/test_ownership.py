"""Whose memory a tensor lies in: programs that may read it again on a path, in a list, a hook, a view or a backward pass."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qsim
from qsim.graph.execute import mode as execute
from qsim.graph.execute import ownership
from qsim.graph.execute.ownership import dies, is_alone

KEPT: list[object] = []


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    monkeypatch.setattr(ownership, "SMALLEST", 0)
    KEPT.clear()


class Asking(TorchFunctionMode):
    """Notes for each rectifier, and each addition in place, whether its operand dies."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not any(name in func.__name__ for name in ("relu", "add_")):
            return func(*args, **(kwargs or {}))
        ownership.call_site(ownership.sys._getframe(1))  # as a container's mode does
        return self.met(func, args, kwargs or {})

    def met(self, func, args, kwargs):
        self.found.append(dies(args, kwargs, func, ownership.sys._getframe(2)))
        return func(*args, **kwargs)


def asked(program, *args) -> list[bool]:
    x = torch.randn(4, 8)
    for _ in range(2):  # the first call learns
        with Asking() as mode:
            program(x, *args)
    return mode.found


LEAF, IN_PLACE, FC = nn.ReLU(), nn.ReLU(inplace=True), nn.Linear(8, 8)


def temporary(x):
    return LEAF(FC(x))


def variable(x):
    y = FC(x)
    return LEAF(y)


def rebound(x):
    x = FC(x)
    x = LEAF(x)
    return FC(x)


def functional(x):
    y = FC(x)
    y = F.relu(y)
    return torch.relu(FC(y))


def keywords(x):
    y = FC(x)
    return F.relu(y, inplace=False)


def overwriting(x):
    y = FC(x)
    return IN_PLACE(y)


def of_an_operator(x):
    return LEAF(FC(x) + x)


def loop(x):
    for _ in range(2):
        x = FC(x)
        x = LEAF(x)
    return x


def method(x):
    y, z = FC(x), x * 2
    y = y.add_(z)
    y = y.add_(z, alpha=2)
    return y.relu_()


def method_of_a_temporary(x):
    return FC(x).add_(x).relu_()


def method_of_a_class(x):
    y = FC(x)
    return torch.Tensor.add_(y, x)


DYING = [
    temporary,
    variable,
    rebound,
    functional,
    keywords,
    overwriting,
    of_an_operator,
    loop,
    method,
    method_of_a_temporary,
    method_of_a_class,
]


@pytest.mark.parametrize("program", DYING)
@pytest.mark.parametrize("grad", [False, True])
def test_what_nobody_reads_again_dies(program, grad):
    with torch.set_grad_enabled(grad):
        found = asked(program)
    assert found
    assert all(found)


def test_sequences_give_everything_away(monkeypatch):
    x = torch.randn(4, 8)
    sim = qsim.QuantSim(nn.Sequential(FC, LEAF, FC, IN_PLACE).eval(), x)
    sim.calibrate([x], progress=False)
    found = []
    monkeypatch.setattr(execute, "dies", lambda *args: found.append(dies(*args)) or found[-1])
    for _ in range(3):
        sim(x)
    assert found[-4:] == [True, True, True, True]


def read_on_another_path(x, flag=False):
    y = FC(x)
    z = LEAF(y)
    return (z, y) if flag else z


def read_in_a_loop(x, flag=False):
    y = FC(x)
    for _ in range(1):
        z = LEAF(y)
        if flag:
            z = z + y
    return z


def in_a_list(x):
    y = FC(x)
    outputs = [y]
    z = LEAF(y)
    return z, outputs


def in_a_global_list(x):
    y = FC(x)
    KEPT.append(y)
    return LEAF(y)


def in_an_object(x):
    holder = nn.Module()
    y = FC(x)
    holder.last = y
    z = LEAF(y)
    return z, holder


def in_a_closure(x):
    y = FC(x)
    later = lambda: y  # noqa: E731
    return LEAF(y), later


class Holding:
    """Whose operator keeps what it returns."""

    def __add__(self, other):
        self.kept = FC(other)
        return self.kept


def in_an_operators_object(x):
    holding = Holding()
    return LEAF(holding + x), holding


def two_names(x):
    y = FC(x)
    w = y
    z = LEAF(y)
    return z, w


def two_names_that_nothing_reads(x):
    y = FC(x)
    w = y  # noqa: F841
    return LEAF(y)


def a_view(x):
    y = FC(x)
    row = y[0]
    z = LEAF(y)
    return z, row


def of_a_view(x):
    y = FC(x)
    return LEAF(y[:2]), y


def detached(x):
    y = FC(x)
    KEPT.append(y.detach())
    return LEAF(y)


def as_an_array(x):
    y = FC(x)
    KEPT.append(y.detach().numpy())
    return LEAF(y)


def read_by_a_handler(x):
    y = FC(x)
    try:
        return LEAF(y)
    except RuntimeError:
        return y


def locals_are_read(x):
    y = FC(x)
    z = LEAF(y)
    return z, locals()


def the_callers(x):
    return LEAF(x)


def through_a_helper(x):
    def helper(y):
        return LEAF(y)

    y = FC(x)
    z = helper(y)
    return z, y


def unpacked(x):
    y = (FC(x),)
    return LEAF(*y), y


def method_of_what_is_read(x, flag=False):
    y, z = FC(x), x * 2
    w = y.add_(z)  # z is not read again, y may be
    return y if flag else w


def method_with_a_keyword(x, flag=False):
    y, z = FC(x), x * 2
    w = y.add_(z, alpha=2)
    return y if flag else w


def method_of_a_class_and_what_is_read(x, flag=False):
    y, z = FC(x), x * 2
    w = torch.Tensor.add_(y, z)
    return y if flag else w


def bound_before(x, flag=False):
    y, z = FC(x), x * 2
    add = y.add_
    w = add(z)
    return y if flag else w


HELD = [
    read_on_another_path,
    read_in_a_loop,
    in_a_list,
    in_a_global_list,
    in_an_object,
    in_a_closure,
    in_an_operators_object,
    two_names,
    two_names_that_nothing_reads,
    a_view,
    of_a_view,
    detached,
    as_an_array,
    read_by_a_handler,
    locals_are_read,
    the_callers,
    through_a_helper,
    unpacked,
    method_of_what_is_read,
    method_with_a_keyword,
    method_of_a_class_and_what_is_read,
    bound_before,
]


@pytest.mark.parametrize("program", HELD)
@pytest.mark.parametrize("grad", [False, True])
def test_what_somebody_may_read_again_does_not(program, grad):
    with torch.set_grad_enabled(grad):
        found = asked(program)
    assert found
    assert not any(found)


def test_what_a_backward_pass_keeps_does_not():
    def program(x):
        y = torch.sigmoid(FC(x))  # its backward pass reads its result
        return LEAF(y)

    assert asked(program) == [False]
    with torch.no_grad():
        assert asked(program) == [True]

    def saved(x):
        y = FC(x)
        KEPT.append((y * y).sum())
        return LEAF(y)

    assert asked(saved) == [False]


def test_what_a_hook_of_the_leaf_sees_does_not():
    leaf = nn.ReLU()
    model = Forward(lambda m, x: m.leaf(m.fc(x)), fc=FC, leaf=leaf)
    assert asked(model) == [True]
    handle = leaf.register_forward_hook(lambda m, args, out: KEPT.append(args[0].clone()))
    assert asked(model) == [False]
    handle.remove()
    assert asked(model) == [True]


def test_results_that_are_kept_elsewhere_are_not_alone():
    y = torch.randn(4, 8)
    assert is_alone(y)
    view = y.view(-1)
    assert not is_alone(y)
    assert not is_alone(view)
    del view
    array = y.numpy()
    assert not is_alone(y)
    del array
    reference = weakref.ref(y)  # no reference that counts
    assert is_alone(y)
    assert reference() is y
    x = torch.randn(4, 8, requires_grad=True)
    assert not is_alone(x.exp())
    assert is_alone(x * 2)
    assert not is_alone(Tensor._make_subclass(nn.Parameter, torch.randn(3)))
