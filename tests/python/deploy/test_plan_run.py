"""Plans that cure: the model with Cast is run where the plan was needed, in ONNX Runtime, beside the float model."""

import json
import shutil
import warnings

import onnx
import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.deploy.engine_plan import Plan


class LocalMean(nn.Module):
    """Means of windows as differences of running sums, which leave float16: Slices lie between them."""

    def forward(self, x: Tensor) -> Tensor:
        sums = (x * 900).cumsum(-1)
        return (sums[..., 8:] - sums[..., :-8]) / 900


class Masked(nn.Module):
    """Scores that leave float16 in front of a softmax, and a row that is masked throughout."""

    def __init__(self, way: str, lowest: float) -> None:
        super().__init__()
        self.way, self.lowest, self.last = way, lowest, nn.Linear(16, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores, masked = x @ x.transpose(-1, -2) * 1000, mask[:, None, :] == 0
        if self.way == "where":
            scores = torch.where(masked, self.lowest, scores)
        elif self.way == "masked_fill":
            scores = scores.masked_fill(masked, self.lowest)
        else:
            scores = torch.cat([scores[..., :3], scores[..., 3:]], -1).reshape(scores.shape)
        return self.last((scores / 1000).softmax(-1) @ x)


def exported(model, args, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, path, **{"dynamo": True, "verbose": False, **options})
    return path


def cured(model, batch, folder, **options):
    """The plan, and what it wrote; without it the model with Cast is seen to be wrong."""
    plan = qsim.doctor(model, [batch], target="onnxruntime-fp16", progress=False).plan
    assert plan.keep
    assert plan.irreducible
    path = exported(model, batch, folder / "model.onnx", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = plan.write(folder / "plan", path, batch)
    assert not Plan((), "float16").write(folder / "none", path).run
    with pytest.warns(UserWarning, match=r"model\.fp16\.onnx is no cure: .* NOT RIGHT"):
        without = Plan((), "float16").write(folder / "none", path, batch)
    assert not without.run.right
    return plan, written


OLD = pytest.param({"dynamo": False, "opset_version": 17}, marks=pytest.mark.filterwarnings("ignore"), id="the older exporter")


@pytest.mark.parametrize("options", [pytest.param({}, id="torch's defaults"), pytest.param({"external_data": False}, id="inline"), OLD])
def test_slices_between_running_sums(tmp_path, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), LocalMean(), nn.Linear(248, 4)).eval()
    plan, written = cured(model, (1 + torch.rand(4, 256),), tmp_path, **options)
    assert plan.keep[0].startswith("1.")
    assert written.run.right
    assert written.run.broken == 0
    assert "right: all results are finite" in str(written)
    blocked = json.loads((tmp_path / "plan" / "node_block_list.json").read_text())
    types = {node.name: node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert [types[name] for name in blocked].count("Slice") == 2
    flags = (tmp_path / "plan" / "trtexec.txt").read_text()
    assert all(f"{name}:fp32" in flags for name in blocked)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("way", ["where", "masked_fill", "cat"])
def test_a_mask_between_scores_and_softmax(tmp_path, way, lowest):
    torch.manual_seed(0)
    mask = torch.ones(2, 6)
    mask[1, 4:] = 0
    if lowest != -torch.inf:
        mask[0] = 0
    x = torch.linspace(2.5, 4, 6)[:, None] + 0.1 * torch.rand(2, 6, 16)
    _, written = cured(Masked(way, lowest).eval(), (x, mask), tmp_path)
    assert written.run.right, written.run


def test_what_cannot_be_run_is_said(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.rand(2, 8)
    path = exported(model, (x,), tmp_path / "model.onnx")
    plan = Plan(("0",), "float16")
    text = str(plan.write(tmp_path / "plan", path))
    assert "model.fp16.onnx  not run: give a batch" in text
    assert "trtexec.txt  not run: that takes TensorRT" in text
    assert str(plan.write(tmp_path / "plan", path, {"input": x, "target": x}).run).startswith("ONNX Runtime")
    with pytest.raises(ValueError, match=r"got a dict with 'image'; the model takes 'input'"):
        plan.write(tmp_path / "new", path, {"image": x})
    with pytest.raises(ValueError, match="got a batch and no model"):
        plan.write(tmp_path / "new", batch=x)
    assert not (tmp_path / "new").exists()
    wide = Plan((), "bfloat16").write(tmp_path / "wide", path, x).run  # ONNX Runtime has no kernels for it on the CPU
    assert wide.right
    assert "rounded in float32, it does not run as it is" in str(wide) or not wide.error
    nearest = torch.nn.functional.linear(x.bfloat16().float(), *(p.detach().bfloat16().float() for p in model[0].parameters()))
    error = (nearest.relu() - model(x)).square().sum() / model(x).square().sum()
    assert wide.sqnr == pytest.approx(-10 * error.log10().item(), abs=3)


def test_what_is_no_model_is_told(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(qsim.FileFormatError, match="is no ONNX model"):
        Plan(("0",), "float16").write(tmp_path / "plan", tmp_path / "model.onnx")
    assert not (tmp_path / "plan").exists()


def test_tensors_beside_the_model_come_along(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.rand(2, 64)
    (tmp_path / "model").mkdir()
    path = exported(model, (x,), tmp_path / "model" / "model.onnx")
    assert (path.parent / "model.onnx.data").exists()
    Plan(("2",), "float16").write(tmp_path / "plan", path)
    shutil.rmtree(path.parent)
    from qsim.onnx.sessions import session

    made = session(tmp_path / "plan" / "model.fp16.onnx")
    torch.testing.assert_close(torch.from_numpy(made.run(None, {"input": x.numpy()})[0]), model(x), rtol=0.01, atol=0.01)
