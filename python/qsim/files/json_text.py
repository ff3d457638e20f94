"""Bytes of strangers as JSON, in bounded time and memory.

What `json` alone lets through and this does not: nesting as deep as the stack, keys that occur twice (the last one wins there), NaN,
Infinity and numbers that become infinite, integers of any length, and documents whose objects take thirty times the memory of their
text. Numbers of values and levels are counted in the text before anything is built from it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from qsim.files.file_place import FilePlace, shown

MAX_JSON_BYTES = 1 << 28
MAX_VALUES = 1 << 24  # 100 bytes each as Python objects
MAX_DEPTH = 32  # the formats need 10
_MAX_DIGITS = 128  # the grid of bfloat16 ends at a number of 39 digits
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class _Refused(ValueError):
    """What the hooks of `json` raise."""


_ZIP = b"PK\x03\x04"


def read_text(path: Path, place: FilePlace, max_bytes: int) -> str:
    """The text of a file of at most `max_bytes`, in UTF-8 without byte order mark."""
    with path.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise place.error(f"has more than {max_bytes} bytes; give load_encodings a larger max_bytes if that is right")
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise place.error("begins with a byte order mark; expected UTF-8 without one: save it as that")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if data.startswith(_ZIP):
            raise place.error("is a zip file, as torch.save writes; of a state dict: sim.load_state_dict(torch.load(path))") from None
        raise place.error(f"byte {error.start} is not UTF-8; expected a text file of encodings") from None


def parse(text: str, place: FilePlace) -> Any:
    """What the JSON document `text` holds."""
    _check_bounds(text, place)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise place.error(f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}. Is the file complete?") from None
    except _Refused as error:
        raise place.error(str(error)) from None


def dump(document: Any, place: FilePlace) -> bytes:
    """`document` as JSON text. Floats are written so that they read back to the same bits."""
    try:
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise place.error(f"JSON cannot hold what is to be written: {error}. Look at EncodingFile.extra") from None


def _check_bounds(text: str, place: FilePlace) -> None:
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    values = sum(map(text.count, ",[{"))
    if values > MAX_VALUES or unescaped.count('"') > 4 * (MAX_VALUES + 1):  # a pair is two strings
        raise place.error(f"has more than {MAX_VALUES} values; expected the encodings of one model")
    outside = "".join(unescaped.split('"')[::2])
    steps = outside.encode(errors="replace").translate(_BRACKETS, _NO_BRACKETS)
    if steps and (depth := int(torch.frombuffer(bytearray(steps), dtype=torch.int8).cumsum(0, dtype=torch.int32).max())) > MAX_DEPTH:
        raise place.error(f"is nested {depth} levels deep; expected at most {MAX_DEPTH}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Refused(f"the key {shown(key)} occurs {times} times in one object; expected once: which value counts is not known")
    return found


def _float(digits: str) -> float:
    value = float(_checked(digits))
    if math.isinf(value):
        raise _Refused(f"the number {shown(digits)} is beyond float64; expected a finite number")
    return value


def _integer(digits: str) -> int:
    return int(_checked(digits))


def _checked(digits: str) -> str:
    if len(digits) > _MAX_DIGITS:
        raise _Refused(f"a number has {len(digits)} digits; expected at most {_MAX_DIGITS}")
    return digits


def _constant(name: str) -> float:
    raise _Refused(f"holds {name}, which is no JSON; expected finite numbers")
