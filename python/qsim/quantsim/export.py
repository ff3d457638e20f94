"""The part of `qsim.QuantSim` that writes models for runtimes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qsim.checkpoints import Checkpoint
from qsim.config.profile import Profile
from qsim.deploy import bake, checkpoints
from qsim.deploy.export_model import export
from qsim.deploy.export_report import ExportReport
from qsim.deploy.retarget import retarget
from qsim.onnx.export_options import Options
from qsim.options import check_flag, check_function, shown
from qsim.runs.batches import Forward
from qsim.simulation.simulation import Simulation

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from typing_extensions import Self


class Export(Simulation):
    """Base of `qsim.QuantSim`: files for runtimes."""

    def export(
        self,
        path: str | os.PathLike[str],
        target: str | None = None,
        *,
        opset: int | None = None,
        verify: Iterable[Any] | bool = False,
        forward: Forward | None = None,
        dynamic_batch: bool = True,
        dynamic_shapes: Any = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        external_data: bool | None = None,
        accuracy_level: int | None = 1,
    ) -> ExportReport:
        """Write the simulated model: as ONNX, with QuantizeLinear and DequantizeLinear where the simulation quantizes, or for ExecuTorch.

        Weights are stored as integers, biases as int32 where they are simulated so; the model computes in eval mode. Nothing of
        the simulation changes, and nothing is written unless all of it can be.

        Parameters
        ----------
        path : path-like
            Such as "model.onnx", in a folder that exists.
        target : str, optional
            "onnxruntime", "tensorrt", "openvino", "coreml" or "executorch": a ``.pte`` program for its XNNPACK backend, of fixed sizes
            unless `dynamic_shapes` leaves some open. By default that of the config, and "onnxruntime" where the config has no runtime.
            Where the simulation was made for another target, and this one cannot express it, what is written is
            ``sim.retarget(target)``, with a warning.
        opset : int, optional
            By default the smallest that holds what is used: 19; 21 for 16 and 4 bits and for blocks; 22 for models in bfloat16.
        verify : bool or iterable of batches
            Run ONNX Runtime, OpenVINO or ExecuTorch on them and compare with the simulation: see `ExportReport.verification`. Batches
            as `calibrate` takes them; True takes the example inputs.
        forward : callable, optional
            ``forward(model, batch)`` for batches of `verify`, as in `calibrate`: ONNX Runtime is given what it calls the model with.
        dynamic_batch : bool
            Leave the size of the batch open, where the model allows it. False fixes that of the example inputs.
        dynamic_shapes : dict, tuple or list, optional
            The sizes to leave open, as `torch.export.export` takes them, in place of the batch alone:
            ``{"image": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}``. The file has the names of the Dims.
        input_names, output_names : sequence of str, optional
            By default the names of the arguments of ``forward``; "output", the keys of a dict, or "output_0" and so on.
        external_data : bool, optional
            Keep the tensors in ``<path>.data``. By default where they have more than 1.5 GiB.
        accuracy_level : int or None
            For "onnxruntime": 4-bit weights in groups of 16 or more (a power of two) become its operators MatMulNBits, with this level, and
            GatherBlockQuantized. 0 and 1 compute in float32, as is simulated; 2 in float16, 3 in bfloat16, and 4 on int8, to which
            activations are rounded in blocks: faster, and with a note. None writes DequantizeLinear for them too.

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
            The model cannot be traced into one graph, or not with these sizes open.

        Examples
        --------
        >>> import tempfile
        >>> from torch import nn
        >>> from torch.export import Dim
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
        >>> sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8), qsim.int8(target="onnxruntime"))
        >>> calibrated = sim.calibrate([torch.randn(4, 3, 8, 8)], progress=False)
        >>> sizes = {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}
        >>> report = sim.export(tempfile.mktemp(".onnx"), dynamic_shapes=(sizes,), verify=[torch.randn(2, 3, 17, 5)])
        >>> [d.mismatching for d in report.verification.differences["on integers", "optimised"].values()]
        [0]
        """
        if accuracy_level is not None and (type(accuracy_level) is not int or accuracy_level not in range(5)):
            raise ValueError(f"QuantSim.export: got accuracy_level={shown(accuracy_level)}; expected 0, 1, 2, 3, 4 or None")
        check_flag("QuantSim.export", "dynamic_batch", dynamic_batch)
        if external_data is not None:
            check_flag("QuantSim.export", "external_data", external_data)
        if forward is not None:
            check_function("QuantSim.export", "forward", forward, "forward(model, batch)")
        options = Options(opset, dynamic_batch, dynamic_shapes, input_names, output_names, external_data, accuracy_level)
        return export(self, path, target, options, verify=verify, forward=forward)

    def quantized_program(self, dynamic_shapes: Any = None) -> ExportedProgram:
        """The simulation as PyTorch's own quantized graph, for tools that read what PT2E makes: backends of ExecuTorch, `torch.compile`.

        A `torch.export` program with ``quantized_decomposed`` operators: activations go through int8 and back wherever they are quantized,
        weights of convolutions and linear layers are int8 with their scales, biases are the numbers that int32 stands for. It runs in
        PyTorch, where it computes what the simulation does, up to the order of sums.

        Parameters
        ----------
        dynamic_shapes : dict, tuple or list, optional
            As in `export`. By default all sizes are those of the example inputs.

        Returns
        -------
        torch.export.ExportedProgram

        Raises
        ------
        ExportError
            Something is simulated that XNNPACK's int8 does not express: as `export` for "executorch".

        Examples
        --------
        >>> from torch import nn
        >>> x = torch.randn(2, 4)
        >>> sim = qsim.QuantSim(nn.Linear(4, 8), x, qsim.int8(target="executorch"))
        >>> report = sim.calibrate([x], progress=False)
        >>> program = sim.quantized_program()
        >>> [node.target.__name__ for node in program.graph.nodes if "quantize_per_channel" in str(node.target)]
        ['dequantize_per_channel.default']
        >>> torch.allclose(program.module()(x), sim(x))
        True
        """
        from qsim.deploy.export_program import quantized_program  # it registers torch.ao's operators

        return quantized_program(self, dynamic_shapes)

    def retarget(self, target: str | Profile) -> Self:
        """The same weights simulated for another target, with ranges from what was observed for this one. No data needed.

        A quantizer of the new simulation observes what those of this one observed at the same tensors, and chooses its range from that;
        an encoding that fits as it is, a trained scale for example, is kept. What is off here is off there.

        Parameters
        ----------
        target : str or Profile
            As `Config.target`.

        Returns
        -------
        QuantSim
            With a copy of the model.

        Raises
        ------
        NoEncodingError
            Before calibration.
        CalibrationError
            The target quantizes tensors that were never observed: the message lists them.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 4))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> sorted(sim.retarget("tensorrt").encodings())
        ['0.weight', '2.input[0]', '2.weight', 'input']
        """
        return retarget(self, target)

    def bake(self) -> nn.Module:
        """The plain model with its weights on their grids: it computes what this simulation does with its quantizers of weights alone.

        Nothing of qsim is left in it: it costs what the float model costs, in time and in memory, and is saved, loaded and compiled like
        it. Weights that restoring solved for, and those that training moved, are in it; BatchNorms that were folded stay folded; shared
        weights stay shared. Activations, caches and biases are in float in it, with a warning where the simulation quantizes them. That
        the two agree is checked on the example inputs. The integers are in `integer_state_dict`.

        Returns
        -------
        nn.Module
            A copy of `model`, in the modes it is in. The simulation stays as it is.

        Raises
        ------
        NoEncodingError
            A weight has no encoding yet.
        ValueError
            What is quantized is no parameter, but computed from some: the message lists all; or is in half precision.
        RuntimeError
            The baked model differs from the simulation on the example inputs.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(4, 2), torch.randn(1, 4), qsim.Config(qsim.TensorSpec(bits=4, axis=0), None))
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
        >>> baked, x = sim.bake(), torch.randn(3, 4)
        >>> type(baked).__name__, torch.equal(baked(x), sim(x))
        ('Linear', True)
        """
        return bake.bake(self)

    def integer_state_dict(self) -> dict[str, Tensor]:
        """The state dict of `model` with integers in place of the weights that are quantized, and their scales and zero points beside them.

        ``fc.weight`` is what a runtime stores: int8 or uint8 up to 8 bits (`qsim.ops.pack_int4` halves those of 4), int16 or uint16 up to
        16, or float8. ``fc.weight_scale`` is float32 and ``fc.weight_zero_point`` int32, with the shapes of `Encoding`; where scales are
        integers beside floats (``scale_format="int"``), ``fc.weight_scale_integers`` and ``fc.weight_super_scale`` are these. What they
        stand for, ``qsim.ops.dequantize(integers, scale, zero_point, axis=, block_size=)``, is the weight of `bake`, bit for bit. All other
        entries are those of `model`, in its memory.

        Returns
        -------
        dict of str to Tensor

        Raises
        ------
        NoEncodingError, ValueError, RuntimeError
            As `bake`, whose comparison on the example inputs is made here too; or a weight that is quantized has NaN or Inf in it.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(4, 2), torch.randn(1, 4), qsim.Config(qsim.TensorSpec(bits=4, axis=0), None))
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
        >>> {name: (str(t.dtype), tuple(t.shape)) for name, t in sim.integer_state_dict().items()}["weight_scale"]
        ('torch.float32', (2,))
        """
        return bake.integer_state_dict(self)

    def save_compressed(self, folder: str | os.PathLike[str], format: str = "compressed-tensors") -> None:
        """Write the model with packed integer weights, as vLLM and transformers read it: compressed-tensors, FP8, GPTQ or AWQ.

        For linear layers whose weights are integers, per output channel (``axis=0``) or in groups along the input channels
        (``axis=1, block_size=128``), symmetric or not, or float8 per output channel or tile; all else stays in float. What these layers
        read is written where it has a scale from each token, from each block of one, or one from calibration, as `w8a8_dynamic`,
        `w8a8_static`, `fp8_dynamic`, `fp8_static` and `fp8_block` have it, and in compressed-tensors caches with one scale of 8 bits for
        keys and one for values; other quantized activations are refused. Experts that transformers 5 has in one parameter are written as a
        weight for each, under the names of published checkpoints. The weights that a reader makes of the file in float32 are those
        of `bake`, bit for bit. Needs safetensors: ``pip install "qsim[weights]"``.

        Parameters
        ----------
        folder : path-like
            Made if it is not there. ``model.safetensors`` (or its shards) and ``config.json`` in it are replaced; other safetensors, which
            would be read beside them, are an error. Tokenizers are not written.
        format : str
            "compressed-tensors" (pack-quantized, 4 and 8 bits; int-quantized, float-quantized and naive-quantized, 8 bits; several of
            these too), "fp8" (float8 in tiles, as of `fp8_block`, or with one scale a weight: what DeepSeek and Qwen3 are published in),
            "gptq" or "gptq_v2" (2, 3, 4 and 8 bits, one group size for all) or "awq" (4 bits). "gguf" writes the file `folder`: see
            `qsim.save_checkpoint`. The last four store scales in float16: call `round_scales` before.

        Raises
        ------
        NoEncodingError
            A weight has no encoding yet.
        ValueError
            The format cannot hold the simulation, or a weight that is quantized has NaN or Inf in it: the message lists every weight, why,
            and what to change. Nothing is written.
        RuntimeError
            As `bake`: a weight is read in float at another place.

        Notes
        -----
        Sources: see `qsim.load_checkpoint`.

        Examples
        --------
        >>> import os, tempfile
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> sim = QuantSim(model.eval(), torch.randn(1, 64), qsim.w4a16(group=32))
        >>> report = sim.calibrate([torch.randn(8, 64)], progress=False)
        >>> sim.save_compressed(folder)
        >>> sorted(os.listdir(folder))
        ['config.json', 'model.safetensors']
        """
        checkpoints.save_compressed(self, folder, format)

    def load_compressed(self, source: str | os.PathLike[str] | Checkpoint) -> None:
        """Take weights and their encodings from a checkpoint with packed integers: from now on this simulates that checkpoint.

        Weights are on the checkpoint's grids bit for bit, and all other tensors are loaded too. After an error nothing is changed.

        Parameters
        ----------
        source : path-like or Checkpoint
            As `qsim.load_checkpoint` takes and gives it. `Checkpoint.config` makes the config that fits. Experts that have a weight each
            in it are put into the parameter that the model has for them, as `Checkpoint.for_model` does it.

        Raises
        ------
        FileFormatError
            The files are damaged, or experts are missing or of several kinds.
        ValueError
            The checkpoint does not fit the model or the config: the message lists every tensor.

        Examples
        --------
        >>> import tempfile
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> sim = QuantSim(model.eval(), torch.randn(1, 64), qsim.w4a16(group=32))
        >>> report = sim.calibrate([torch.randn(8, 64)], progress=False)
        >>> sim.save_compressed(folder)
        >>> checkpoint = qsim.load_checkpoint(folder)
        >>> fresh = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
        >>> again = QuantSim(fresh, torch.randn(1, 64), checkpoint.config())
        >>> again.load_compressed(checkpoint)
        >>> x = torch.randn(2, 64)
        >>> torch.equal(again(x), sim(x))
        True
        """
        checkpoints.load_compressed(self, source)

    def round_scales(self, dtype: torch.dtype = torch.float16) -> None:
        """Round the scales of all weights, and of what is written with them, to what a file stores them in, and simulate that.

        GPTQ, AWQ and GGUF store scales in float16; engines that compute in bfloat16 read those of compressed-tensors so. A scale below the
        type's smallest normal number becomes that. Of scales that are integers beside floats the floats are rounded, and the integers
        chosen anew.

        Parameters
        ----------
        dtype : torch.float16 or torch.bfloat16

        Raises
        ------
        ValueError
            A scale is beyond the type's largest number. Nothing is changed.

        Examples
        --------
        >>> sim = QuantSim(torch.nn.Linear(64, 8), torch.randn(1, 64), qsim.Config(qsim.TensorSpec(bits=4, axis=0), None))
        >>> report = sim.calibrate([torch.randn(8, 64)], progress=False)
        >>> sim.round_scales(torch.float16)
        >>> scale = sim.encodings()["weight"].scale
        >>> torch.equal(scale.half().float(), scale)
        True
        """
        checkpoints.round_scales(self, dtype)
