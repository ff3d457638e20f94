"""What a simulation shows of its model: the signature of its forward, its attributes and methods, and its own `config`.

Trainers and generation loops ask a model for more than a call: ``inspect.signature(model.forward)``, ``model.generate``,
``model.config.use_cache = False``. What a simulation does not have itself is the model's, read and written.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from typing import Any, NoReturn

from torch import nn

from qsim.call_fit import tells_arguments
from qsim.config.config import Config
from qsim.graph.execute.other_exporters import refuse_script
from qsim.runs.sharding import refuse_replicas
from qsim.simulation import warned_of
from qsim.simulation.parameter_names import named_deeper

_FACE = "qsim.quantsim."  # the package of classes by topic


class AsTheModel(nn.Module):
    """Base of `QuantSim`: what it does not have itself is its model's.

    Attributes
    ----------
    waiting : frozenset of str
        Keys of the quantizers that a schedule has off for now.
    """

    model: nn.Module
    waiting: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        """Calls of public methods that do not fit are told as those of `QuantSim`, in whichever class by topic they lie."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith(_FACE):
            for name, method in list(vars(cls).items()):
                if isinstance(method, types.FunctionType) and not name.startswith("_"):
                    setattr(cls, name, tells_arguments(f"QuantSim.{name}")(method))

    def model_method(self, method: types.MethodType) -> Any:
        """What stands for a method of the model."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            model = _model_of(self)
            if model is None or not _shows(model, name):
                error.name, error.obj = name, self  # Python then says what is close to it
                raise
        found = getattr(model, name)
        bound = isinstance(found, types.MethodType) and found.__self__ is model
        return named_deeper(name, self.model_method(found)) if bound else found

    def __setattr__(self, name: str, value: Any) -> None:
        model = _model_of(self)
        if model is None or name.startswith("_") or _is_own(self, name) or not hasattr(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def _get_name(self) -> str:
        """The model's: Hugging Face's Trainer shifts labels or does not by what models call themselves."""
        model = _model_of(self)
        return type(self).__name__ if model is None else str(model._get_name())  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    @property
    def config(self) -> Config:
        """What is quantized and how; it was planned when the simulation was made. Whatever else it is asked for, or told, is the
        model's own ``config``, as Hugging Face's models have one: ``sim.config.use_cache = False``.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3), "w4a8")
        >>> sim.config.weight.bits
        4
        """
        config: Config = vars(self)["config"]
        return config if getattr(self.model, "config", None) is None else _BesideModelConfig(config, self.model)

    @config.setter
    def config(self, config: Config) -> NoReturn:
        raise AttributeError(
            "QuantSim: sim.config says what was planned when the simulation was made, and assigning it would change nothing. Make another "
            "simulation, QuantSim(model, example_inputs, config); the model's own config is sim.model.config"
        )

    def show_signature(self) -> None:
        """Have ``forward`` show the signature of the model's, on the instance and on its class."""
        self.__class__ = _with_signature(_plain(type(self)), type(self.model))  # type: ignore[arg-type]  # Module's __hash__

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no importable name
        return _rebuild, (_plain(type(self)),), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if type(self) is _plain(type(self)):  # unpickled; a copy has the class already
            self.show_signature()

    def __copy__(self) -> AsTheModel:
        made = type(self).__new__(type(self))
        made.__setstate__(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> AsTheModel:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        if self.waiting:
            made.waiting = frozenset()
            warned_of.waiting(self.waiting)
        return made

    def __prepare_scriptable__(self) -> NoReturn:  # what torch.jit.script asks for
        refuse_script()

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_replicas()


class _BesideModelConfig(Config):
    """A `Config` beside that of a model, which has what a `Config` does not have. To all who compare, replace or copy it is a `Config`."""

    def __init__(self, config: Config, model: nn.Module) -> None:
        vars(self).update(vars(config))
        vars(self)["_model"] = model

    @property  # type: ignore[misc]
    def __class__(self) -> type[Config]:  # type: ignore[override]  # what dataclasses compare and `dataclasses.replace` calls
        return Config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_model"].config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Config, name) or name in _fields():
            raise dataclasses.FrozenInstanceError(
                f"cannot assign to field {name!r}: it was planned when the simulation was made. Make another one, with "
                f"dataclasses.replace(sim.config, {name}=...); the model's own is sim.model.config"
            )
        setattr(vars(self)["_model"].config, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Config, tuple(getattr(self, name) for name in _fields())


@functools.cache
def _fields() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Config))


def _model_of(module: nn.Module) -> nn.Module | None:
    """The model of a simulation; None while it has none yet."""
    model: nn.Module | None = vars(module).get("_modules", {}).get("model")
    return model


def _shows(model: nn.Module, name: str) -> bool:
    """Whether a simulation hands on what its model has by this name. Of private names what its class says, as transformers asks for
    ``_is_stateful``; not what others leave on the instance, such as hooks and marks of what wraps it."""
    return hasattr(type(model) if name.startswith("_") else model, name) and not name.startswith("__")


def _is_own(module: nn.Module, name: str) -> bool:
    declared = _declared(_plain(type(module)))  # type: ignore[arg-type]  # Module's __hash__
    return name in vars(module) or name in vars(module)["_modules"] or hasattr(type(module), name) or name in declared


@functools.cache
def _declared(cls: type) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in inspect.get_annotations(base))


def _plain(cls: type) -> type:
    """The class of simulations that one with a signature was made of."""
    made: type = getattr(cls, "_plain", cls)
    return made


def _with_signature(cls: type, model: type[nn.Module]) -> type:
    """`cls`, whose forward shows the signature of that of `model`; `cls` itself where that has none. Each simulation has a class of its
    own, with a code of its own: Dynamo gives up at the ninth that is compiled with one code."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return cls
    before: types.FunctionType = cls.forward  # type: ignore[attr-defined]
    forward = functools.wraps(before)(types.FunctionType(before.__code__.replace(), before.__globals__, "forward", before.__defaults__))
    del forward.__wrapped__  # type: ignore[attr-defined]  # its signature is not this one
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls, "forward": forward})


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
