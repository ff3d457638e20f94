"""A plan for coremltools: the function that tells its float16 pass which operations to cast.

Sources: "Typed Execution" in coremltools' guide, and its reference of ``coremltools.transform.FP16ComputePrecision(op_selector=...)``:
a function of a MIL operation, True to compute it in float16. It is asked in the order of the program, and operations before have their
casts then. What an operation knows of the PyTorch model are its scopes (``coremltools.converters.mil.mil.scope``): the names of the modules
on the way to a call in a traced model, then the name of the value, and their types, then the function. A program that was converted from
``torch.export`` has no names of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qsim.config.float_plan import FloatPlan, operation_of

_SOURCE = '''"""What Core ML is to compute in float32: written by qsim.

    import coremltools as ct
    from {module} import op_selector

    model = ct.convert(
        torch.jit.trace(model, example),
        inputs=[...],
        compute_precision=ct.transform.FP16ComputePrecision(op_selector=op_selector),
    )
"""

# Modules, all of whose operations stay in float32.
MODULES = {modules}
# Functions that stay in float32 where these modules call them themselves: (module, function).
FUNCTIONS = {functions}
# Operations that coremltools makes of several: they stay in float32 where any function of their module does.
FUSED = ("batch_norm", "gelu", "instance_norm", "l2_norm", "layer_norm", "scaled_dot_product_attention")
# Operations that only move values: they stay in float32 between two that do.
MOVES = frozenset(
    """
{moves}
    """.split()
)


def op_selector(op):
    """True for an operation that may compute in float16."""
    return not (_is_kept(op) or (op.op_type in MOVES and _feeds_kept(op) and _holds_float32(op)))


def _is_kept(op):
    scopes = {{getattr(source, "name", source): list(names) for source, names in op.scopes.items()}}
    if "TORCHSCRIPT_MODULE_NAME" not in scopes:
        if "EXIR_STACK_TRACE" in scopes:
            raise ValueError("op_selector: the program does not name its modules; convert what torch.jit.trace returns")
        return False  # made by coremltools itself
    path = ".".join(scopes["TORCHSCRIPT_MODULE_NAME"][:-1])
    function = scopes["TORCHSCRIPT_MODULE_TYPE"][-1].strip("_")
    if any(path == module or path.startswith(module + ".") for module in MODULES):
        return True
    if (path, function) in FUNCTIONS:
        return True
    return op.op_type in FUSED and any(path == module for module, _ in FUNCTIONS)


def _feeds_kept(op):
    """Whether a kept operation, or the caller of the program, reads what an operation makes, moved or not."""
    left, seen = [op], []
    while left:
        for made in left.pop().outputs:
            if made.consuming_blocks:
                return True
            for reader in made.child_ops:
                if _is_kept(reader):
                    return True
                if reader.op_type in MOVES and reader not in seen:
                    seen.append(reader)
                    left.append(reader)
    return False


def _holds_float32(op):
    """Whether what an operation moves comes from a kept operation, or from inputs and constants alone."""
    left, seen, halved = [op], [], False
    while left:
        for given in left.pop().inputs.values():
            for value in given if isinstance(given, (list, tuple)) else (given,):
                source = value.op
                if source is None or source.op_type == "const" or source in seen or not _is_float(value):
                    continue
                seen.append(source)
                if source.op_type != "cast" and _is_kept(source):
                    return True
                if source.op_type in MOVES:
                    left.append(source)
                else:
                    halved = True
    return not halved


def _is_float(value):
    return any(value.is_tensor_or_scalar_of(dtype=dtype) for dtype in ("fp16", "fp32"))
'''

# MIL's operations that return numbers that they read, and zeros (`coremltools.converters.mil.mil.ops.defs`).
_MOVES = """
    band_part batch_to_space cast concat crop depth_to_space expand_dims flatten2d gather gather_along_axis gather_nd identity max_pool pad
    pixel_shuffle pixel_unshuffle reduce_max reduce_min reshape reshape_like reverse reverse_sequence scatter scatter_along_axis scatter_nd
    select slice_by_index slice_by_size slice_update sliding_windows space_to_batch space_to_depth split squeeze stack tile topk transpose
    upsample_nearest_neighbor
"""

# Functions that tracing calls by another name than PyTorch's function modes.
_TRACED = {
    **dict.fromkeys(("radd", "iadd"), ("add",)),
    **dict.fromkeys(("isub", "subtract"), ("sub",)),
    **dict.fromkeys(("rmul", "imul", "multiply"), ("mul",)),
    **dict.fromkeys(("truediv", "divide", "true_divide", "itruediv"), ("div",)),
    **dict.fromkeys(("rdiv", "rtruediv"), ("reciprocal", "mul", "div")),
    **dict.fromkeys(("rpow", "ipow"), ("pow",)),
    **dict.fromkeys(("concat", "concatenate"), ("cat",)),
    "rsub": ("rsub", "sub"),
    "rmatmul": ("matmul",),
    "negative": ("neg",),
    "absolute": ("abs",),
    "clip": ("clamp",),
    "normalize": ("linalg_vector_norm", "norm", "clamp_min", "expand_as", "div"),
}


def selector_source(plan: FloatPlan, module: str = "coreml_op_selector") -> str:
    """Python source of a module with the function ``op_selector``; it imports nothing.

    All calls of a function by one module are kept where one of them is: the order in which coremltools asks says nothing.

    Parameters
    ----------
    plan : FloatPlan
    module : str
        What the file will be called, for its documentation.
    """
    functions = [(path, traced) for path, function in map(operation_of, plan.keep) for traced in _TRACED.get(function, (function,))]
    modules = [*plan.keep, *plan.folded]
    listed = dict.fromkeys(functions)
    return _SOURCE.format(module=module, modules=_tuple(modules), functions=_tuple(listed), moves=_MOVES.strip("\n"))


def _tuple(entries: Any) -> str:
    return "()" if not entries else "(\n" + "".join(f"    {entry!r},\n" for entry in entries) + ")"


def selector(plan: FloatPlan) -> Callable[[Any], bool]:
    """The function of `selector_source`."""
    names: dict[str, Any] = {}
    exec(selector_source(plan), names)
    found: Callable[[Any], bool] = names["op_selector"]
    return found
