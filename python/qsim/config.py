from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qsim.spec import TensorSpec, checked_field

ROLES = ("weight", "activation")
BATCH_NORM_POLICIES = ("fold", "keep", "freeze")
INT8_WEIGHT = TensorSpec(symmetric=True, axis=0, method="minmax")
INT8_ACTIVATION = TensorSpec()

# What an override does to the spec of one role: puts another one in its place, switches it off (None), or changes fields.
Change = TensorSpec | Mapping[str, Any] | tuple[tuple[str, Any], ...] | None


@dataclass(frozen=True)
class Override:
    """A change of the specs of every site whose name matches a pattern.

    Parameters
    ----------
    pattern : str
        Glob as `fnmatch.fnmatchcase` takes it, matched with whole site names: "fc", "layer1.*", "*.conv[12]".
    op_type : str, optional
        Glob for the type of the operation, "conv2d" or "conv*"; by default any.
    weight, activation : TensorSpec, mapping or None
        A TensorSpec takes the place of the present one, None leaves the tensor in float, and a mapping (kept as a tuple of
        pairs) changes the fields that it names. A tensor left in float by what came before stays so unless a TensorSpec is given.
    """

    pattern: str
    op_type: str | None = None
    weight: Change = ()
    activation: Change = ()

    def __post_init__(self) -> None:
        for role in ROLES:
            change = getattr(self, role)
            if change is None or isinstance(change, TensorSpec):
                continue
            fields = tuple((name, checked_field(name, value)) for name, value in dict(change).items())
            object.__setattr__(self, role, fields)

    def matches(self, site: str, op_type: str | None) -> bool:
        """Whether the override is for this site."""
        if self.op_type is not None and not (op_type is not None and fnmatchcase(op_type, self.op_type)):
            return False
        return fnmatchcase(site, self.pattern)

    def apply(self, spec: TensorSpec | None, role: str) -> TensorSpec | None:
        """The spec of `role` ("weight" or "activation") after this override."""
        change: Change = getattr(self, role)
        if change is None or isinstance(change, TensorSpec):
            return change
        return None if spec is None else dataclasses.replace(spec, **dict(change))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a change of fields is an object, a whole spec is ``{"replace": {...}}``, switched off is null."""
        return {"pattern": self.pattern, "op_type": self.op_type, **{role: _change_to_json(getattr(self, role)) for role in ROLES}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Override:
        """Inverse of `to_dict`; unknown keys are an error that names them."""
        _check_keys(cls, fields)
        changes = {role: _change_from_json(fields[role]) for role in ROLES if role in fields}
        return cls(**{**fields, **changes})


@dataclass(frozen=True)
class Config:
    """What is quantized and how: a spec for weights, one for activations, and overrides by module.

    Parameters
    ----------
    weight : TensorSpec or None
        For weights; None leaves them in float. ``axis=0`` means the output channels: the planner moves it to where an operation
        has them.
    activation : TensorSpec or None
        For activations and inputs; None leaves them in float.
    overrides : tuple of Override
        Applied in order to the sites that they match, so where two change the same field the last match wins.
    bias : bool
        Simulate biases as int32 with scale ``input scale * weight scale``, as integer kernels hold them (docs/numerics.md, section 6).
        A bias whose input or weight has no integer scale stays in float.
    batch_norm : str, or mapping of glob to str
        What becomes of BatchNorm. "fold": it is folded into the layer beside it where that is possible. "keep": it stays and trains,
        and `QuantSim.fold_batch_norms` folds it afterwards. "freeze": it stays, with its running statistics in training too. A
        mapping (kept as a tuple of pairs) decides by the names of the modules: the last match wins, and what nothing matches is folded.

    Examples
    --------
    >>> config = int8().override("fc", bits=16).override("head.*", off=True)
    >>> config.spec_for("fc", "linear", "weight").bits
    16
    >>> config.spec_for("head.0", "conv2d", "activation") is None
    True
    >>> Config.from_json(config.to_json()) == config
    True
    """

    weight: TensorSpec | None = INT8_WEIGHT
    activation: TensorSpec | None = INT8_ACTIVATION
    overrides: tuple[Override, ...] = ()
    bias: bool = True
    batch_norm: str | Mapping[str, str] | tuple[tuple[str, str], ...] = "fold"

    def __post_init__(self) -> None:
        for role in ROLES:
            if not isinstance(getattr(self, role), TensorSpec | None):
                raise TypeError(f"Config: got {role}={getattr(self, role)!r}; expected a TensorSpec, or None to leave it in float")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for override in self.overrides:
            if not isinstance(override, Override):
                raise TypeError(f"Config: got {override!r} among overrides; expected Override (or use Config.override)")
        if not isinstance(self.bias, bool):
            raise TypeError(f"Config: got bias={self.bias!r}; expected True or False")
        if not isinstance(self.batch_norm, str):
            object.__setattr__(self, "batch_norm", tuple(dict(self.batch_norm).items()))
        for _, policy in self._batch_norm_policies():
            if policy not in BATCH_NORM_POLICIES:
                raise ValueError(f"Config: got batch_norm={policy!r}; expected one of {', '.join(map(repr, BATCH_NORM_POLICIES))}")

    def _batch_norm_policies(self) -> tuple[tuple[str, str], ...]:
        given = self.batch_norm
        return (("*", given),) if isinstance(given, str) else tuple(dict(given).items())

    def batch_norm_policy(self, name: str) -> str:
        """What becomes of the BatchNorm at this path: "fold", "keep" or "freeze"."""
        matching = [policy for pattern, policy in self._batch_norm_policies() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else "fold"

    def override(self, pattern: str, *, op_type: str | None = None, off: bool = False, **changes: Any) -> Config:
        """A config with one more override, which wins over the earlier ones.

        Parameters
        ----------
        pattern, op_type : str
            Which sites: see `Override`.
        off : bool
            Leave weights and activations of these sites in float.
        **changes
            `weight` and `activation` as in `Override`; every other name is a field of `TensorSpec`, changed for both.

        Returns
        -------
        Config

        Examples
        --------
        >>> config = int8().override("*", op_type="linear", bits=4, method="mse").override("fc", activation=None)
        """
        if off and changes:
            raise ValueError(f"Config.override: off=True leaves nothing to change; got {', '.join(changes)} too")
        roles: dict[str, Change] = dict.fromkeys(ROLES) if off else {role: changes.pop(role, ()) for role in ROLES}
        for role, change in roles.items():
            if change is not None and not isinstance(change, TensorSpec):
                roles[role] = {**changes, **dict(change)}
            elif changes:
                raise ValueError(f"Config.override: {role}={change!r} decides every field; got {', '.join(changes)} too")
        added = Override(pattern, op_type, **roles)
        return dataclasses.replace(self, overrides=(*self.overrides, added))

    def spec_for(self, site: str, op_type: str | None, role: str) -> TensorSpec | None:
        """How to quantize a tensor, with all overrides resolved.

        Parameters
        ----------
        site : str
            Name of the operation: "layer1.0.conv1", or "layer1.0.add" for a functional one; "input" for inputs of the model.
        op_type : str, optional
            Type of the operation, for overrides that ask for it.
        role : str
            "weight" or "activation".

        Returns
        -------
        TensorSpec or None
            None: leave it in float.
        """
        if role not in ROLES:
            raise ValueError(f"Config.spec_for: got role {role!r}; expected 'weight' or 'activation'")
        spec: TensorSpec | None = getattr(self, role)
        for override in self.overrides:
            if override.matches(site, op_type):
                try:
                    spec = override.apply(spec, role)
                except ValueError as error:
                    raise ValueError(f"Config: override {override.pattern!r} does not fit the {role} of {site!r}: {error}") from None
        return spec

    def to_json(self) -> str:
        """The config as JSON text; lossless."""
        specs = {role: None if getattr(self, role) is None else getattr(self, role).to_dict() for role in ROLES}
        fields = {**specs, "overrides": [override.to_dict() for override in self.overrides], "bias": self.bias}
        fields["batch_norm"] = self.batch_norm if isinstance(self.batch_norm, str) else dict(self.batch_norm)
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Inverse of `to_json`. What is left out has its default; an unknown key is an error that names it."""
        fields = json.loads(text)
        _check_keys(cls, fields)
        for role in ROLES:
            if fields.get(role) is not None:
                fields[role] = TensorSpec.from_dict(fields[role])
        if "overrides" in fields:
            fields["overrides"] = tuple(Override.from_dict(override) for override in fields["overrides"])
        return cls(**fields)


def _check_keys(cls: type[Config] | type[Override], fields: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            raise ValueError(f"{cls.__name__}: got unknown key {name!r}; expected one of {', '.join(known)}")


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
