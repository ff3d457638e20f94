"""Runs of a model in which producers return numbers of our choice, and readers show what they get.

A producer returns random positive numbers in place of its own result, changed in a known way; each reader is shown what that has become,
and computes on what it got without the change. So all edges are tried in the same runs, and none disturbs another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qsim.graph.record.own_arguments import own_arguments
from qsim.runs.arguments import Arguments, tensors_in

Transform = Callable[[Tensor], Tensor]
# Of a producer and its call: whether its result is to be replaced.
Learn = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], bool]
# Of a reader: its path, its module and the call.
ReadCheck = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]
# Of a reader: its path, what it gets, and what it gets without changes.
See = Callable[[str, Tensor, Tensor], None]


class Probe:
    """A model with the producers and readers that are watched.

    Parameters
    ----------
    model : nn.Module
        In eval mode; the caller puts back what its forward changes.
    producers, readers : iterable of str
        Paths of modules.
    calls : sequence of (tuple, dict)
    learn, check : callable
        Called in the first run, which has no changes.

    Attributes
    ----------
    plain : dict of (int, str) to Tensor
        What each reader got in the first run, by number of the call.
    """

    def __init__(
        self,
        model: nn.Module,
        producers: Iterable[str],
        readers: Iterable[str],
        calls: Sequence[Arguments],
        learn: Learn = lambda *_: True,
        check: ReadCheck = lambda *_: None,
    ) -> None:
        self._model, self._calls = model, calls
        self._modules = dict(model.named_modules())
        self._seeds = {path: number for number, path in enumerate(producers)}
        self._readers = dict.fromkeys(readers)
        self._replaced: set[str] = set()
        self.plain: dict[tuple[int, str], Tensor] = {}

        def produce(number: int, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            if learn(path, module, args, kwargs, out):
                self._replaced.add(path)
            return self._numbers(number, path, out)

        def read(number: int, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = _input(args, kwargs)
            if isinstance(x, Tensor):
                self.plain[number, path] = x.clone()
            check(path, module, args, kwargs)

        self._run(produce, read)

    def run(self, changes: Mapping[str, Transform], see: See) -> list[Tensor]:
        """Run the calls with changes in what producers return. Returns the tensors that the model returns."""

        def produce(number: int, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
            out = self._numbers(number, path, out)
            return changes[path](out) if path in changes else out

        def read(number: int, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            plain = self.plain.get((number, path))
            if plain is None:
                return None
            see(path, _input(args, kwargs), plain)
            return ((plain.clone(), *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): plain.clone()})

        return self._run(produce, read)

    def _numbers(self, number: int, path: str, out: Any) -> Any:
        """In place of what a producer returns, the same in every run."""
        if path not in self._replaced:
            return out
        generator = torch.Generator(out.device).manual_seed(self._seeds[path] + len(self._seeds) * number)
        return torch.empty_like(out).uniform_(0.5, 1.5, generator=generator)

    def _run(self, produce: Callable[..., Any], read: Callable[..., Any]) -> list[Tensor]:
        results = []
        for number, (args, kwargs) in enumerate(self._calls):
            with self._hooks(number, produce, read):
                args, kwargs = own_arguments(self._model, (args, kwargs))[0]
                out = self._model(*args, **kwargs)
            results += [t.clone() for t in tensors_in(out)]
        return results

    @contextmanager
    def _hooks(self, number: int, produce: Callable[..., Any], read: Callable[..., Any]) -> Iterator[None]:
        def after(path: str) -> Callable[..., Any]:
            return lambda module, args, kwargs, out: produce(number, path, module, args, kwargs, out)

        def before(path: str) -> Callable[..., Any]:
            return lambda module, args, kwargs: read(number, path, module, args, kwargs)

        handles = [self._modules[path].register_forward_hook(after(path), with_kwargs=True) for path in self._seeds]
        handles += [self._modules[path].register_forward_pre_hook(before(path), with_kwargs=True) for path in self._readers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)
