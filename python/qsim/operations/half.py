"""Operations in half precision as an engine runs them: numbers and integers among the arguments are tensors of the format, and so is some
of the inside.

What an operation reads and returns is rounded by quantizers; this is what they cannot reach.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.operations.functions import COMPARISONS, CREATION, INDEXES, INSERTION, Function, name_of
from qsim.operations.internals import inside_of
from qsim.operations.stored import STORED, WIDENED


def _table(names: str) -> frozenset[str]:
    return frozenset(names.split())


# What computes fractions, of integers alone too.
_FRACTIONS = _table(
    """
    div divide true_divide truediv rtruediv rdiv itruediv float_power atan2 xlogy copysign reciprocal sqrt rsqrt exp exp2 expm1 log log2
    log10 log1p sigmoid sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma digamma sinc
    """
)
# Operations whose numbers are tensors for an engine, and are rounded as tensors are, and so are tensors of integers, which torch promotes
# there. Others are attributes: an epsilon of a fused normalization, the size of an interpolation.
NUMBERS_ARE_OPERANDS = (COMPARISONS - {"isclose"} | _FRACTIONS) | _table(
    """
    add radd iadd sub rsub isub mul rmul imul multiply subtract floor_divide
    floordiv rfloordiv pow rpow ipow remainder rmod fmod clamp clamp_min clamp_max clip maximum minimum addcmul addcdiv
    lerp where masked_fill masked_fill_ full_like new_full fill_ nan_to_num hardtanh threshold pad normalize cosine_similarity
    hypot __setitem__ setitem index_fill index_fill_ scatter scatter_ copy_ outer ger kron
    """
)
# Where integers say where, not what.
_PLACES: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(INDEXES, (1,)),
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_"), (1, 2, "dim", "index")),
    "searchsorted": ("sorter",),
}
_WIDE = frozenset({torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64})  # the formats have all of 8 bits


def nearest(value: float, format: str) -> float:
    """A number rounded to a format, half to even: the same, an int too, where the format has it. Written so that Dynamo traces it where the
    number is of a size that it holds open.

    Examples
    --------
    >>> nearest(1e6, "float16"), nearest(1e-8, "float16"), nearest(0.5, "float16"), nearest(2049.0, "float16")
    (inf, 0.0, 0.5, 2048.0)
    """
    size = abs(value)
    if not 0 < size < math.inf:
        return value
    numbers = FLOAT_FORMATS[format]
    if isinstance(value, int) and size <= 2 / numbers.eps:
        return value  # a size that is held open stays so
    step = numbers.eps  # from one number to the next, between 1 and 2
    while size >= 2 * step / numbers.eps:
        step *= 2
    while size < step / numbers.eps and step > numbers.smallest_normal * numbers.eps:
        step /= 2
    whole = math.floor(size / step)
    rest = size / step - whole
    rounded = (whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) else whole) * step
    rounded = rounded if rounded <= numbers.largest else math.inf
    near = rounded if value > 0 else -rounded
    return value if near == value else near


def stops_at(format: str) -> float:
    """The multiple of a number to which a sum in a format grows, if that number is added again and again: 2 / eps.

    From there on the number is half a step or less, and is lost: 2048 times in float16, whose step at 1 is 2^-10. A number that is no
    power of two is rounded up on the way, and is lost before twice that.

    Examples
    --------
    >>> stops_at("float16"), stops_at("bfloat16")
    (2048.0, 256.0)
    """
    return 2 / FLOAT_FORMATS[format].eps


def stopped(added: Tensor, mean: Callable[[], Tensor], count: float, format: str) -> Tensor:
    """Sums as an accumulator of a format holds them, which stop growing at `stops_at` times the mean magnitude of what is added."""
    if count <= stops_at(format):
        return added
    most = mean() * stops_at(format)
    return torch.where(added.abs() > most, most.copysign(added), added)  # NaN stays, and Inf


def _takes_quantities(op: str, given: Mapping[Any, Any]) -> bool:
    """Whether a call is arithmetic on numbers that need not be whole: integers beside these are promoted, and alone they stay integers."""
    if op in INSERTION or op in CREATION:  # all becomes what the first is, or what is asked for
        found = [given.get("dtype") or getattr(given.get(0, given.get("input")), "dtype", None)]
    elif op in _FRACTIONS and given.get("rounding_mode") is None:
        return True
    else:
        found = [value.dtype if isinstance(value, Tensor) else torch.float32 if type(value) is float else None for value in given.values()]
    return any(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in found)


def numbers_rounded(op: str, given: Mapping[Any, Any], number: Callable[[float], Any], tensor: Callable[[Tensor], Any]) -> dict[Any, Any]:
    """What becomes of the numbers and tensors of integers in a call that are tensors of the format for an engine.

    Parameters
    ----------
    op : str
        As `qsim.operations.functions.name_of` gives it.
    given : mapping of slot to object
        The arguments.
    number, tensor : callable
        What rounds a number; and a floating-point tensor that was one of integers.
    """
    found: dict[Any, Any] = {}
    if op not in NUMBERS_ARE_OPERANDS or not _takes_quantities(op, given):
        return found
    floats = [value.dtype for value in given.values() if isinstance(value, Tensor) and value.is_floating_point()]
    for slot, value in given.items():
        if slot in _PLACES.get(op, ()):
            continue
        if type(value) in (int, float):
            found[slot] = number(value)
        elif isinstance(value, Tensor) and value.dtype in _WIDE:
            found[slot] = tensor(value.to(floats[0] if floats else torch.get_default_dtype()))
    return found


def has_inexact_numbers(func: Function, given: Mapping[Any, Any]) -> bool:
    """Whether a call takes a number that float16 or bfloat16 does not have, where it is a tensor for an engine; or integers in a tensor,
    which may be any."""
    lost = numbers_rounded(
        name_of(func), given, lambda n: any(nearest(n, format) != n for format in ("float16", "bfloat16")), lambda _: True
    )
    return any(lost.values())


class Switchable(Protocol):
    enabled: bool


class Half:
    """Runs an operation in half precision.

    Parameters
    ----------
    op : str
        The operation's name, as `qsim.operations.functions.name_of` gives it.
    format : str
        "float16" or "bfloat16".
    narrow : bool
        Whether sums inside an operation are kept in the format too, not in float32, and stop growing there.
    given_half : bool
        Whether files are made of the operation on tensors of the format, as where it falls back, and not made of it in float32 and
        converted: torch then writes what it computes in float32 itself.
    writes : bool
        Whether it writes its result into its first argument.
    written_in_float : bool
        Whether what it writes into was computed in float32: it reads that rounded, and has no other tensor to round it into.
    keys : tuple of str
        Of the quantizers that stand at the operation, or beside one that only moves values; none: of all.
    beside_operations : tuple of str
        Of one that only moves values, names of the operations that it is beside: its precision is theirs.
    """

    def __init__(
        self,
        op: str,
        format: str,
        *,
        narrow: bool,
        given_half: bool = False,
        writes: bool = False,
        written_in_float: bool = False,
        keys: tuple[str, ...] = (),
        beside_operations: tuple[str, ...] = (),
    ) -> None:
        self.op, self.format, self.narrow, self.writes, self.keys = op, format, narrow, writes, keys
        self.beside_operations = beside_operations
        self.written_in_float = written_in_float
        self.switches: tuple[Switchable, ...] = ()
        self.opened = narrow or (op in STORED and not (given_half and op in WIDENED))
        self.rounded: Callable[[Tensor], Tensor] | None = None  # what stands inside in place of rounding to the format

    def beside(self, quantizers: Mapping[str, Switchable]) -> Half:
        """The same, in half precision as long as any of its quantizers is on: an operation whose quantizers are off is in float32."""
        found = copy.copy(self)
        found.switches = tuple(quantizers[key] for key in self.keys or quantizers)
        return found

    def in_files(self, rounded: Callable[[Tensor], Tensor]) -> Half:
        """The same for files, whose runtimes have accumulators of their own: `rounded` stands where something is stored inside."""
        found = copy.copy(self)
        found.narrow, found.rounded = False, rounded
        found.opened = self.op in STORED
        return found

    def in_region(self, rounded: Callable[[Tensor], Tensor]) -> Half:
        """The same for files in which it is made of tensors of the format: `rounded` stands where one of integers becomes one."""
        found = copy.copy(self)
        found.rounded, found.opened = rounded, False
        return found

    def is_in_float(self, formats: Mapping[str, str]) -> bool:
        """Whether all that it is beside is in float32 while operations compute in these formats, by name."""
        return bool(self.beside_operations) and all(formats.get(name) == "float32" for name in self.beside_operations)

    @property
    def is_on(self) -> bool:
        """Whether it rounds."""
        return not self.switches or any(each.enabled for each in self.switches)

    def __call__(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_dynamo_compiling() and not self.is_on:  # Dynamo was told so in place of asking here
            return func(*args, **kwargs)
        if rounded := numbers_rounded(self.op, {**dict(enumerate(args)), **kwargs}, self._number, self._stored):
            args = tuple(rounded.get(i, value) for i, value in enumerate(args))
            kwargs = {slot: rounded.get(slot, value) for slot, value in kwargs.items()}
        if self.written_in_float:
            args[0].copy_(self._stored(args[0]))
        written_out = inside_of(self.op, args, kwargs) if self.opened else None
        if written_out is None:
            return func(*args, **kwargs)
        out = written_out(self._total)
        return args[0].copy_(out) if self.writes else out

    def _number(self, value: float) -> float:
        return nearest(value, self.format)

    def _total(self, added: Tensor, mean: Callable[[], Tensor], count: float) -> Tensor:
        if not self.narrow and count > 1:  # in an accumulator
            return added
        return self._stored(stopped(added, mean, count, self.format))

    def _stored(self, x: Tensor) -> Tensor:
        return ops.round_to_format(x, self.format) if self.rounded is None else self.rounded(x)
