from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qsim.call_fit import tells_construction
from qsim.config import aimet
from qsim.config.float_plan import FloatPlan
from qsim.config.kv_cache import KVCache, kv_cache
from qsim.config.override import ROLES, Change, Override, SiteInfo
from qsim.config.profile import PROFILES, Profile, runtime_named
from qsim.numbers.spec import TensorSpec, check_keys
from qsim.options import check_flag, shown

BATCH_NORM_POLICIES = ("fold", "keep", "freeze")
INT8_WEIGHT = TensorSpec(symmetric=True, axis=0, method="minmax")
INT8_ACTIVATION = TensorSpec()


@tells_construction("What holds for a tensor is a field of its spec: weight=TensorSpec(bits=4)")
@dataclass(frozen=True)
class Config:
    """What is quantized and how: a spec for weights, one for activations, a target, and overrides by site.

    Parameters
    ----------
    weight : TensorSpec or None
        For weights; None leaves them in float. ``axis=0`` means the output channels: the planner moves it to where an operation
        has them.
    activation : TensorSpec or None
        For activations and inputs; None leaves them in float. In a format that stores its scales ("mxfp4", "nvfp4") they take them
        from each tensor, ``method="dynamic"``.
    overrides : tuple of Override
        Applied in order to the sites that they match, so where two change the same field the last match wins.
    bias : bool, optional
        Simulate biases as int32 with scale ``input scale * weight scale``, as integer kernels hold them (docs/numerics.md, section 6).
        A bias whose input or weight has no integer scale stays in float. None leaves it to the target, where input and weight have at
        most 16 bits together.
    target : str or Profile
        What is quantized where: "default", "onnxruntime", "tensorrt", "openvino", "coreml", "executorch" (docs/targets.md), or rules of
        own. The target decides fields of `weight` and `activation` too: for "tensorrt" both become symmetric.
    batch_norm : str, or mapping of glob to str
        What becomes of BatchNorm. "fold": it is folded into the layer beside it where that is possible. "keep": it stays and trains,
        and `QuantSim.fold_batch_norms` folds it afterwards. "freeze": it stays, with its running statistics in training too. A
        mapping (kept as a tuple of pairs) decides by the names of the modules: the last match wins, and what nothing matches is folded.
    kv_cache : int, TensorSpec, pair of these, or None
        What attention reads from a cache is stored as: for keys and values, or ``(keys, values)``, where None is float (kept as a
        `KVCache`). Bits stand for a scale per token and head from the token itself. With ``axis=-1`` and a method that is calibrated
        there is one scale per channel of `head_dim`, and with ``axis=None`` one for all. Not where the target quantizes these tensors
        anyway. See docs/language_models.md.

    Examples
    --------
    >>> config = int8().override("fc", bits=16).override("head.*", off=True)
    >>> config.spec_for("fc", "linear", "weight").bits
    16
    >>> config.spec_for("head.0", "conv2d", "activation") is None
    True
    >>> Config.from_json(config.to_json()) == config
    True
    >>> Config(target="tensorrt").activation.symmetric
    True
    """

    weight: TensorSpec | None = INT8_WEIGHT
    activation: TensorSpec | None = INT8_ACTIVATION
    overrides: tuple[Override, ...] = ()
    bias: bool | None = None
    target: str | Profile = "default"
    batch_norm: str | Mapping[str, str] | tuple[tuple[str, str], ...] = "fold"
    kv_cache: KVCache | TensorSpec | int | tuple[TensorSpec | int | None, TensorSpec | int | None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target, Profile):
            if PROFILES.get(self.target.name) == self.target:
                object.__setattr__(self, "target", self.target.name)
        else:
            object.__setattr__(
                self, "target", runtime_named(self.target, (self.weight, self.activation), "Config", PROFILES, "a Profile or one of")
            )
        for role in ROLES:
            if not isinstance(getattr(self, role), TensorSpec | None):
                raise TypeError(f"Config: got {role}={getattr(self, role)!r}; expected a TensorSpec, or None to leave it in float")
            object.__setattr__(self, role, _settled(self.profile.applied(getattr(self, role), role), role))
        if not isinstance(self.overrides, Sequence):
            raise TypeError(f"Config: got overrides={shown(self.overrides)}; expected a tuple of Override (or use Config.override)")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for override in self.overrides:
            if not isinstance(override, Override):
                raise TypeError(f"Config: got {override!r} among overrides; expected Override (or use Config.override)")
        object.__setattr__(self, "kv_cache", kv_cache(self.kv_cache))
        if not isinstance(self.bias, bool | None):
            raise TypeError(f"Config: got bias={shown(self.bias)}; expected True, False, or None to leave it to the target")
        if not isinstance(self.batch_norm, str | Mapping | tuple):
            raise TypeError(f"Config: got batch_norm={shown(self.batch_norm)}; expected a policy, or a mapping of globs to policies")
        if not isinstance(self.batch_norm, str):
            object.__setattr__(self, "batch_norm", tuple(dict(self.batch_norm).items()))
        for _, policy in self._batch_norm_policies():
            if policy not in BATCH_NORM_POLICIES:
                raise ValueError(f"Config: got batch_norm={shown(policy)}; expected one of {', '.join(map(repr, BATCH_NORM_POLICIES))}")

    def _batch_norm_policies(self) -> tuple[tuple[str, str], ...]:
        given = self.batch_norm
        return (("*", given),) if isinstance(given, str) else tuple(dict(given).items())

    def batch_norm_policy(self, name: str) -> str:
        """What becomes of the BatchNorm at this path: "fold", "keep" or "freeze".

        Examples
        --------
        >>> Config(batch_norm={"*": "keep", "stem.*": "fold"}).batch_norm_policy("stem.bn")
        'fold'
        """
        matching = [policy for pattern, policy in self._batch_norm_policies() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else "fold"

    @property
    def has_lone_norms(self) -> bool:
        """Whether BatchNorms that fold into no layer become layers of their own (`Profile.lone_norms`): with a scale for each channel their
        weights are exact in 8 bits.

        Examples
        --------
        >>> qsim.int8(target="onnxruntime").has_lone_norms, qsim.w4a8(target="onnxruntime").has_lone_norms
        (True, False)
        """
        weight, activation = self.weight, self.activation
        if not self.profile.lone_norms or weight is None or activation is None or weight.is_float or activation.is_float:
            return False
        return weight.bits == 8 and activation.bits == 8 and (weight.axis, weight.block_size) == (0, None)

    @property
    def profile(self) -> Profile:
        """The rules of the target.

        Examples
        --------
        >>> qsim.int8(target="tensorrt").profile.shared
        ('Concat',)
        """
        return self.target if isinstance(self.target, Profile) else PROFILES[self.target]

    def override(
        self,
        pattern: str | Callable[[SiteInfo], bool] = "*",
        *,
        op_type: str | None = None,
        position: str | None = None,
        one_call: bool = False,
        off: bool = False,
        **changes: Any,
    ) -> Config:
        """A config with one more override, which wins over the earlier ones.

        Parameters
        ----------
        pattern, op_type, position, one_call
            Which sites: a glob for names or a function of a `SiteInfo`, a glob for operations, "first" or "last", and whether the name of
            a layer is for its first call alone. See `Override`.
        off : bool
            Leave weights and activations of these sites in float. Beside half precision they read and return float32, and what reads
            their results rounds them.
        **changes
            `weight` and `activation` as in `Override`; every other name is a field of `TensorSpec`, changed for both. Fields given to one
            role quantize it where this config has left it in float (with what `qsim.int8` has besides); those for both do not.

        Returns
        -------
        Config

        Examples
        --------
        >>> config = int4().override(op_type="Gemm", method="mse").override("fc", activation=None)
        >>> config = config.override(position="first", bits=8).override(position="last", dtype="fp16")
        >>> config = config.override(lambda site: site.module == "Conv2d" and site.weight_shape[1] == 1, bits=8)  # depthwise
        """
        check_flag("Config.override", "off", off)
        check_flag("Config.override", "one_call", one_call)
        if off and changes:
            raise ValueError(f"Config.override: off=True leaves nothing to change; got {', '.join(changes)} too")
        starts = tuple(role for role in ROLES if changes.get(role) and not isinstance(changes[role], TensorSpec))
        roles: dict[str, Change] = dict.fromkeys(ROLES) if off else {role: changes.pop(role, ()) for role in ROLES}
        for role, change in roles.items():
            if isinstance(change, Mapping | tuple):
                roles[role] = {**changes, **dict(change)}
            elif changes:
                raise ValueError(f"Config.override: {role}={change!r} decides every field; got {', '.join(changes)} too")
        added = Override(pattern, op_type, position=position, starts=starts, one_call=one_call, **roles)
        if added.weight == added.activation == ():
            raise ValueError(
                f"Config.override: got nothing to change for {pattern!r}; expected fields of a TensorSpec (bits=4), weight=, activation= "
                "or off=True"
            )
        return dataclasses.replace(self, overrides=(*self.overrides, added))

    def with_plan(self, plan: FloatPlan) -> Config:
        """A config that leaves in float what a plan keeps: the simulation shows the cured model.

        In float16 and bfloat16 the kept operations read and return float32, and what reads their results rounds them.

        Parameters
        ----------
        plan : FloatPlan
            From ``qsim.doctor(...).plan`` or `QuantSim.float_plan`.

        Returns
        -------
        Config
            With an override for each name in `plan.keep`, which wins over the earlier ones.

        Examples
        --------
        >>> plan = qsim.Plan(("head",), "int8", "tensorrt-int8")
        >>> qsim.int8().with_plan(plan).spec_for("head", "linear", "weight") is None
        True
        """
        config = self
        for name in plan.keep:
            config = config.override(glob.escape(name), one_call=True, off=True)
        return config

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
        return self.spec_of(SiteInfo(site, op_type), role)

    def spec_of(self, site: SiteInfo | Sequence[SiteInfo], role: str) -> TensorSpec | None:
        """As `spec_for`, for a site of which more is known than name and operation; or for several that run as one: what is for any of
        them is for all.

        Examples
        --------
        >>> site = SiteInfo("stem", "conv2d", "Conv2d", (8, 3, 3, 3), is_first=True)
        >>> qsim.int4().override(position="first", bits=8).spec_of(site, "weight").bits
        8
        """
        sites = [site] if isinstance(site, SiteInfo) else site
        if role not in ROLES:
            raise ValueError(f"Config: got role {role!r}; expected 'weight' or 'activation'")
        default = INT8_WEIGHT if role == "weight" else INT8_ACTIVATION
        spec: TensorSpec | None = getattr(self, role)
        start = self.profile.applied(default, role)  # for fields that an override gives a tensor which the config leaves in float
        for number, override in enumerate((*self.profile.rules, *self.overrides)):
            if any(map(override.matches, sites)):
                try:
                    spec = override.apply(spec, role, start)
                    if number < len(self.profile.rules):
                        start = override.apply(start, role)  # None where the target leaves it in float
                except ValueError as error:
                    raise ValueError(f"Config: override {override} does not fit the {role} of {sites[0].name!r}: {error}") from None
        return self.profile.signed(_settled(spec, role), role)

    def to_json(self) -> str:
        """The config as JSON text; lossless. A ValueError where an override has a predicate, which is code."""
        specs = {role: None if getattr(self, role) is None else getattr(self, role).to_dict() for role in ROLES}
        fields = {**specs, "overrides": [override.to_dict() for override in self.overrides], "bias": self.bias}
        fields["target"] = self.target.to_dict() if isinstance(self.target, Profile) else self.target
        fields["batch_norm"] = self.batch_norm if isinstance(self.batch_norm, str) else dict(self.batch_norm)
        cache = kv_cache(self.kv_cache)
        fields["kv_cache"] = None if cache is None else [None if spec is None else spec.to_dict() for spec in cache]
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Inverse of `to_json`. What is left out has its default; an unknown key is an error that names it."""
        if not isinstance(text, str):
            cure = "; of a file Path(name).read_text()" if isinstance(text, Path) else ""
            raise TypeError(f"Config.from_json: got {shown(text)}; expected the text that Config.to_json() returns{cure}")
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            beginning = text if len(text) <= 60 else f"{text[:60]} ..."
            raise ValueError(
                f"Config.from_json: got {beginning!r}, which is no JSON ({error}); expected what Config.to_json() returns; of a file "
                "Path(name).read_text()"
            ) from error
        if not isinstance(fields, dict):
            raise ValueError(f"Config.from_json: got a JSON {type(fields).__name__}; expected the object that Config.to_json() returns")
        check_keys(cls, fields)
        for role in ROLES:
            if fields.get(role) is not None:
                fields[role] = TensorSpec.from_dict(fields[role])
        if fields.get("kv_cache") is not None:
            fields["kv_cache"] = tuple(None if spec is None else TensorSpec.from_dict(spec) for spec in fields["kv_cache"])
        if "overrides" in fields:
            fields["overrides"] = tuple(Override.from_dict(override) for override in fields["overrides"])
        if isinstance(fields.get("target"), dict):
            fields["target"] = Profile.from_dict(fields["target"])
        return cls(**fields)

    @classmethod
    def from_aimet(cls, source: str | Path | Mapping[str, Any], base: Config | None = None) -> Config:
        """The rules of an AIMET configuration file, as a config.

        Parameters
        ----------
        source : path or dict
            The JSON file that AIMET calls `config_file`, or what it holds.
        base : Config, optional
            Has what the file does not say: bits and methods of weights and activations, and overrides. By default 8 bits.

        Returns
        -------
        Config
            Its `target` is a `Profile` with the file's rules.

        Raises
        ------
        ValueError
            A key or value that is not part of AIMET's format: the message names file, key and what was expected.

        Examples
        --------
        >>> rules = {"defaults": {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True"}}}
        >>> Config.from_aimet(rules).weight.symmetric
        False
        """
        base = cls() if base is None else base
        return dataclasses.replace(base, bias=None, **aimet.read(source, base.weight, base.activation)._asdict())


def _settled(spec: TensorSpec | None, role: str) -> TensorSpec | None:
    """Weights have their scales before the model runs; activations in a block format get theirs from each tensor."""
    if spec is None or not spec.has_scale:
        return spec
    if role == "weight" and spec.is_dynamic:
        raise ValueError(
            "Config: got method='dynamic' for weights, whose values are known before; use method='minmax' for them "
            "(config.override(..., activation={'method': 'dynamic'}) leaves them alone)"
        )
    stored = role == "activation" and spec.scale_format is not None
    return dataclasses.replace(spec, method="dynamic", nonfinite="skip") if stored else spec
