"""What reaches the tensors of an ONNX model, observed in ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from qsim.errors import CalibrationError
from qsim.progress import progress
from qsim.quantizers.observer import Observer


def observe(model: ir.Model, names: Sequence[str], batches: Iterable[Mapping[str, Any]], *, show: bool) -> dict[str, Observer]:
    """Observers of these tensors after a pass over the batches in float; the model stays as it is.

    Parameters
    ----------
    model : ir.Model
    names : sequence of str
        Tensors of float32.
    batches : iterable of mapping of str to array
        By the names of the inputs.

    Raises
    ------
    CalibrationError
        There is no batch, or a tensor holds nothing finite.
    """
    proto = ir.to_proto(model)
    known = {value.name for value in [*proto.graph.output, *proto.graph.input]}
    for name in names:
        if name not in known:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    inputs = {value.name for value in proto.graph.input}
    observers = {name: Observer(name=name) for name in names}
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "observed.onnx")
        onnx.save(proto, path, save_as_external_data=proto.ByteSize() > 3 << 29, location="observed.data")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        asked = [name for name in names if name not in inputs]
        for batch in progress(batches, total=None, title="observe", unit="batch", show=show):
            seen = dict(zip(asked, session.run(asked, dict(batch)) if asked else [], strict=True))
            for name, observer in observers.items():
                observer(torch.from_numpy(seen[name] if name in seen else batch[name]))
            count += 1
    if not count:
        raise CalibrationError("qsim.quantize_onnx: got no batch. Is the iterator used up, or the file empty?")
    if empty := [name for name, observer in observers.items() if observer.counts.elements == observer.counts.nonfinite]:
        shown = ", ".join(f"'{name}' ({observers[name].counts})" for name in empty[:3])
        raise CalibrationError(
            f"qsim.quantize_onnx: {len(empty)} tensors hold nothing finite: {shown}. Look at the data and the float model"
        )
    return observers
