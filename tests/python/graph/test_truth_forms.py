"""Functions of torch that are written in Python hand their arguments to eager modes in a form of their own, and to Dynamo's as the model
wrote them: what is quantized of them is the same, however it is written."""

import inspect
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import qsim
from qsim.graph.execute.forms import form_of, in_form

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

G = torch.Generator().manual_seed(0)
X = torch.randn(6, 8, generator=G)
IMAGES = torch.randn(2, 8, 6, 6, generator=G)
IDS = torch.randint(10, (6,), generator=G)
OFFSETS = torch.tensor([0, 2, 4])
GRID = torch.rand(2, 4, 4, 2, generator=G) * 2 - 1


class Model(nn.Module):
    """One expression, with a weight, a bias, a table and statistics."""

    def __init__(self, run) -> None:
        super().__init__()
        self.run = run
        self.w, self.b = (nn.Parameter(torch.randn(8, generator=G)) for _ in range(2))
        self.table = nn.Parameter(torch.randn(10, 8, generator=G))
        self.register_buffer("mean", torch.randn(8, generator=G))
        self.register_buffer("var", torch.rand(8, generator=G) + 0.5)

    def forward(self, *args):
        return self.run(self, *args)


WRITTEN = {
    "layer norm": (lambda m, x: F.layer_norm(x, (8,), m.w, m.b), (X,)),
    "layer norm by keyword": (lambda m, x: F.layer_norm(input=x, weight=m.w, bias=m.b, normalized_shape=(8,)), (X,)),
    "group norm": (lambda m, x: F.group_norm(x, 2, m.w, m.b), (X,)),
    "rms norm": (lambda m, x: F.rms_norm(x, (8,), m.w), (X,)),
    "instance norm": (lambda m, x: F.instance_norm(x, m.mean, m.var, m.w, m.b, False), (IMAGES,)),
    "batch norm": (lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b), (IMAGES,)),
    "batch norm by keyword": (lambda m, x: F.batch_norm(weight=m.w, bias=m.b, input=x, running_var=m.var, running_mean=m.mean), (IMAGES,)),
    "embedding by keyword": (lambda m, i: F.embedding(weight=m.table, input=i) * 1.5, (IDS,)),
    "bags by keyword": (lambda m, i, o: F.embedding_bag(offsets=o, weight=m.table, input=i), (IDS, OFFSETS)),
    "weighted bags": (lambda m, i, o, x: F.embedding_bag(i, m.table, o, None, 2.0, False, "sum", False, x[:, 0]), (IDS, OFFSETS, X)),
    "grid sample by keyword": (lambda m, x, g: F.grid_sample(grid=g, input=x, align_corners=False), (IMAGES, GRID)),
    "tensordot by keyword": (lambda m, x: torch.tensordot(b=m.table, a=x, dims=([1], [1])), (X,)),
    "distances by keyword": (lambda m, x: torch.cdist(x2=m.table, x1=x), (X,)),
    "normalize by keyword": (lambda m, x: F.normalize(dim=0, input=x + 1) * m.w, (X,)),
    "relu by keyword": (lambda m, x: F.relu(input=x @ m.table.T) + 1, (X,)),
    "softmax by keyword": (lambda m, x: F.softmax(dim=-1, input=x * m.w) * 2, (X,)),
    "linear by keyword": (lambda m, x: F.linear(weight=m.table, input=x), (X,)),
}


@pytest.mark.parametrize("config", [qsim.int8(), qsim.fp16(), qsim.bf16()], ids=["int8", "fp16", "bf16"])
@pytest.mark.parametrize("written", WRITTEN)
def test_compiled_as_eager(written, config):
    forward, inputs = WRITTEN[written]
    sim = qsim.QuantSim(Model(forward).eval(), inputs, config)
    sim.calibrate([inputs], progress=False)
    found = torch.compile(sim.model, backend="eager", fullgraph=True)(*inputs)
    assert torch.equal(found, sim(*inputs))
    with sim.in_float():
        assert not torch.equal(found, sim(*inputs))


class Recorded(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args, kwargs or {}


FUNCTIONS = [f for f in vars(F).values() if isinstance(f, FunctionType) and form_of(f) is not None]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_form_is_that_of_eager_modes(function):
    """By position or by keyword, an eager mode is given what `in_form` makes of it."""
    names = list(inspect.signature(function).parameters)
    given = dict.fromkeys(names)
    given.update({name: torch.zeros(2) for name in names})
    for args, kwargs in [((), given), (tuple(given.values()), {}), ((given[names[0]],), dict([*given.items()][1:]))]:
        with Recorded():
            expected, named = function(*args, **kwargs)
        found, also = in_form(form_of(function), args, kwargs)
        assert len(found) == len(expected)
        assert all(a is b for a, b in zip(found, expected, strict=True))
        assert all(also[name] is value for name, value in named.items() if isinstance(value, torch.Tensor))
