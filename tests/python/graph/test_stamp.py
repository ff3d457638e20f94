"""`qsim._C.Stamp`: what it recognizes, and what it must not."""

import copy
import ctypes
import functools
import pickle
import timeit

import numpy as np
import pytest
import torch
from torch import nn

from qsim._library import Stamp


@pytest.mark.parametrize("shape", [(), (0,), (1,), (63,), (64,), (129,), (7, 1000), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int8, torch.bool])
def test_the_same_tensors_are_recognized(shape, dtype):
    tensors = torch.ones(shape, dtype=dtype), nn.Parameter(torch.ones(shape))
    stamp = Stamp(*tensors)
    assert stamp.matches(*tensors)
    assert not stamp.matches(*tensors[::-1])
    assert not stamp.matches(tensors[0])
    assert not stamp.matches(*tensors, tensors[0])
    assert not stamp.matches(tensors[0].clone(), tensors[1])


def test_nan_is_recognized_and_the_sign_of_zero_matters():
    t = torch.tensor([float("nan"), 0.0])
    stamp = Stamp(t)
    assert stamp.matches(t)
    t.data[1] = -0.0
    assert not stamp.matches(t)


def write_numpy(t):
    t.detach().numpy()[...] = 2


def write_dlpack(t):
    torch.from_dlpack(t.detach().numpy()).fill_(2)


def give_memory(t):
    t.data = torch.ones_like(t)


def take_memory(t):
    with torch.no_grad():
        t.set_(torch.ones_like(t))


def swap(t):
    torch.utils.swap_tensors(t, nn.Parameter(torch.ones_like(t)))


@pytest.mark.parametrize("size", [1, 3, 64, 1000, 100_000])
@pytest.mark.parametrize(
    "write", [lambda t: t.data.mul_(2), lambda t: t.data.fill_(2), write_numpy, write_dlpack, give_memory, take_memory, swap]
)
def test_what_is_written_or_replaced_is_noticed(write, size):
    t = nn.Parameter(torch.ones(size))
    stamp = Stamp(t)
    write(t)
    assert not stamp.matches(t)


def write_row(t):
    t.data[-1] = 3


def write_through_detached(t):
    t.detach().view(-1)[-1:].zero_()


def write_in_optimizer(t):
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=0.1).step()


def write_state(t):
    nn.ParameterList([t]).load_state_dict({"0": torch.full_like(t, 5)})


def share_and_write(t):
    t.share_memory_()
    t.data[0] = 9


def write_storage(t):
    t.untyped_storage()[0] = 7


def write_address(t):
    (ctypes.c_char * 4).from_address(t.data_ptr())[0] = b"\x07"


WRITES = [
    write_row,
    write_through_detached,
    write_in_optimizer,
    write_state,
    share_and_write,
    write_storage,
    write_address,
    write_numpy,
    write_dlpack,
]


@pytest.mark.parametrize("write", WRITES)
def test_who_asks_for_the_memory_of_a_large_parameter_is_noticed_whatever_they_write(write):
    t = nn.Parameter(torch.ones(70_000))
    before = t.detach().clone()
    stamp = Stamp(t)
    assert stamp.matches(t)
    assert t.equal(before)
    write(t)
    assert not t.equal(before)
    assert not stamp.matches(t)
    again = Stamp(t)
    assert again.matches(t)
    write_row(t)
    t.data[-1] += 1
    assert not again.matches(t)


def numpy_of_data(t):
    return t.data.numpy(), None


def tensor_of_dlpack(t):
    return torch.from_dlpack(t.detach()), None


def numpy_of_storage(t):
    held = t.untyped_storage()
    return np.ctypeslib.as_array((ctypes.c_float * t.numel()).from_address(held.data_ptr())), held


def numpy_of_frozen(t):
    t.requires_grad_(False)
    return t.numpy(), None


@pytest.mark.parametrize("look", [numpy_of_data, tensor_of_dlpack, numpy_of_storage, numpy_of_frozen])
def test_who_has_the_memory_of_a_large_parameter_already_is_noticed(look):
    t = nn.Parameter(torch.ones(70_000))
    seen, _holder = look(t)
    stamp = Stamp(t)
    assert stamp.matches(t)
    for at in (0, 12_345, 69_999):
        seen[at] = 2
        assert t[at] == 2
        assert not stamp.matches(t)
        seen[at] = 1
        assert stamp.matches(t)


def test_memory_of_others_is_written_by_them():
    theirs = np.ones(70_000, dtype=np.float32)
    t = nn.Parameter(torch.from_numpy(theirs))
    stamp = Stamp(t)
    theirs[4321] = 2
    assert not stamp.matches(t)


def test_what_has_to_be_asked_for_is_not_read():
    t, frozen = nn.Parameter(torch.ones(1 << 22)), torch.ones(1 << 22)
    t.untyped_storage().nbytes()  # Python's object of the storage stays with it
    loss = (t * 2).sum()  # its gradient's node holds the parameter
    asked, read = (min(timeit.repeat(functools.partial(Stamp(x).matches, x), number=5, repeat=5)) for x in (t, frozen))
    assert asked < read / 10
    loss.backward()
    assert torch.equal(t.grad, 2 * frozen)


def test_memory_is_its_own_again_when_the_stamp_is_gone():
    t = nn.Parameter(torch.ones(70_000))
    stamp = Stamp(t)
    del stamp
    address = t.data_ptr()
    t.data[3] = 2
    assert t.data_ptr() == address


@pytest.mark.parametrize("at", range(40))
def test_every_element_of_a_small_tensor_is_compared(at):
    t = torch.zeros(40)
    stamp = Stamp(t)
    t.data[at] = 1
    assert not stamp.matches(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [65, 1000, 70_001, (1 << 20) + 3])
def test_every_element_of_a_large_tensor_is_compared(size, dtype):
    t = torch.zeros(size, dtype=dtype)
    stamp = Stamp(t)
    for at in (0, 1, 17, size // 3, size // 2, size - 2, size - 1):
        t.data[at] = 1
        assert not stamp.matches(t)
        t.data[at] = 0
        assert stamp.matches(t)


def test_elements_that_change_places_are_noticed():
    t = torch.arange(1 << 18, dtype=torch.float32).view(256, 1024)
    stamp = Stamp(t)
    for step in (1, 2, 4, 64, 128):
        t.data[[0, step]] = t.data[[step, 0]]
        assert not stamp.matches(t)
        t.data[[0, step]] = t.data[[step, 0]]
    t.data[:, [3, 11]] = t.data[:, [11, 3]]
    assert not stamp.matches(t)


def test_what_cannot_be_read_is_never_recognized():
    class Own(torch.Tensor):
        pass

    with torch.inference_mode():
        frozen = torch.ones(3)
    others = [
        torch.ones(3).as_subclass(Own),
        frozen,
        torch.ones(1).expand(3),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        "no tensor",
    ]
    for other in others:
        assert not Stamp(other).matches(other)
        assert not Stamp(torch.ones(2), other).matches(torch.ones(2), other)


def test_it_holds_no_tensor_and_outlives_it():
    t = torch.ones(1000)
    uses = t.untyped_storage()._cdata, t._use_count()
    stamp = Stamp(t)
    assert (t.untyped_storage()._cdata, t._use_count()) == uses
    del t
    others = [torch.ones(1000) for _ in range(8)]  # one may get the memory of the first
    assert not any(stamp.matches(other) for other in others)


def test_copies_know_nothing():
    t = torch.ones(3)
    for other in (copy.deepcopy(Stamp(t)), pickle.loads(pickle.dumps(Stamp(t)))):
        assert isinstance(other, Stamp)
        assert not other.matches(t)
