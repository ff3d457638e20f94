"""What stands for a config: a `Config`, or the name of a preset."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import isfunction
from typing import Any

from qsim.config import presets
from qsim.config.config import Config
from qsim.config.profile import PROFILES

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
    raise TypeError(
        f"{caller}: got {_shown(given)} as config; expected a qsim.Config, such as qsim.int8(), or the name of a preset: {_names()}"
    )


def _preset(name: str, caller: str) -> Callable[..., Config]:
    if name in PRESETS:
        return PRESETS[name]
    if name in PROFILES:
        raise ValueError(f"{caller}: {name!r} is a target, not a preset; expected a config for it, such as qsim.int8(target={name!r})")
    close = get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"; close to it: {close[0]!r}" if close else ""
    raise ValueError(f"{caller}: got config={name!r}; expected a qsim.Config or the name of a preset: {_names()}{hint}")


def _names() -> str:
    return ", ".join(map(repr, PRESETS))


def _shown(given: Any) -> str:
    text = repr(given)
    return f"a {type(given).__name__}" if len(text) > 60 else text
