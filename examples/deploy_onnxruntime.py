"""Train a CNN on scikit-learn's digits and take it to ONNX Runtime in int8: calibrate, evaluate on integers, export, verify, measure.

    python examples/deploy_onnxruntime.py [--output FOLDER]

Twice: as the target has it, with uint8 activations and int8 weights, and with int8 activations. Both are exact on every CPU; on x86, ONNX
Runtime has fast kernels for the first alone. Prints how many integers of ONNX Runtime differ from the simulation's, the accuracy in float,
simulated, simulated on integers and in ONNX Runtime, the latency of the models on one thread, and the sizes of the files. Writes
float.onnx, uint8.onnx and int8.onnx.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from digits import accuracy, loaders, train
from torch import Tensor, nn

import qsim

_DEFAULT = qsim.int8(target="onnxruntime")
CONFIGS = {"uint8": _DEFAULT, "int8": _DEFAULT.override("*", activation={"signed": True})}


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Network(nn.Module):
    """Convolutions, a residual addition, average pooling and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.inner = block(1, width), block(width, width)
        self.outer = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.down, self.pool, self.head = block(width, 2 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = torch.relu(x + self.outer(self.inner(x)))
        return self.head(self.pool(self.down(x)).flatten(1))


def session(path: Path, entries: Mapping[str, str]) -> onnxruntime.InferenceSession:
    """On one thread of the CPU, with the entries that the export names."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs(runtime: onnxruntime.InferenceSession, images: Tensor) -> np.ndarray:
    return runtime.run(None, {runtime.get_inputs()[0].name: images.numpy()})[0]


def latencies(runtimes: dict[str, onnxruntime.InferenceSession], images: Tensor, runs: int) -> dict[str, float]:
    """Median milliseconds, the runtimes taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(runs + 1):  # the first one warms up
        for name, runtime in runtimes.items():
            start = time.perf_counter()
            outputs(runtime, images)
            seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="FOLDER", help="where the models go (default: out)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer (default: 32)")
    parser.add_argument("--runs", type=int, default=50, help="how often latency is measured (default: 50)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    training, test = loaders()
    images, labels = next(iter(test))
    model = Network(options.width)
    train(model, training, options.epochs, torch.optim.Adam(model.parameters(), 2e-3), "float")
    model.eval()
    files = {name: options.output / f"{name}.onnx" for name in ("float", *CONFIGS)}
    dynamic = {"images": {0: torch.export.Dim("batch")}}
    torch.onnx.export(model, (images[:2],), files["float"], dynamo=True, external_data=False, verbose=False, dynamic_shapes=dynamic)

    sessions = {"float": session(files["float"], {})}
    rows = [f"float: accuracy {accuracy(model, test):.2f} %"]
    for name, config in CONFIGS.items():
        sim = qsim.QuantSim(model, images[:1], config)
        print(f"\n{name}: {sim.calibrate(training)}")
        report = sim.export(files[name], verify=[images])
        print(report)
        sessions[name] = session(files[name], report.session_options)
        on_integers = sim.evaluate(images, integer=True).numpy()
        got = outputs(sessions[name], images)
        step = sim.encodings()["head.output"].scale.item()
        differing = int((np.rint(got / step) != np.rint(on_integers / step)).sum())
        right = [100 * float((computed.argmax(1) == labels.numpy()).mean()) for computed in (on_integers, got)]
        rows.append(
            f"{name}: accuracy simulated {accuracy(sim, test):.2f} %, on integers {right[0]:.2f} %, ONNX Runtime {right[1]:.2f} %; "
            f"{differing} of {got.size} integers differ between the last two"
        )

    times = latencies(sessions, images, options.runs)
    rows.append(f"latency of {len(images)} images, one thread: " + ", ".join(f"{name} {value:.2f} ms" for name, value in times.items()))
    rows.append("size: " + ", ".join(f"{file.name} {file.stat().st_size / 1024:.1f} KiB" for file in files.values()))
    print("", *rows, sep="\n")


if __name__ == "__main__":
    main()
