"""The part of `qsim.QuantSim` that writes models for runtimes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from qsim.deploy.export import Tracing, check_installed, checked_path, export
from qsim.deploy.export_report import ExportReport
from qsim.deploy.targets import target_of
from qsim.sim_training import Training
from qsim.stages import Stages


class Export(Training):
    """Base of `qsim.QuantSim`: files for runtimes."""

    def export(
        self,
        path: str | os.PathLike[str],
        target: str | None = None,
        *,
        opset: int | None = None,
        verify: Iterable[Any] | None = None,
        dynamic_batch: bool = True,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        external_data: bool | None = None,
    ) -> ExportReport:
        """Write the simulated model as ONNX, with QuantizeLinear and DequantizeLinear where the simulation quantizes.

        Weights are stored as integers, biases as int32 where they are simulated so; the model computes in eval mode. Nothing of
        the simulation changes, and nothing is written unless all of it can be.

        Parameters
        ----------
        path : path-like
            Such as "model.onnx", in a folder that exists.
        target : str, optional
            "onnxruntime", "tensorrt", "openvino" or "coreml". By default that of the config, and "onnxruntime" where the config has no
            runtime.
        opset : int, optional
            By default the smallest that holds what is used: 19; 21 for 16 and 4 bits and for blocks; 22 for models in bfloat16.
        verify : iterable of batches, optional
            Run ONNX Runtime on them and compare with the simulation: see `ExportReport.verification`. Batches as `calibrate` takes them.
        dynamic_batch : bool
            Leave the size of the batch open, where the model allows it. False fixes that of the example inputs.
        input_names, output_names : sequence of str, optional
            By default the names of the arguments of ``forward``; "output", the keys of a dict, or "output_0" and so on.
        external_data : bool, optional
            Keep the tensors in ``<path>.data``. By default where they have more than 1.5 GiB.

        Returns
        -------
        ExportReport
            ``print(report)``: files, times, what will not run on integers.

        Raises
        ------
        NoEncodingError
            Quantizers have no encoding: the message lists all of them, and why.
        ExportError
            The target cannot express what is simulated: the message lists every tensor, why, and what to change.
        CaptureError
            The model cannot be traced into one graph.
        """
        file, wanted = checked_path(path), target_of(target, self.config.profile)
        check_installed()
        from qsim.deploy.onnx_model import Options

        seconds, notes = Stages(), list[str]()
        with seconds.stage("trace"):
            traced = Tracing(self, wanted)
        options = Options(opset, dynamic_batch, input_names, output_names)
        return export(traced, file, options, external_data=external_data, verify=verify, seconds=seconds, notes=notes)
