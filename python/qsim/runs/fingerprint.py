"""Whether parameters are those that they were, without a copy of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.runs.mapped import MappedParameter
from qsim.runs.sharding import is_sharded

_ROW = 1024  # words


def fingerprint(parameter: Tensor) -> tuple[int, ...]:
    """Equal for equal contents: sums of words in which their places count, taken as a table by columns and by rows, and of what is left of
    words and of bytes. Of a shard (DTensor) those of this rank; empty without contents.

    Examples
    --------
    >>> fingerprint(torch.zeros(3))
    (0, 0, 0, 0)
    """
    if parameter.is_meta:
        return ()
    local: Tensor = parameter.to_local() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    data = local.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a file's tensors may lie anywhere
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    table, rest = words[: len(words) // _ROW * _ROW].view(-1, _ROW), words[len(words) // _ROW * _ROW :]
    by_table = (_placed(table.sum(0)), _placed(table.sum(1))) if len(table) else (0, 0)
    return *by_table, _placed(rest), _placed(data[whole:])


def _placed(words: Tensor) -> int:
    return int((words * torch.arange(1, len(words) + 1, device=words.device)).sum()) if len(words) else 0


def fingerprints(model: nn.Module) -> dict[str, tuple[int | str, ...]]:
    """Those of all parameters, and of the statistics of BatchNorms, by name. What lies in a file is not read: it is known by its place
    there; of classes of tensors that are not torch's the version is all that is asked.

    Examples
    --------
    >>> layer = nn.Linear(3, 2)
    >>> before = fingerprints(layer)
    >>> layer.bias.data += 1
    >>> [name for name, found in fingerprints(layer).items() if found != before[name]]
    ['bias']
    """
    norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    statistics = {f"{path}.{name}": b for path, m in norms.items() for name, b in m.named_buffers(recurse=False)}
    return {name: _known_by(t) for name, t in {**dict(model.named_parameters()), **statistics}.items()}


def _known_by(t: Tensor) -> tuple[int | str, ...]:
    if isinstance(t, MappedParameter):
        return str(t.stored.path), t.stored.begin, t._version
    return fingerprint(t) if type(t) in (Tensor, nn.Parameter) or is_sharded(t) else (t._version,)
