"""Open sizes: files that compute at other sizes than the example's, with the names that were asked for."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from exported import computed, expected
from models import Forward
from torch import Tensor, nn
from torch.export import Dim

import qsim

CONFIG = qsim.int8(target="onnxruntime")


class Segmentation(nn.Module):
    """Down and up again, with a skip connection; an output of every kind of size."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.body = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = F.silu(self.down(image))
        x = F.relu(x + F.interpolate(self.body(F.max_pool2d(x, 2)), scale_factor=2.0))
        return {"map": self.out(torch.cat([self.up(x), image], 1)), "mean": x.mean((2, 3)), "tokens": x.flatten(2).transpose(1, 2)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, tokens: Tensor, *, scale: Tensor) -> Tensor:
        q, k, v = (self.qkv(self.table(tokens)) * scale[:, None, None]).chunk(3, -1)
        return self.out(F.softmax(q @ k.mT * 0.3, -1) @ v)


def calibrated(model: nn.Module, example, *batches) -> qsim.QuantSim:
    sim = qsim.QuantSim(model.eval(), example, CONFIG)
    sim.calibrate(batches, progress=False)
    return sim


@pytest.fixture(scope="module")
def segmentation() -> qsim.QuantSim:
    torch.manual_seed(0)
    return calibrated(Segmentation(), torch.randn(1, 3, 16, 16), torch.randn(8, 3, 16, 16))


def sizes(path) -> dict[str, list[str | int]]:
    ends = [*(graph := onnx.load(path).graph).input, *graph.output]
    return {end.name: [d.dim_param or d.dim_value for d in end.type.tensor_type.shape.dim] for end in ends}


def test_images_of_other_sizes(segmentation, tmp_path):
    path, q, r = tmp_path / "model.onnx", Dim("q", min=1, max=64), Dim("r", min=1, max=64)
    batches = [torch.randn(4, 3, 32, 8), torch.randn(1, 3, 4, 64), torch.randn(3, 3, 16, 16)]
    report = segmentation.export(path, dynamic_shapes={"image": {0: Dim("n"), 2: 4 * q, 3: 4 * r}}, verify=batches)
    for ways in (("simulation", "not optimised"), ("on integers", "optimised")):
        found = report.verification.differences[ways]
        assert sum(d.mismatching for d in found.values()) == 0
        assert sum(d.elements for d in found.values()) > 10_000
    assert sizes(path) == {
        "image": ["n", 3, "4*q", "4*r"],
        "map": ["n", 4, "4*q", "4*r"],
        "mean": ["n", 8],
        "tokens": ["n", "4*q*r", 8],
    }
    assert not report.lint
    assert not any("fixed" in note for note in report.notes)


def test_sequences_of_other_lengths_with_keywords(tmp_path):
    torch.manual_seed(0)
    path, batch = tmp_path / "model.onnx", Dim("batch")
    example = {"scale": torch.rand(2), "tokens": torch.randint(20, (2, 7))}
    sim = calibrated(Attention(), example, example)
    sim.export(path, dynamic_shapes={"tokens": {0: batch, 1: Dim("length")}, "scale": (batch,)}, output_names=["y"])
    assert sizes(path) == {"scale": ["batch"], "tokens": ["batch", "length"], "y": ["batch", "length", 5]}
    for n, length in ((1, 3), (5, 31)):
        scale, tokens = torch.rand(n), torch.randint(20, (n, length))
        with torch.no_grad():
            wanted = sim(tokens, scale=scale)
        torch.testing.assert_close(torch.from_numpy(computed(path, scale, tokens)[0]), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shapes", [({0: Dim.AUTO, 1: Dim.AUTO},), ({0: Dim("n"), 1: Dim.DYNAMIC},)], ids=["hints", "a Dim and a hint"])
def test_sizes_without_a_name_have_that_of_the_input(shapes, tmp_path):
    path = tmp_path / "model.onnx"
    sim = calibrated(Forward(lambda self, x: x.cumsum(1) * 0.5), torch.randn(1, 6), torch.randn(8, 6))
    sim.export(path, dynamic_shapes={"args": shapes})
    assert sizes(path)["args_0"] == ["batch" if shapes[0][0] is Dim.AUTO else "n", "args_0_1"]
    x = torch.randn(7, 3)
    torch.testing.assert_close(torch.from_numpy(computed(path, x)[0]), torch.from_numpy(expected(sim, x)[0]))


def test_a_hint_that_forward_fixes_is_told(tmp_path):
    path = tmp_path / "model.onnx"
    sim = calibrated(nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6), torch.randn(8, 6))
    report = sim.export(path, dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert "fixed, because forward makes numbers of them: axis 1 of 'input'" in report.notes
    assert sizes(path)["input"] == ["batch", 6]
    assert sizes(path)["output"] == ["batch", 4]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"picture": {0: Dim("n")}}, r"its top-level keys must be the arg names \['image'\]"),
        ({"image": {1: Dim("channels")}}, r"Constraints violated \(channels\)"),
        ({"image": "x"}, r"Unexpected input tensor shape x"),
    ],
    ids=["name", "size that forward fixes", "no sizes"],
)
def test_what_torch_refuses_is_told_in_its_words(shapes, message, segmentation, tmp_path):
    with pytest.raises(qsim.CaptureError, match=f"cannot trace Segmentation with these dynamic_shapes: .*{message}"):
        segmentation.export(tmp_path / "model.onnx", dynamic_shapes=shapes)
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_and_open_sizes_contradict(segmentation, tmp_path):
    with pytest.raises(ValueError, match="got dynamic_batch=False and dynamic_shapes="):
        segmentation.export(tmp_path / "model.onnx", dynamic_batch=False, dynamic_shapes=({0: Dim("n")},))


@pytest.mark.parametrize("shapes", [{}, (), []])
def test_empty_sizes_leave_nothing_open(shapes, tmp_path):
    sim = calibrated(nn.Linear(6, 4), torch.randn(2, 6), torch.randn(8, 6))
    sim.export(tmp_path / "model.onnx", dynamic_shapes=shapes)
    assert sizes(tmp_path / "model.onnx") == {"input": [2, 6], "output": [2, 4]}


def test_sizes_of_another_type_are_refused(tmp_path):
    sim, x = calibrated(nn.Linear(6, 4), torch.randn(2, 6), torch.randn(8, 6)), torch.randn(2, 6)
    shapes = torch.export.ShapesCollection()
    shapes[x] = {0: Dim("n")}
    for wrong in (shapes, 5):
        with pytest.raises(qsim.CaptureError):
            sim.export(tmp_path / "model.onnx", dynamic_shapes=wrong)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        return self.fc(x) * options["by"]


@pytest.mark.parametrize("shapes", [None, {"x": {0: Dim("batch")}, "by": {0: Dim("batch")}}])
def test_the_batch_of_keywords_that_forward_does_not_name_is_open(shapes, tmp_path):
    path, example = tmp_path / "model.onnx", {"x": torch.randn(2, 6), "by": torch.randn(2, 4)}
    sim = calibrated(Keywords(), example, example)
    report = sim.export(path, dynamic_shapes=shapes, verify=[{"x": torch.randn(5, 6), "by": torch.randn(5, 4)}])
    assert sizes(path) == {"x": ["batch", 6], "by": ["batch", 4], "output": ["batch", 4]}
    assert not [note for note in report.notes if "fixed" in note]
    assert "forward" not in vars(sim.model)
