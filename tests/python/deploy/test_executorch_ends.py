"""Models that end in what only moves values, or joins some of one grid, as programs for ExecuTorch; skipped where it is not installed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim
from qsim.deploy.tracing import Tracing
from qsim.executorch import session
from qsim.executorch.quantized_graph import quantized_graph
from qsim.operations.moves import JOINING, MOVING
from qsim.trace.runtimes import RUNTIMES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


_UP = {"scale_factor": 2.0}
_ROWS = torch.tensor([0, 0, 1])
# One end for each operation that only moves values, or joins some of one grid: of a tensor of shape (1, 4, 4, 4).
ENDS = {
    **{
        n: (lambda x, n=n: getattr(x, n)())
        for n in ["clone", "contiguous", "detach", "positive", "resolve_conj", "resolve_neg", "ravel", "squeeze", "flatten"]
    },
    **{n: (lambda x, n=n: getattr(x[0, 0], n)()) for n in ["t", "adjoint", "fliplr", "flipud", "rot90"]},
    **{n: (lambda x, n=n: getattr(torch, n)(x[0, 0, 0])) for n in ["atleast_1d", "atleast_2d", "atleast_3d"]},
    **{n: (lambda x, n=n: getattr(F, n)(x, 2)) for n in ["max_pool2d", "adaptive_max_pool2d", "pixel_shuffle", "pixel_unshuffle"]},
    **{n: (lambda x, n=n: getattr(F, n)(x[0], 2)) for n in ["max_pool1d", "adaptive_max_pool1d"]},
    **{n: (lambda x, n=n: getattr(F, n)(x, 2)) for n in ["max_pool3d", "adaptive_max_pool3d"]},
    **{n: (lambda x, n=n: getattr(torch, n)(x, 2, 1)) for n in ["split", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"]},
    **{n: (lambda x, n=n: getattr(torch, n)(x, [1, 3], 1)) for n in ["split_with_sizes", "unsafe_split_with_sizes"]},
    **{n: (lambda x, n=n: getattr(torch, n)(x, 2)) for n in ["hsplit", "dsplit", "repeat_interleave", "roll"]},
    **{n: (lambda x, n=n: getattr(torch, n)(x, 1, 2)) for n in ["transpose", "movedim", "moveaxis", "swapaxes", "swapdims"]},
    **{n: (lambda x, n=n: getattr(x, n)(1, 64)) for n in ["view", "reshape"]},
    **{n: (lambda x, n=n: getattr(x, n)(x.new_zeros(1, 64))) for n in ["view_as", "reshape_as"]},
    **{n: (lambda x, n=n: getattr(x, n)(2, 4, 4, 4)) for n in ["expand", "broadcast_to"]},
    **{n: (lambda x, n=n: getattr(x, n)(1, 2, 1, 1)) for n in ["repeat", "tile"]},
    **{n: (lambda x, n=n: F.dropout(x, 0.5, training=False)) for n in ("dropout", "feature_dropout")},
    **{n: (lambda x, n=n: getattr(torch, n)([x, x.flip(1)], 1)) for n in ["cat", "concat", "concatenate", "stack"]},
    **{f"reflection_pad{k}d": (lambda x, k=k: F.pad(x[0] if k == 1 else x, [1, 1] * k, mode="reflect")) for k in (1, 2, 3)},
    **{f"replication_pad{k}d": (lambda x, k=k: F.pad(x[0] if k == 1 else x, [1, 1] * k, mode="replicate")) for k in (1, 2, 3)},
    **{f"upsample_nearest{k}d": (lambda x, k=k: F.interpolate(x[0] if k == 1 else x[None] if k == 3 else x, **_UP)) for k in (1, 2, 3)},
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "mT": lambda x: x.mT,
    "numpy_T": lambda x: x[0, 0].T,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand_as": lambda x: x.expand_as(x.new_zeros(2, 4, 4, 4)),
    "slice": lambda x: x[:, 1:3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "flip": lambda x: x.flip(1),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "vsplit": lambda x: x[0].vsplit(2),
    "unbind": lambda x: x.unbind(1),
    "select": lambda x: x.select(1, 2),
    "getitem": lambda x: x.split(2, 1)[1],
    "index": lambda x: x[:, _ROWS],
    "index_select": lambda x: x.index_select(1, _ROWS),
    "gather": lambda x: x.gather(1, torch.zeros(1, 2, 4, 4, dtype=torch.long)),
    "take_along_dim": lambda x: x.take_along_dim(torch.zeros(1, 2, 4, 4, dtype=torch.long), 1),
    "take": lambda x: x.take(_ROWS),
    "unfold": lambda x: x.unfold(2, 2, 2),
    "im2col": lambda x: F.unfold(x, 2),
}
# What torch's tracing alone makes of others: it is in no forward.
_OF_TRACING = {"alias", "lift_fresh_copy", "_unsafe_view"}
# ExecuTorch has no kernel for them, or cannot load the program.
_REFUSED = {"adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool3d", "unfold", "im2col"}


class Ends(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.conv, self.names = nn.Conv2d(3, 4, 3, padding=1), names

    def forward(self, x):
        x = self.conv(x)
        return {name: ENDS[name](x) for name in self.names}


def ending_in(names):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 4, 4)
    sim = qsim.QuantSim(Ends(names).eval(), x, qsim.int8(target="executorch"))
    sim.calibrate([x], progress=False)
    return sim, x


def leaves(results):
    return torch.utils._pytree.tree_leaves(results)


def test_every_operation_is_an_end():
    assert set(ENDS) == (MOVING | JOINING) - _OF_TRACING


@pytest.mark.parametrize("target", ["executorch", "onnxruntime"])
def test_the_signature_calls_results_as_the_graph_does(target):
    sim, x = ending_in(list(ENDS))
    traced = Tracing(sim, RUNTIMES[target])
    for program in (traced.program, traced.plain):
        exported = program.copied().exported
        assert [spec.arg.name for spec in exported.graph_signature.output_specs] == [n.name for n in exported.graph.output_node().args[0]]
    if target == "executorch":
        module = quantized_graph(traced.program.copied(), traced.written()).module
        with torch.no_grad():
            assert all(map(torch.equal, leaves(module(x)), leaves(sim(x))))


@pytest.mark.skipif(not session.is_installed(), reason='ExecuTorch is not installed: pip install "qsim[executorch]"')
def test_a_program_returns_what_the_simulation_does(tmp_path):
    sim, x = ending_in([name for name in ENDS if name not in _REFUSED])
    sim.export(tmp_path / "model.pte")
    got = session.ExecutorchSession(tmp_path / "model.pte").run(None, {"x": x.numpy()})
    with torch.no_grad():
        for mine, other in zip(leaves(sim(x)), got, strict=True):
            assert torch.equal(mine, torch.from_numpy(other))
