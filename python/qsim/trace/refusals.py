"""Why a model cannot be traced or translated, in words: what torch says, the line and the module where it does, and what to do."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.fx import Node

from qsim.trace.fx_nodes import module
from qsim.trace.marks_behind_moves import operation

_NOT_THE_MODELS = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")
_LONGEST = 100  # characters of a line of code
_ONE_GRAPH = "What runs on a runtime must be one graph: take control flow that depends on values out of forward"
_VALUES = f"A size or a branch there depends on the values of tensors. {_ONE_GRAPH}, or write it with torch.where, masks and shapes"
_LOSS = "No runtime computes a loss: give a call without labels first, QuantSim(model, [call, call_with_labels]). "
_OTHER_WAY = (
    "The call ran when it was recorded, so the model takes another way when it is traced: transformers' models make a mask then that "
    "they leave out of an eager call where it is all ones. Leave such arguments out of the example inputs (attention_mask=None); where the "
    "model makes them by itself, simulate what it hands them to (its encoder) without them"
)
_CURES = (  # what torch's message holds, and what it means
    (r"data-dependent|DataDependent", _VALUES),
    (r"argument 'size' failed to unpack", _VALUES),
    (r"\.numpy\(\) is not supported|\.tolist\(\)", f"NumPy computes what no graph has. {_ONE_GRAPH}, or write it with torch's operations"),
    (r"must match the (existing )?size|shapes cannot be multiplied|broadcast", _OTHER_WAY),
    (r"^(aten|prims|quantized)[.:]", f"torch.export knows no graph of this operation. {_ONE_GRAPH}, and such operations with it"),
)


def trace_refusal(model: nn.Module, error: BaseException, given: Collection[str] = ()) -> str:
    """Why `torch.export` cannot trace a model; `given` are the names of the arguments in the call that it was to be traced with."""
    said = _first_line(error)
    unknown = re.search(r"(?:Found|Unsupported input type) <class '([\w.<>]+)'>(?: in (\w+))?", said)
    if unknown is not None:
        return _unknown_type(*unknown.groups())
    cure = next((cure for pattern, cure in _CURES if re.search(pattern, said)), _ONE_GRAPH)
    where = _line(model, error)
    loss = _LOSS if cure == _VALUES and "labels" in given else ""
    return f"{f'at {where}: ' if where else ''}{said}. {loss}{cure}, or simulate the part that is exported."


def translation_refusal(error: BaseException) -> str:
    """What PyTorch's exporter cannot translate: the cause, and the operation and its module."""
    causes = list(_chain(error))
    node = next((found for one in reversed(causes) if (found := _node_of(one.__traceback__)) is not None), None)
    said = _first_line(causes[-1])
    unknown = re.match(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", said)
    said = f"ONNX has no {unknown[1]}" if unknown is not None else said
    return f"{said}{'' if node is None else f' ({_place(node)})'}"


def _unknown_type(path: str, end: str | None) -> str:
    name, takes = path.rpartition(".")[2], "takes" if end in (None, "input") else "returns"
    if "Cache" not in name:
        return f"forward {takes} a {name}, which torch knows no tensors in: register the type with torch.utils._pytree."
    cures = ["simulate it without: model.config.use_cache = False, or use_cache=False among the example inputs"]
    if name == "DynamicCache":
        cures.append("or have its tensors in the file: transformers.integrations.executorch.register_dynamic_cache_export_support()")
    else:
        cures.append("or register the type with torch.utils._pytree")
    return f"forward {takes} a cache ({name}), which is no tensor: {'; '.join(cures)}."


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r" \(unhinted: .*$", "", line).strip().rstrip(".") or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the first one last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _line(model: nn.Module, error: BaseException) -> str:
    """The last line of the model's own Python that was running, and the module that it belongs to."""
    paths = {id(part): path for path, part in model.named_modules()}
    frames = list(_frames(error.__traceback__))
    begun = next((i for i, (frame, _) in enumerate(frames) if id(frame.f_locals.get("self")) in paths), len(frames))
    own = [i for i in range(begun, len(frames)) if not frames[i][0].f_code.co_filename.startswith((*_NOT_THE_MODELS, "<"))]
    if not own:
        return ""
    frame, line = frames[own[-1]]
    owner = next((path for one, _ in reversed(frames[: own[-1] + 1]) if (path := paths.get(id(one.f_locals.get("self")))) is not None), "")
    file = frame.f_code.co_filename
    code = textwrap.shorten(linecache.getline(file, line), _LONGEST, placeholder=" ...")
    return f"{Path(file).name}, line {line}{f', in {owner!r}' if owner else ''}{f' (`{code}`)' if code else ''}"


def _node_of(traceback: TracebackType | None) -> Node | None:
    """The node of a graph that was being translated."""
    found = [node for frame, _ in _frames(traceback) for name in ("node", "n") if isinstance(node := frame.f_locals.get(name), Node)]
    return found[-1] if found else None


def _place(node: Node) -> str:
    """What a node calls, and where: its module, and the line of the model's own Python."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    own = [(Path(file).name, line) for file, line in lines if not file.startswith(_NOT_THE_MODELS)]
    parts = [f"'{operation(node)}'" if operation(node) else "", f"in '{module(node)}'" if module(node) else ""]
    return " ".join(filter(None, [*parts, f"at {own[-1][0]}, line {own[-1][1]}" if own else ""]))
