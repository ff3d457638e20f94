"""Reading and writing files of encodings in any format."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

from qsim.atomic import write_atomically
from qsim.call_fit import tells_arguments
from qsim.files import documents, tensorrt_cache
from qsim.files.encoding_file import UNQUANTIZED, EncodingFile, Entry
from qsim.files.fields import Fields, checked_name
from qsim.files.file_place import FilePlace, shown
from qsim.files.json_text import MAX_JSON_BYTES, dump, parse, read_text
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.options import check_whole

FORMATS = (*documents.LAYOUTS, tensorrt_cache.FORMAT)
_NAMES_FLOATS = ("aimet-0.6.1", "aimet-1.0.0", "qsim")


@tells_arguments("qsim.load_encodings")
def load_encodings(path: str | PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> EncodingFile:
    """Read a file of encodings. Its content tells the format.

    The file is data: nothing in it is run, and what it may hold is bounded before it is parsed (`max_bytes`, 16 million values, 32
    levels). Scales are rounded to float32, unless a file of qsim says float64.

    Parameters
    ----------
    path : path-like
        A file of qsim, of AIMET 0.6.1, 1.0.0, 2.0.0 or 2.1.0, by the names of PyTorch's modules too, or a calibration cache of TensorRT.
    max_bytes : int
        Refuse a file with more.

    Returns
    -------
    EncodingFile

    Raises
    ------
    FileFormatError
        The file is none of these, or not what its format asks for. The message names the entry and what was expected.
    OSError
        There is no such file, or it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mktemp(".cache")
    >>> _ = open(path, "w").write("TRT-8501-EntropyCalibration2\\ninput: 3c010204\\n")
    >>> file = load_encodings(path)
    >>> file.format, list(file.entries), file.entries["input"].encoding.max.item()
    ('tensorrt-cache', ['input'], 1.0)
    """
    check_whole("qsim.load_encodings", "max_bytes", max_bytes, least=1)
    place = FilePlace(str(path))
    text = read_text(Path(path), place, max_bytes)
    if tensorrt_cache.is_cache(text):
        return tensorrt_cache.read(text, place)
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise place.wanted("the beginning", text[:20], "'{' of a JSON file of encodings, or 'TRT-' of a calibration cache")
    return documents.read(Fields(parse(text, place), place))


@tells_arguments("qsim.save_encodings")
def save_encodings(file: EncodingFile, path: str | PathLike[str], format: str | None = None) -> None:
    """Write a file of encodings.

    In the format that the file was read from nothing is lost: what an `Encoding` does not hold is written as it was. Another format gets
    the encodings, and an error names the first one that it cannot express. What stays in float is left out where that is what a missing
    entry means: float16 and bfloat16 in AIMET 2.x and in calibration caches, "not quantized" in all but AIMET 0.6.1 and 1.0.0. A cache
    holds activations only, and nothing of `EncodingFile.extra`.

    Parameters
    ----------
    file : EncodingFile
    path : path-like
        Replaced as a whole, or left as it was.
    format : str, optional
        "qsim", "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0" or "tensorrt-cache"; that of `file` by default. AIMET's
        files by modules ("aimet-torch") are read, not written.

    Raises
    ------
    FileFormatError
        The format cannot hold an entry. Nothing is written.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mktemp(".json")
    >>> encoding = Encoding(torch.tensor(0.1), torch.tensor(-128, dtype=torch.int32), -128, 127)
    >>> save_encodings(EncodingFile({"relu": Entry(encoding, "activation")}), path, "aimet-0.6.1")
    >>> load_encodings(path).entries["relu"].encoding.zero_point.item()  # the same grid, of uint8
    0
    """
    format = file.format if format is None else format
    if format not in FORMATS:
        raise ValueError(f"save_encodings: got format={shown(format)}; expected one to write: {', '.join(FORMATS)}")
    place = FilePlace(str(path))
    for name in file.entries:
        checked_name(name, place)
    file = replace(file, entries={name: entry for name, entry in file.entries.items() if _is_said(entry, format)})
    data = tensorrt_cache.write(file, place) if format == tensorrt_cache.FORMAT else dump(documents.write(file, format, place), place)
    write_atomically(Path(path), data)


def _is_said(entry: Entry, format: str) -> bool:
    """Whether a format has an entry for this; otherwise it says the same by having none."""
    if entry.encoding is None:
        return entry.note != UNQUANTIZED or format in ("aimet-0.6.1", "aimet-1.0.0")
    float_format = FLOAT_FORMATS.get(entry.encoding.dtype)
    return float_format is None or float_format.scaled or format in _NAMES_FLOATS
