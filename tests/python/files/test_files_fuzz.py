"""Whatever is done to a file, reading it gives encodings or a FileFormatError, and what was read can be written."""

import json

import torch
from aimet_files import AIMET, CACHE, TORCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qsim
from qsim.files import FORMATS, Entry

SETTINGS = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
ENTRIES = {
    "a": Entry(qsim.Encoding(torch.tensor(0.5), torch.tensor(3, dtype=torch.int32), -128, 127), "activation"),
    "w": Entry(qsim.Encoding(torch.tensor([[0.5, 0.25]]), torch.zeros(1, 2, dtype=torch.int32), -8, 7, 1, 4, "int4"), "parameter"),
    "t": Entry(qsim.Encoding(torch.tensor([[0.5, 0.25]]), torch.zeros(1, 2, dtype=torch.int32), -8, 7, (0, 1), (4, 4), "int4")),
}
LEAVES = st.one_of(
    *(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-300, 300),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    st.sampled_from(
        ["int8", "uint4", "float", "FLOAT", "True", "PER_BLOCK", "LPBQ", "2.0.0", "2.1.0", "qsim-encodings", 2**31, 2**63, 10**40, 1e-320]
    ),
)
FIELDS = [
    "scale",
    "offset",
    "name",
    "axis",
    "block_size",
    "y_scale",
    "y_zero_point",
    "x",
    "x_scale",
    "per_block_int_scale",
    "encodings",
    "format",
]
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), v, max_size=3), max_leaves=8)


def documents(tmp_path):
    """A valid document of every JSON format."""
    qsim.save_encodings(qsim.EncodingFile(ENTRIES), tmp_path / "own")
    return [*AIMET.values(), TORCH, json.loads((tmp_path / "own").read_text())]


def places(node, at=()):
    """The way to every value of a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, value in items:
        yield (*at, step)
        yield from places(value, (*at, step))


def reads_or_refuses(path):
    try:
        file = qsim.load_encodings(path)
    except qsim.FileFormatError as error:
        message = str(error)
    else:
        message = f"'{path}'"
        if file.format in FORMATS and not any(": " in name for name in file.entries):  # which a cache is read with, but not written
            qsim.save_encodings(file, path)
            assert qsim.load_encodings(path) == file
        for format in FORMATS:
            try:
                qsim.save_encodings(file, path, format)
            except qsim.FileFormatError:
                continue
            assert qsim.load_encodings(path).format == format
    assert f"'{path}'" in message
    assert len(message) < 2000


@SETTINGS
@given(data=st.data())
def test_values_replaced_taken_out_and_added(tmp_path, data):
    document = json.loads(json.dumps(data.draw(st.sampled_from(documents(tmp_path)), label="document")))
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        ways = list(places(document))
        *way, last = data.draw(st.sampled_from(ways), label="place") if ways else ("version",)
        node = document
        for step in way:
            node = node[step]
        change = data.draw(st.sampled_from(["replace", "replace", "take out", "add"]), label="change")
        if change == "replace":
            node[last] = data.draw(VALUES, label="value")
        elif change == "take out":
            del node[last]
        elif isinstance(node, dict):
            node[data.draw(st.sampled_from(FIELDS), label="field")] = data.draw(VALUES, label="value")
        else:
            node.append(data.draw(VALUES, label="value"))
    (tmp_path / "file").write_text(json.dumps(document))
    reads_or_refuses(tmp_path / "file")


@SETTINGS
@given(data=st.data())
def test_bytes_changed_cut_and_inserted(tmp_path, data):
    texts = [CACHE, *map(json.dumps, documents(tmp_path))]
    content = bytearray(data.draw(st.sampled_from(texts), label="text").encode())
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        begin = data.draw(st.integers(0, len(content)), label="begin")
        end = min(len(content), begin + data.draw(st.integers(0, 40), label="length"))
        pieces = st.binary(max_size=6) | st.sampled_from(
            [b"NaN", b"[" * 40, b'"', b"\\", b"1" * 300, b"1e999", b"\xef\xbb\xbf", bytes(content[begin:end])]
        )
        content[begin : data.draw(st.sampled_from([begin, end, len(content)]), label="end")] = data.draw(pieces, label="piece")
    (tmp_path / "file").write_bytes(content)
    reads_or_refuses(tmp_path / "file")


@SETTINGS
@given(
    content=st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: ("TRT-8501-EntropyCalibration2\n" + text).encode(errors="replace"))
)
def test_anything(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    reads_or_refuses(tmp_path / "file")
