"""TensorRT's calibration cache: what its calibrators write, and TensorRT up to 10.16 reads.

The first line is ``TRT-<version>-<calibrator>``, every other one ``name: hhhhhhhh``: a tensor, and the scale ``amax / 127`` as the eight
hexadecimal digits of a big-endian float32. Grids are int8 and symmetric. There are no weights in it: TensorRT takes their scales from their
values. TensorRT refuses a cache whose first line is of another version; `EncodingFile.version` is what is written there.

A name ends at ``": "``, so a name that contains it cannot be told from its value, and is refused in writing. In reading the last ``": "``
counts, unless another one has a value behind it too, as where a line break was lost.
"""

from __future__ import annotations

import re
import struct

import torch

from qsim.files.encoding_file import EncodingFile, Entry, role_of
from qsim.files.expressible import check_grid, encoding_of, leave_out
from qsim.files.fields import check_count, checked_name, make_encoding, positive
from qsim.files.file_place import FilePlace, shown
from qsim.numbers.encoding import Encoding

FORMAT = "tensorrt-cache"
VERSION, CALIBRATOR = "8501", "EntropyCalibration2"
_HEADER = re.compile(r"TRT-([0-9A-Za-z.]{1,16})-([0-9A-Za-z_]{1,64})")
_VALUE = re.compile(r"[0-9a-fA-F]{8}")
_INSIDE = re.compile(r": [0-9a-fA-F]{8}")


def is_cache(text: str) -> bool:
    return text.startswith("TRT-")


def read(text: str, place: FilePlace) -> EncodingFile:
    check_count(text.count("\n"), place)
    first, *lines = [line.removesuffix("\r") for line in text.split("\n")]
    header = _HEADER.fullmatch(first)
    if header is None:
        raise place.wanted("the first line", first, f"TRT-<version>-<calibrator>, as 'TRT-{VERSION}-{CALIBRATOR}'")
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, 2):
        if line:
            name, scale = _split(line, number, place)
            if name in entries:
                raise place.at(name).error(f"occurs again in line {number}; expected one scale a tensor")
            entries[name] = Entry(_encoding(scale, place.at(name)), "activation")
    return EncodingFile(entries, FORMAT, header[1], {"calibrator": header[2]})


def _split(line: str, number: int, place: FilePlace) -> tuple[str, float]:
    name, separator, digits = line.rpartition(": ")
    if not separator or not _VALUE.fullmatch(digits):
        raise place.wanted(f"line {number}", line, "'name: hhhhhhhh' with eight hexadecimal digits. Is the file complete?")
    if _INSIDE.search(name):
        raise place.error(f"line {number} is {shown(line)}, with two values: the name may end at either ': '; write one scale in a line")
    return checked_name(name, place), struct.unpack(">f", bytes.fromhex(digits))[0]


def _encoding(scale: float, place: FilePlace) -> Encoding:
    if scale == 0:
        raise place.error("has scale 0: the calibration saw only zeros. Delete the line, and the tensor stays in float")
    step = positive(torch.tensor(scale, dtype=torch.float64), place, "the value")
    return make_encoding(place, step, torch.tensor(0), -128, 127)


def write(file: EncodingFile, place: FilePlace) -> bytes:
    own = file.format == FORMAT
    version, calibrator = (file.version, file.extra.get("calibrator", CALIBRATOR)) if own else (VERSION, CALIBRATOR)
    header = f"TRT-{version}-{calibrator}"
    if not _HEADER.fullmatch(header):
        raise place.wanted("the first line", header, "TRT-<version>-<calibrator>: give EncodingFile a version of digits")
    entries = {name: entry for name, entry in file.entries.items() if role_of(name, entry) == "activation"}
    return "".join([header, "\n", *(_line(name, entry, place.at(name)) for name, entry in entries.items())]).encode()


def _line(name: str, entry: Entry, place: FilePlace) -> str:
    if ": " in name or any(character in name for character in "\r\n"):
        raise place.error("has ': ' or a line break in its name, where a cache ends the name; rename it, or use format='qsim'")
    encoding = encoding_of(name, entry, place)
    symmetric = encoding.dtype in ("int8", "uint8") and not encoding.scale.dim() and int(encoding.zero_point) - encoding.quant_min == 128
    if not symmetric:
        raise place.error(
            f"is {encoding.dtype} on [{encoding.quant_min}, {encoding.quant_max}] with {encoding.scale.numel()} scales and zero point "
            f"{encoding.zero_point.flatten()[0].item()}; a cache has int8 on [-128, 127] with one scale and zero point 0: make the "
            f"simulation with target='tensorrt', or {leave_out(name)}"
        )
    check_grid(encoding, place)
    return f"{name}: {struct.pack('>f', encoding.scale.item()).hex()}\n"
