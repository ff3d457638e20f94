"""Overrides: how the sites of a model that are named, or described, differ from the rest of a config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qsim.call_fit import tells_construction
from qsim.numbers.float_format import FLOAT_FORMATS, SHORT_NAMES
from qsim.numbers.spec import TensorSpec, block_format, check_keys, checked_field
from qsim.operations.onnx_types import onnx_type
from qsim.options import shown

ROLES = ("weight", "activation")
POSITIONS = ("first", "last")
EXPERT = re.compile(r"\.experts\.\d+\.")  # in names of what belongs to one of numbered experts

# What an override does to the spec of one role: puts another one in its place, switches it off (None), or changes fields.
Change = TensorSpec | Mapping[str, Any] | tuple[tuple[str, Any], ...] | None

_FORMATS_BY_SHORT_NAME = {short: format for format, short in SHORT_NAMES.items() if format in FLOAT_FORMATS}
_INTEGER = re.compile(r"(u?)int([1-9]\d*)")


@dataclass(frozen=True)
class SiteInfo:
    """What a predicate of `Config.override` is told about an operation of the model.

    Parameters
    ----------
    name : str
        "layer1.0.conv1"; "layer1.0.add" for an operation that is no module; "input" for an input of the model.
    op : str, optional
        The torch function: "conv2d", "add"; "input" for an input of the model.
    module : str, optional
        Class of the torch.nn module that called it, "Conv2d"; None for a functional call.
    weight_shape : tuple of int, optional
        Shape of the parameter that it multiplies with; None without one.
    is_first, is_last : bool
        Whether it is the first, or the last, operation with a weight, in the order in which the example inputs met them, or another call
        of that layer. Inputs of the model count as first.
    layer : str, optional
        Of a later call of a layer the name of its first: "head" for "head_2".

    Examples
    --------
    >>> SiteInfo("features.0", "conv2d", "Conv2d", (64, 3, 7, 7), is_first=True).type
    'Conv'
    """

    name: str
    op: str | None = None
    module: str | None = None
    weight_shape: tuple[int, ...] | None = None
    is_first: bool = False
    is_last: bool = False
    layer: str | None = None

    @property
    def type(self) -> str | None:
        """The operation's ONNX type, "Conv" for "conv2d"; the function's name where ONNX has no such operator.

        Examples
        --------
        >>> SiteInfo("add", "add").type
        'Add'
        """
        return None if self.op is None else onnx_type(self.op)


@tells_construction("Config.override makes it: qsim.int8().override('fc', bits=4)")
@dataclass(frozen=True)
class Override:
    """A change of the specs of every site that it matches.

    Parameters
    ----------
    pattern : str or callable
        Glob as `fnmatch.fnmatchcase` takes it, matched with whole site names: ``"fc"``, ``"layer1.*"``, ``"*.conv[12]"``. The name of a
        layer is for all of its calls, ``"fc_2"`` for its second. Or a function of a `SiteInfo` that returns whether the site is meant;
        such an override cannot go into JSON.
    op_type : str, optional
        Glob for the type of the operation, as a torch function ("conv2d", "conv*"), a class of torch.nn ("Conv2d") or an ONNX operator
        ("Conv"); by default any.
    weight, activation : TensorSpec, mapping or None
        A TensorSpec takes the place of the present one, None leaves the tensor in float, and a mapping (kept as a tuple of
        pairs) changes the fields that it names. A tensor left in float by what came before stays so unless a TensorSpec is given,
        or its role is in `starts`.
        For `dtype` there are short names: "int4" and "uint8" say the bits and the sign too, "fp16", "bf16" and "fp8" are float
        formats, "mxfp4", "nvfp4" and the like say how blocks lie too, and "float" leaves the tensor in float.
    position : str, optional
        "first" or "last": only the first or last operation with a weight, as `SiteInfo` has them.
    starts : tuple of str
        Roles whose changes start from the spec of `qsim.int8` where the config has left the tensor in float: those that a call of
        `Config.override` named. What the target leaves in float stays so.
    one_call : bool
        Whether the name of a layer is for its first call alone.

    Examples
    --------
    >>> first = Override(position="first", weight={"bits": 8})
    >>> Config(overrides=(first,)).weight == Config().weight  # the rest stays as it is
    True
    >>> Override("head.*", activation=None) == Override.from_dict(Override("head.*", activation=None).to_dict())
    True
    """

    pattern: str | Callable[[SiteInfo], bool] = "*"
    op_type: str | None = None
    weight: Change = ()
    activation: Change = ()
    position: str | None = None
    starts: tuple[str, ...] = ()
    one_call: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.pattern, type):
            name = self.pattern.__name__
            raise TypeError(f"Override: got the class {name} as pattern; expected a glob of names; for all of a type op_type={name!r}")
        if not (isinstance(self.pattern, str) or callable(self.pattern)):
            raise TypeError(f"Override: got pattern={shown(self.pattern)}; expected a glob, or a function of a SiteInfo")
        if not isinstance(self.op_type, str | None):
            name = self.op_type.__name__ if isinstance(self.op_type, type) else "Conv"
            raise TypeError(f"Override: got op_type={shown(self.op_type)}; expected a glob for the type of an operation, such as {name!r}")
        if self.position not in (None, *POSITIONS):
            raise ValueError(f"Override: got position={shown(self.position)}; expected 'first', 'last' or None")
        if not isinstance(self.starts, tuple | list) or not set(self.starts) <= {*ROLES}:
            raise ValueError(f"Override: got starts={shown(self.starts)}; expected a tuple of {' and '.join(map(repr, ROLES))}")
        object.__setattr__(self, "starts", tuple(self.starts))
        for role in ROLES:
            change = getattr(self, role)
            if not isinstance(change, TensorSpec | Mapping | tuple | None):
                raise TypeError(
                    f"Override: got {role}={change!r}; expected a TensorSpec, fields of one ({role}={{'bits': 4}}), or None for float"
                )
            if change is not None and not isinstance(change, TensorSpec):
                object.__setattr__(self, role, _checked_changes(dict(change)))

    def matches(self, site: SiteInfo) -> bool:
        """Whether the override is for this site."""
        types = (site.op, site.type, site.module)
        if self.op_type is not None and not any(fnmatchcase(name, self.op_type) for name in types if name is not None):
            return False
        if self.position is not None and not (site.is_first if self.position == "first" else site.is_last):
            return False
        if callable(self.pattern):
            return bool(self.pattern(site))
        names = (site.name, None if self.one_call else site.layer)
        return any(fnmatchcase(name, self.pattern) for name in names if name is not None)

    def apply(self, spec: TensorSpec | None, role: str, start: TensorSpec | None = None) -> TensorSpec | None:
        """The spec of `role` ("weight" or "activation") after this override; fields that start one change `start` where there is none."""
        change: Change = getattr(self, role)
        if spec is None and role in self.starts:
            spec = start
        if change is None or isinstance(change, TensorSpec):
            return change
        changes = dict(change)
        if spec is not None and spec.is_float and "bits" in changes and "dtype" not in changes:
            raise ValueError(f"bits={changes['bits']} says nothing about {spec.dtype}; got no dtype: add dtype='int'")
        return None if spec is None else dataclasses.replace(spec, **changes)

    def __str__(self) -> str:
        pattern = self.pattern if isinstance(self.pattern, str) else getattr(self.pattern, "__name__", "predicate")
        narrowed = [f"{name}={value!r}" for name in ("op_type", "position") if (value := getattr(self, name)) is not None]
        return f"{pattern!r}" + (f" ({', '.join(narrowed)})" if narrowed else "")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a change of fields is an object, a whole spec is ``{"replace": {...}}``, switched off is null."""
        if not isinstance(self.pattern, str):
            raise ValueError(f"Override: the predicate {self} is code and has no JSON; use a glob, op_type or position instead")
        where = {"pattern": self.pattern, "op_type": self.op_type, "position": self.position}
        starts = {"starts": list(self.starts)} if self.starts else {}
        one_call = {"one_call": True} if self.one_call else {}
        return {**where, **{role: _change_to_json(getattr(self, role)) for role in ROLES}, **starts, **one_call}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Override:
        """Inverse of `to_dict`; unknown keys are an error that names them."""
        check_keys(cls, fields)
        changes = {role: _change_from_json(fields[role]) for role in ROLES if role in fields}
        return cls(**{**fields, **changes})


def _checked_changes(fields: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Legal changes of fields, with short names of formats written out; None where they ask for float."""
    dtype = fields.get("dtype")
    if dtype == "float":
        if len(fields) > 1:
            raise ValueError(f"Override: dtype='float' leaves nothing to change; got {', '.join(set(fields) - {'dtype'})} too")
        return None
    if isinstance(dtype, str) and (integer := _INTEGER.fullmatch(dtype)):
        implied = {"dtype": "int", "bits": int(integer[2]), "signed": not integer[1]}
        if clash := [name for name in ("bits", "signed") if name in fields and fields[name] != implied[name]]:
            raise ValueError(f"Override: dtype={dtype!r} says {clash[0]}={implied[clash[0]]}; got {clash[0]}={fields[clash[0]]} too")
        fields = {**fields, **implied, "scale_format": None, "super_block": None}
    elif isinstance(dtype, str) and (implied := block_format(dtype, fields.get("axis"), fields.get("block_size"))):
        fields = {**fields, **implied}
    elif dtype in _FORMATS_BY_SHORT_NAME:
        fields = {**fields, "dtype": _FORMATS_BY_SHORT_NAME[dtype]}
    return tuple((name, checked_field(name, value)) for name, value in fields.items())


def _change_to_json(change: Change) -> dict[str, Any] | None:
    if isinstance(change, TensorSpec):
        return {"replace": change.to_dict()}
    return None if change is None else dict(change)


def _change_from_json(fields: Mapping[str, Any] | None) -> Change:
    if fields is not None and "replace" in fields:
        if len(fields) > 1:
            raise ValueError(f"Override: 'replace' decides every field; got {', '.join(fields)}")
        return TensorSpec.from_dict(fields["replace"])
    return fields
