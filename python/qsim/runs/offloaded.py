"""Models whose parameters accelerate keeps elsewhere, in memory or on disk, until a module runs.

Its hooks replace parameters by others at every call, and leave tensors without values in between: nothing could be observed, put on a
grid or recognized. Here they get their values back, each where it lies: what is on disk is mapped from there, and costs memory while
its module runs, as with the hook.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qsim.runs.copies import copied
from qsim.runs.mapped import MappedParameter, Stored, same_bytes
from qsim.runs.memory import give_back

Model = TypeVar("Model", bound=nn.Module)

_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")  # methods that accelerate replaces on a dispatched model
_LARGE = 1 << 20  # bytes
_LONGEST_HEADER = 100 << 20  # what safetensors takes


def is_offloaded(model: nn.Module) -> bool:
    """Whether a module of the model gets its parameters from accelerate when it runs."""
    return any(True for _ in _offloading(model))


def with_values(model: Model) -> Model:
    """The model; a copy that has its values if it is offloaded."""
    return own_copy(model) if is_offloaded(model) else model


def own_copy(model: Model) -> Model:
    """A deep copy of a model, with the values that accelerate would bring."""
    if not is_offloaded(model):
        return copied(model)
    _refuse_other_devices(model)
    return settle_offloaded(copied(model))


def settle_offloaded(model: Model) -> Model:
    """Give an offloaded model its values back, in place, and take accelerate's hooks off where they have nothing left to do.

    What lies on disk is mapped from there; what lies in memory is used as it is. Modules release what they have read of a file when their
    forward ends. Parameters that were one before they were offloaded are one again, where the model or its memory tells.

    Raises
    ------
    ValueError
        A module runs on another device than the CPU.
    """
    found = dict(_offloading(model))
    if not found:
        return model
    _refuse_other_devices(model)
    before: list[Tensor] = []  # held, so that no other gets the identity of one
    made: dict[object, nn.Parameter] = {}
    for module, hook in found.items():
        names = list(_brought(module, hook))
        for name, t in names:
            owner, _, own = name.rpartition(".")
            holder = module.get_submodule(owner)
            if not t.is_meta:
                continue
            value = _values(hook.weights_map, name, t)
            if own in vars(holder)["_buffers"]:
                vars(holder)["_buffers"][own] = value.detach().clone() if isinstance(value, MappedParameter) else value
                continue
            before.append(t)
            keys = id(t), (value.data_ptr() or id(t), value.shape)  # one object, or one memory
            tied = next((made[key] for key in keys if key in made), None)
            parameter = value if isinstance(value, MappedParameter) else nn.Parameter(value, t.requires_grad)
            made |= dict.fromkeys(keys, parameter if tied is None else tied)
            vars(holder)["_parameters"][own] = made[keys[0]]
        hook.offload, hook.weights_map = False, None
        give_back()
        module.register_forward_hook(Release(tuple(name for name, _ in names)), always_call=True)
    _take_hooks_off(model)
    for module in model.modules():
        tie: Any = getattr(module, "tie_weights", None)
        if callable(tie):  # transformers': files tell no more that two parameters were one
            tie()
    return model


class Release:
    """The forward hook of a module that gives back the memory of what it read of files.

    Parameters
    ----------
    names : tuple of str
        Of the parameters and buffers that accelerate's hook would have brought.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mapped = []
        for name in self.names:
            owner, _, own = name.rpartition(".")
            if isinstance(parameter := getattr(module.get_submodule(owner), own, None), MappedParameter):
                mapped.append(parameter)
        for parameter in mapped:
            parameter.release()
        if sum(parameter.nbytes for parameter in mapped) >= _LARGE:
            give_back()  # what was computed of them


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody's hooks look at the calls of a module, or at its gradients."""
    after = [hook for hook in module._forward_hooks.values() if not isinstance(hook, Release)]
    return bool(after or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of accelerate's that a module has, one after the other."""
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else [each for one in getattr(hook, "hooks", (hook,)) for each in getattr(one, "hooks", (one,))]


def _offloading(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        for hook in _hooks(module):
            if getattr(hook, "offload", False) is True:  # `offload` of CpuOffload's is a method
                yield module, hook


def _brought(module: nn.Module, hook: Any) -> Iterator[tuple[str, Tensor]]:
    """What a hook brings: parameters, and buffers if it was told so, of the module alone or of all in it."""
    whole = bool(hook.place_submodules)
    yield from module.named_parameters(recurse=whole, remove_duplicate=False)
    for path, m in module.named_modules() if hook.offload_buffers else ():
        if whole or path == "":
            for name, t in m.named_buffers(recurse=False):
                if name not in m._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, t


def _refuse_other_devices(model: nn.Module) -> None:
    paths = {module: path for path, module in model.named_modules()}
    for module, hook in _offloading(model):
        device = hook.execution_device
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"qsim: accelerate brings the parameters of '{paths[module] or type(module).__name__}' to {torch.device(device)} when it "
                "runs. Of offloaded models those are simulated that run on the CPU: offload with execution_device='cpu' "
                "(accelerate.disk_offload, cpu_offload), or load with device_map={'': 'disk'} and an offload_folder; a model that fits on "
                "the device needs no offloading"
            )


def _values(weights: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The values of a tensor that is offloaded: as it lies in memory, or mapped from a file that holds just these."""
    value, again = weights[name], weights[name]
    if value.shape != like.shape:
        raise ValueError(f"qsim: accelerate holds '{name}' in the shape {tuple(value.shape)}, and the model has {tuple(like.shape)}")
    if value.data_ptr() == again.data_ptr() and value.is_cpu and value.dtype == like.dtype:
        return value
    value = value.to("cpu", like.dtype).contiguous()
    del again
    if not value.numel():
        return value
    stored = _place(weights, name, like)
    if stored is not None and (found := _mapped(stored, value, like)) is not None:
        return found
    with tempfile.NamedTemporaryFile(prefix="qsim-", delete=False) as file:  # of another type than the file, say
        value.reshape(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        path = Path(file.name)
    found = _mapped(Stored(path, 0, value.shape, value.dtype), value, like)
    path.unlink(missing_ok=True)  # the map keeps what it holds
    return value if found is None else found


def _mapped(stored: Stored, value: Tensor, like: Tensor) -> MappedParameter | None:
    """The tensor of a file, if its values are these, bit for bit."""
    try:
        found = MappedParameter(stored, like.requires_grad)
    except (OSError, ValueError):
        return None
    same = same_bytes(found, value)
    found.release()
    return found if same else None


def _place(weights: Any, name: str, like: Tensor) -> Stored | None:
    """Where accelerate's maps have a tensor, as they are laid out today: what is found there is compared with what they return."""
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    try:
        info = weights.index[name]
        if "safetensors_file" in info:
            return _in_safetensors(Path(info["safetensors_file"]), info.get("weight_name", name), like)
        return Stored(Path(weights.save_folder) / f"{name}.dat", 0, like.shape, like.dtype)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, struct.error):
        return None


def _in_safetensors(path: Path, name: str, like: Tensor) -> Stored | None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LONGEST_HEADER:
            return None
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return Stored(path, 8 + length + begin, like.shape, like.dtype) if end - begin == like.numel() * like.dtype.itemsize else None


def _take_hooks_off(model: nn.Module) -> None:
    """Every module runs as it was written, if all of accelerate's hooks would move its inputs to the CPU and nothing else."""
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    if any(type(hook).__name__ != "AlignDevicesHook" or hook.execution_device not in (None, "cpu", torch.device("cpu")) for hook in hooks):
        return
    for module in model.modules():
        if _hooks(module):
            before = vars(module).pop("_old_forward", None)
            vars(module).pop("forward", None)
            if before is not None and getattr(before, "__func__", None) is not type(module).forward:
                vars(module)["forward"] = before
            del vars(module)["_hf_hook"]
        for name in _MOVES:
            if hasattr(vars(module).get(name), "__wrapped__"):
                del vars(module)[name]
