"""Which format a checkpoint has, and which module reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsim.call_fit import tells_arguments
from qsim.checkpoints import awq, compressed_tensors, fp8, gguf, gguf_write, gptq, kv_scales
from qsim.checkpoints.activation import NO_ACTIVATIONS, Activation, with_activation
from qsim.checkpoints.checkpoint import Checkpoint
from qsim.checkpoints.folder import read_config, read_tensors
from qsim.checkpoints.folder_writer import SHARD_BYTES, FolderWriter
from qsim.checkpoints.packed_weight import PackedWeight, Scheme
from qsim.config.kv_cache import KVCache
from qsim.errors import FileFormatError
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding
from qsim.options import shown

_MODULES: dict[str, Any] = {
    compressed_tensors.FORMAT: compressed_tensors,
    fp8.FORMAT: fp8,
    gptq.FORMAT: gptq,
    gptq.SECOND: gptq,
    awq.FORMAT: awq,
}
CHECKPOINT_FORMATS = (*_MODULES, gguf.FORMAT)
_NAMELESS = "is by its name the weight of no module, under which files have its parts: put a layer that is the model into nn.Sequential"
_PARTS = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros", ".input_scale", ".activation_scale")


@tells_arguments("qsim.load_checkpoint")
def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint with packed integer weights.

    Parameters
    ----------
    path : path-like
        A folder with ``config.json`` and safetensors (one file, or shards with an index): GPTQ ("gptq" and "gptq_v2"; 2, 3, 4, 8 bits,
        ``desc_act`` too), AWQ ("gemm"), compressed-tensors ("pack-quantized", 4 and 8 bits; "int-quantized", "float-quantized" and
        "naive-quantized", 8 bits a channel, tensor or, of float8, tile, with activations in float, or with a scale from each token, from
        each block of a token, or one from calibration; several of these too, by the targets of ``config_groups``) and "fp8", as DeepSeek,
        Qwen3 and AutoFP8 write it, which need ``pip install "qsim[weights]"``. Or a GGUF file with tensors of Q4_0, Q4_1, Q8_0, Q4_K,
        Q6_K, F32, F16 and BF16, whose names stay GGUF's; its converter has permuted rows of some models' weights.

    Returns
    -------
    Checkpoint
        On the CPU. Nothing is rounded: `save_checkpoint` writes the same bits again.

    Raises
    ------
    FileFormatError
        The file is damaged, or of another kind: what was found, and what was expected.

    Notes
    -----
    Sources: github.com/ModelCloud/GPTQModel, github.com/casper-hansen/AutoAWQ, github.com/vllm-project/compressed-tensors,
    github.com/huggingface/transformers (integrations/finegrained_fp8), github.com/neuralmagic/AutoFP8, github.com/ggml-org/ggml
    (docs/gguf.md).

    Examples
    --------
    >>> import tempfile
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    >>> sim = qsim.QuantSim(model, torch.randn(1, 64), qsim.w4a16(group=32))
    >>> report = sim.calibrate([torch.randn(8, 64)], progress=False)
    >>> sim.save_compressed(folder)
    >>> checkpoint = load_checkpoint(folder)
    >>> checkpoint.format, torch.equal(checkpoint.weights["0.weight"].dequantize(), sim.bake()[0].weight)
    ('compressed-tensors', True)
    """
    path = Path(path)
    if path.is_file():
        with path.open("rb") as stream:
            beginning = stream.read(len(gguf.MAGIC))
        if beginning == gguf.MAGIC or path.suffix == ".gguf":
            return gguf.read(path)
        raise FilePlace(str(path)).wanted("the beginning", beginning, "a GGUF file, or the folder of a model in its place")
    if not path.is_dir():
        raise FileNotFoundError(f"qsim: there is no {str(path)!r}; expected a model's folder or a GGUF file")
    place = FilePlace(str(path / "config.json"))
    config = read_config(path) or {}
    quantization = config.pop("quantization_config", None) or read_config(path, "quantize_config.json")
    if not isinstance(quantization, dict):
        raise place.wanted("quantization_config", quantization, "an object that says how the weights are packed")
    method = quantization.get("quant_method", gptq.FORMAT if "desc_act" in quantization else None)
    if not isinstance(method, str) or method not in _MODULES:
        raise place.wanted("quant_method", method, f"one of {', '.join(map(repr, _MODULES))}")
    state = read_tensors(path)
    weights, activations = _MODULES[method].read(state, quantization, FilePlace(str(path)))
    cache, scales = kv_scales.read(state, quantization.get("kv_cache_scheme"), FilePlace(str(path)))
    _check_rest(state, weights, FilePlace(str(path)))
    format = gptq.layout_of(quantization, place) if method == gptq.FORMAT else method
    specs = {name: activation.spec for name, activation in activations.items()}
    encodings = {name: activation.encoding for name, activation in activations.items() if activation.encoding is not None}
    return Checkpoint(weights, state, format, config, specs, {**encodings, **scales}, cache)


def _check_rest(state: Mapping[str, Tensor], weights: Collection[str], place: FilePlace) -> None:
    """What no layer took must not pass for a weight in float."""
    for name, t in state.items():
        if name in weights:
            raise place.at(name).error("is there quantized and in float; expected one of both: take out the other")
        if t.itemsize == 1 if t.is_floating_point() else name.endswith(".weight"):
            raise place.at(name).error(f"is {str(t.dtype).removeprefix('torch.')}, and no layer that quantization_config describes has it")
        if name.endswith(_PARTS):
            raise place.at(name).error("is a part of a quantized layer whose weight is not there: is the checkpoint complete?")


@tells_arguments("qsim.save_checkpoint")
def save_checkpoint(
    checkpoint: Checkpoint, folder: str | os.PathLike[str], format: str = compressed_tensors.FORMAT, *, linear: Sequence[str] | None = None
) -> None:
    """Write packed weights as a model's folder, safetensors (shards of 2 GiB, with an index) and ``config.json``, or as a GGUF file.

    Integers, scales and zero points are written as they are. GPTQ and AWQ store scales in float16: others are refused. Readers of "gptq"
    disagree on zero points of 0, which it refuses and "gptq_v2" holds.

    Parameters
    ----------
    checkpoint : Checkpoint
    folder : path-like
        Made if it is not there; weights and config of before are replaced, safetensors of other names an error. Tokenizers are yours to
        copy. Of "gguf" the file, "model.gguf".
    format : str
        "compressed-tensors", "fp8" (tiles or one scale a weight, one way for all), "gptq", "gptq_v2", "awq", or "gguf": symmetric grids
        as Q4_0, Q8_0, Q4_K and Q6_K, all else in float, under the names that the checkpoint has. llama.cpp runs files with names, rows in
        the order, and metadata of its own.
    linear : sequence of str, optional
        All linear layers of the model. compressed-tensors then names those that are in float and not those that are packed. The others
        name those in float; without this, all matrices that are.

    Raises
    ------
    FileFormatError
        The format cannot hold it: the message lists every weight, and why. Nothing is written.

    Examples
    --------
    >>> import tempfile
    >>> folder, integers, scale = tempfile.mkdtemp(), torch.randint(-8, 8, (8, 64), dtype=torch.int8), torch.full((8, 2), 0.5)
    >>> weight = qsim.PackedWeight(integers, scale, torch.zeros(8, 2, dtype=torch.int32), 4, 32)
    >>> save_checkpoint(qsim.Checkpoint({"fc.weight": weight}, {}, "gptq"), folder, "gptq")
    >>> sorted(load_checkpoint(folder).weights)
    ['fc.weight']
    """
    if format not in CHECKPOINT_FORMATS:
        raise ValueError(f"qsim: got format={shown(format)}; expected one of {', '.join(map(repr, CHECKPOINT_FORMATS))}")
    if not checkpoint.weights and checkpoint.kv_cache is None:
        raise FileFormatError(f"qsim: '{folder}': no weight is quantized, and no cache; expected at least one")
    if format == gguf.FORMAT:
        _write_gguf(checkpoint, Path(folder))
        return
    first = first_names(checkpoint.tensors)
    named = {name: t for name, t in checkpoint.tensors.items() if name in first}
    entries: list[tuple[str, PackedWeight | Tensor]] = [*named.items(), *checkpoint.weights.items()]
    activations = {name: Activation(spec, checkpoint.encodings.get(name)) for name, spec in checkpoint.activations.items()}
    scales = {name: encoding for name, encoding in checkpoint.encodings.items() if name not in checkpoint.activations}
    cache = None if checkpoint.kv_cache is None else (checkpoint.kv_cache, scales)
    write_packed(Path(folder), entries, format, checkpoint.model_config, linear, activations=activations, cache=cache)


def write_packed(
    folder: Path,
    entries: Iterable[tuple[str, PackedWeight | Tensor]],
    format: str,
    model_config: Mapping[str, Any],
    linear: Sequence[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    activations: Mapping[str, Activation] | None = None,
    cache: tuple[KVCache, Mapping[str, Encoding]] | None = None,
) -> None:
    """`save_checkpoint` of weights and other tensors that come one by one: what was written is not held."""
    module, activations = _MODULES[format], activations or {}
    schemes: dict[str, Scheme] = {}
    problems: dict[str, str] = {}
    matrices: list[str] = []
    scale_type = torch.float32
    if cache is not None:
        problems |= _cache_problems(cache[0], format)
    with FolderWriter(folder, shard_bytes) as writer:
        for name, entry in entries:
            owner = name.removesuffix(".weight")
            if isinstance(entry, Tensor):
                writer.add(name, entry)
                matrices += [owner] if owner != name and entry.dim() == 2 else []
                continue
            activation = activations.get(name)
            if problem := _NAMELESS if owner == name else module.problem(entry, activation, format):
                problems[name] = problem
                continue
            schemes[owner] = with_activation(entry.scheme, activation)
            scale_type = entry.scale.dtype
            if not problems:
                for part, t in module.packed(entry, activation, format).items():
                    writer.add(f"{owner}.{part}", t)
        problems |= {f"{name}.weight": problem for name, problem in module.differing(schemes, format).items()}
        _check(problems, folder, format)
        if module is not compressed_tensors and linear is None:
            linear = matrices  # readers take all linear layers for quantized that a config does not name
        said = module.quantization(schemes, format, linear)
        if cache is not None:
            said["kv_cache_scheme"] = kv_scales.described(cache[0])
            for name, t in kv_scales.packed(cache[1], scale_type).items():
                writer.add(name, t)
        writer.finish({**model_config, "quantization_config": said})
    if module is compressed_tensors:
        compressed_tensors.warn_of_readers(schemes)
    if module is awq:
        awq.warn_of_readers(schemes, linear)


def first_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of all but those that are one tensor with one before: a file has it once."""
    firsts: dict[object, str] = {}
    for name, t in tensors.items():
        firsts.setdefault(place_of(t) if t.numel() else name, name)
    return set(firsts.values())


def place_of(t: Tensor) -> object:
    """Where a tensor lies, the same for those that are one: parts of it, and other views, are others."""
    return t.device, t.data_ptr(), t.dtype, t.shape, t.stride()


def _cache_problems(cache: KVCache, format: str) -> dict[str, str]:
    unfit = kv_scales.problem(cache)
    if unfit is None and format != compressed_tensors.FORMAT:
        unfit = f"is quantized, and the format has no place for that; {compressed_tensors.FORMAT!r} has"
    return {} if unfit is None else {"kv_cache": unfit}


def _write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    if path.suffix != ".gguf":
        raise ValueError(f"qsim: got '{path}' for a GGUF file; expected a name that ends in .gguf")
    unfit = dict.fromkeys(checkpoint.activations, NO_ACTIVATIONS)
    if checkpoint.kv_cache is not None:
        unfit |= _cache_problems(checkpoint.kv_cache, gguf.FORMAT)
    _check(unfit or gguf_write.write(path, checkpoint), path, gguf.FORMAT)


def _check(problems: Mapping[str, str], where: str | os.PathLike[str], format: str) -> None:
    if problems:
        listed = "\n  ".join(f"'{name}' {problem}" for name, problem in problems.items())
        raise FileFormatError(f"qsim: '{where}': {format} cannot hold:\n  {listed}")
