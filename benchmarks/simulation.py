"""What simulating a whole network costs, next to the same network in float with its BatchNorm.

    python benchmarks/simulation.py [--seconds 10] [--relu inplace] [--device cuda --batch 256]

A ResNet-18 of half the width on 16 images of 3 x 64 x 64, on one thread: every weight and activation in 8 bits, BatchNorm folded. Ratios of
medians; the candidates take turns. On a GPU a call is timed until the device is done.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import qsim

BARS = {"evaluation": 1.10, "training step": 1.00, "calibration batch": 1.10, "memory of a training step": 1.15, "wrapping (s)": 3.0}
WHERE: dict[str, Any] = {"device": "cpu", "batch": 16}


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """21 weights with 2.8 million elements, 31 activations with 8.7 million for 16 images."""

    def __init__(self, inplace: bool = False, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        layers = [
            (Block(before, after, 1 if before == after else 2, inplace), Block(after, after, 1, inplace))
            for before, after in pairwise(widths)
        ]
        self.layers = nn.Sequential(*(block for layer in layers for block in layer))
        self.fc = nn.Linear(8 * width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1)
        return self.fc(x)


def network(inplace: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    on, n = WHERE["device"], WHERE["batch"]
    return ResNet(inplace).to(on), torch.randn(n, 3, 64, 64, device=on), torch.randint(100, (n,), device=on)


def now() -> float:
    """Seconds, when the device has done what it was given."""
    if WHERE["device"] != "cpu":
        torch.cuda.synchronize()
    return perf_counter()


def simulated(model: nn.Module, x: Tensor) -> qsim.QuantSim:
    sim = qsim.QuantSim(model.eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    return sim


def step_of(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def medians(candidates: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds per call of candidates that take turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        for _ in range(2):
            call()
    gc.collect()
    gc.disable()
    stop = now() + seconds
    while now() < stop or len(times[next(iter(times))]) < 5:
        for name, call in candidates.items():
            start = now()
            call()
            times[name].append(now() - start)
    gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def evaluation(inplace: bool, seconds: float) -> float:
    model, x, _ = network(inplace)
    sim = simulated(model, x)
    found = medians({"sim": without_gradients(lambda: sim(x)), "float": without_gradients(lambda: model(x))}, seconds)
    return found["sim"] / found["float"]


def training(inplace: bool, seconds: float) -> float:
    model, x, labels = network(inplace)
    sim = simulated(model, x).train()
    found = medians({"sim": step_of(sim, x, labels), "float": step_of(model.train(), x, labels)}, seconds)
    return found["sim"] / found["float"]


def calibration(inplace: bool, seconds: float) -> float:
    """A batch more of a calibration that runs, in float forwards: the encodings are chosen once, behind the last."""
    model, x, _ = network(inplace)
    sim = simulated(model, x)
    times: dict[str, list[float]] = {"sim": [], "float": []}

    def forward(observed: nn.Module, batch: Tensor) -> None:
        for name, called in (("sim", observed), ("float", model)):
            start = now()
            called(batch)
            times[name].append(now() - start)

    stop = now() + seconds
    sim.calibrate(iter(lambda: x if now() < stop else None, None), forward, progress=False)
    return statistics.median(times["sim"]) / statistics.median(times["float"])


def wrapping(inplace: bool, seconds: float) -> float:
    model, x, _ = network(inplace)
    start = now()
    qsim.QuantSim(model.eval(), x)
    return now() - start


def memory(inplace: bool, seconds: float) -> float:
    """Peak of what the allocator holds during a training step, beyond what it holds between steps; parameters and gradients are equal."""
    peaks = []
    for simulate in (True, False):
        model, x, labels = network(inplace)
        step = step_of(simulated(model, x).train() if simulate else model.train(), x, labels)
        step()
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            continue
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
        held = [0]
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held.append(held[-1] + event.nbytes())
        peaks.append(max(held))
    return peaks[0] / peaks[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for each comparison")
    parser.add_argument("--relu", choices=("plain", "inplace"), default="plain", help="whether the network's own ReLUs work in place")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", default="", help="comparisons whose name contains this")
    arguments = parser.parse_args()
    WHERE.update(device=arguments.device, batch=arguments.batch)
    torch.set_num_threads(1)
    for name, compare in zip(BARS, (evaluation, training, calibration, memory, wrapping), strict=True):
        if arguments.only in name:
            found = compare(arguments.relu == "inplace", arguments.seconds)
            print(f"{name}: {found:.3f} (bar {BARS[name]:.2f})", flush=True)


if __name__ == "__main__":
    main()
