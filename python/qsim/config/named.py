"""What stands for a config: a `Config`, or the name of a preset."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import isfunction

from qsim.config import presets
from qsim.config.config import Config
from qsim.config.profile import PROFILES
from qsim.numbers.spec import TensorSpec
from qsim.options import shown

_OTHER_NAMES = {  # as torch and other tools call them
    "w8a8": "int8",
    "w4a4": "int4",
    "w16a16": "int16",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "e4m3": "fp8",
    "fp4": "nvfp4",
}

PRESETS: dict[str, Callable[..., Config]] = {
    name: made
    for name, made in vars(presets).items()
    if isfunction(made) and made.__module__ == presets.__name__ and not name.startswith("_")
}


def config_of(given: Config | str | None, caller: str) -> Config:
    """The config that a user means: itself, that of a preset by its name ("int8"), or `qsim.int8` where nothing is given.

    Raises
    ------
    TypeError, ValueError
        It is something else, or the name of no preset: the message says what to write.

    Examples
    --------
    >>> config_of("w4a8", "QuantSim") == qsim.w4a8()
    True
    """
    if given is None:
        return presets.int8()
    if isinstance(given, Config):
        return given
    if isinstance(given, str):
        return _preset(given, caller)()
    name = getattr(given, "__name__", "")
    if PRESETS.get(name) is given:
        raise TypeError(f"{caller}: got the function qsim.{name} as config; expected the config that it makes: qsim.{name}()")
    hint = ", or of a spec for each role a Config: qsim.Config(weight=spec, activation=spec)" if isinstance(given, TensorSpec) else ""
    raise TypeError(
        f"{caller}: got {shown(given, longest=60)} as config; expected a qsim.Config, such as qsim.int8(), or the name of a preset: "
        f"{_names()}{hint}"
    )


def _preset(name: str, caller: str) -> Callable[..., Config]:
    if name in PRESETS:
        return PRESETS[name]
    if name in PROFILES:
        raise ValueError(f"{caller}: {name!r} is a target, not a preset; expected a config for it, such as qsim.int8(target={name!r})")
    if name.endswith((".json", ".encodings", ".yaml")):
        raise ValueError(
            f"{caller}: got config={name!r}, the name of a file; expected a qsim.Config: qsim.Config.from_json(Path({name!r}).read_text())"
        )
    plain = name.lower().removeprefix("qsim.").removesuffix("()")
    close = [_OTHER_NAMES[plain]] if plain in _OTHER_NAMES else get_close_matches(plain, PRESETS, n=1)
    hint = f"; close to it: {close[0]!r}" if close else ""
    raise ValueError(f"{caller}: got config={name!r}; expected a qsim.Config or the name of a preset: {_names()}{hint}")


def _names() -> str:
    return ", ".join(map(repr, PRESETS))
