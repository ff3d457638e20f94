"""Files for ONNX Runtime beside each other: the float model, quantize_static's (QDQ, U8S8, per channel) and qsim's, one thread.

    python benchmarks/exported.py resnet10t mobilenetv2_100

For each model of timm (random weights, BatchNorm statistics of the calibration images): milliseconds a run, medians of runs by turns, and
ratios; seconds of an export beside torch's own of the float model, second exports, since first ones load libraries; SQNR to the float
model on held-out images; how many outputs of `sim.integer()` differ from what ONNX Runtime computes.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import qsim

COUNT = 8  # images to calibrate with, and as many held out


class Images(CalibrationDataReader):
    def __init__(self, name: str, images: Tensor) -> None:
        self._feeds: Iterator[dict[str, NDArray[np.float32]]] = iter([{name: image.numpy()} for image in images.split(1)])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:  # type: ignore[override]
        return next(self._feeds, None)


def images(size: tuple[int, int, int], seed: int) -> Tensor:
    """Smooth noise around a mean color."""
    generator = torch.Generator().manual_seed(seed)
    noise, color = torch.randn(COUNT, *size, generator=generator), torch.randn(COUNT, size[0], 1, 1, generator=generator)
    return (6 * F.avg_pool2d(noise, 9, 1, 4) + color / 2).clamp(-2.5, 2.5)


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name)
    size = model.default_cfg["input_size"]
    calibration, held_out = images(size, 1), images(size, 2)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # plain means
    if norms:
        with torch.no_grad():
            model.train()(calibration)
    return model.eval(), calibration, held_out


def session(path: Path, entries: Mapping[str, str] = {}) -> Callable[[Tensor], NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    opened = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = opened.get_inputs()[0].name
    return lambda x: opened.run(None, {name: x.numpy()})[0]


def medians(runs: Mapping[str, Callable[[Tensor], object]], x: Tensor, seconds: float) -> dict[str, float]:
    """Milliseconds of each, by turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    stop = perf_counter() + seconds
    while perf_counter() < stop or len(taken["float"]) < 7:
        for name, run in runs.items():
            start = perf_counter()
            run(x)
            taken[name].append(1e3 * (perf_counter() - start))
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a second call returns, and its seconds."""
    call()
    start = perf_counter()
    return call(), perf_counter() - start


def sqnr(reference: NDArray[np.float32], outputs: NDArray[np.float32]) -> float:
    exact = reference.astype(np.float64)
    return float(10 * np.log10((exact**2).sum() / max(((exact - outputs) ** 2).sum(), 1e-300)))


def measured(name: str, folder: Path, seconds: float) -> str:
    model, calibration, held_out = made(name)
    x, paths = calibration[:1], {kind: folder / f"{kind}.onnx" for kind in ("float", "prepared", "static", "qsim")}
    sim = qsim.QuantSim(model, x, qsim.int8(target="onnxruntime"))
    sim.calibrate(calibration.split(1), progress=False)
    report, ours = timed(lambda: sim.export(paths["qsim"]))
    _, torchs = timed(lambda: torch.onnx.export(model, (x,), paths["float"], dynamo=True, verbose=False, external_data=False))
    quant_pre_process(paths["float"], paths["prepared"], skip_symbolic_shape=True)
    reader = Images(onnx.load(paths["float"], load_external_data=False).graph.input[0].name, calibration)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(paths["prepared"], paths["static"], reader, quant_format=QuantFormat.QDQ, **types)
    runs = {kind: session(paths[kind]) for kind in ("float", "static")} | {"qsim": session(paths["qsim"], report.session_options)}
    times = medians(runs, x, seconds)
    with torch.no_grad(), sim.integer():
        integer = torch.cat([sim(image) for image in held_out.split(1)]).numpy()
    outputs = {kind: np.concatenate([run(image) for image in held_out.split(1)]) for kind, run in runs.items()}
    lost = {kind: sqnr(outputs["float"], outputs[kind]) for kind in ("static", "qsim")}
    times = {**times, "to float": times["qsim"] / times["float"], "to static": times["qsim"] / times["static"]}
    milliseconds = "  ".join(f"{kind} {value:7.2f}" for kind, value in times.items())
    return (
        f"{name:28} {milliseconds}   export {ours:5.1f} s, to torch's {ours / torchs:.2f}   "
        f"SQNR {lost['qsim']:5.1f} dB, static {lost['static']:5.1f}   {int((integer != outputs['qsim']).sum())} of {integer.size} differ"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of timm's models")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for the runs of one model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of the quantizer and the exporter
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            print(measured(name, Path(folder), arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
