"""Files from strangers: each defect is one error that names file, entry and what was expected."""

import copy
import json
import os
import re
import stat
import sys

import pytest
import torch
from aimet_files import AIMET, CACHE, V0_6_1, V1_0_0, V2_0_0, V2_1_0

import qsim
from qsim.files import Entry, fields, json_text

OWN = {
    "format": "qsim-encodings",
    "version": "1",
    "encodings": {
        "w": {
            **{"role": "parameter", "scale": [0.5, 0.25], "zero_point": [0, 0], "scale_dtype": "float32", "dtype": "int8"},
            **{"quant_min": -128, "quant_max": 127, "axis": 0, "block_size": None},
        }
    },
}


@pytest.fixture
def refused(tmp_path):
    def check(content, *words):
        path = tmp_path / "strange.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(qsim.FileFormatError) as caught:
            qsim.load_encodings(path)
        message = str(caught.value)
        assert message.startswith(f"qsim: '{path}': ")
        assert len(message) < 2000
        for word in words:
            assert word in message
        says_what_to_do = "expected", "Is the file complete?", "give load_encodings", "Delete the line", "write one scale", "does not fit"
        assert any(words in message for words in says_what_to_do)

    return check


def changed(document, at, value):
    """A copy of a document with one value replaced, or taken out (`...`)."""
    document = copy.deepcopy(document)
    node = document
    for step in at[:-1]:
        node = node[step]
    if value is ...:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return json.dumps(document)


# Text that is no document.


def test_not_utf8(refused):
    refused(b'{"version": "\xff"}', "byte 13 is not UTF-8")


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
def test_byte_order_mark(refused, codec):
    refused(json.dumps(V2_0_0).encode(codec), "byte order mark")


@pytest.mark.parametrize("text", ["", " \n", "[]", "null", "\x00", "images: 3f800000", '"{"', "\u00a0{}"])
def test_other_content(refused, text):
    refused(text, "the beginning is", "'{' of a JSON file")


@pytest.mark.parametrize("content", AIMET.values(), ids=AIMET)
def test_truncated_json(refused, content):
    text = json.dumps(content)
    for end in range(1, len(text), 37):
        refused(text[:end], "is no JSON", "line 1")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 200, "0." + "1" * 200])
def test_numbers_that_json_does_not_have(refused, number):
    refused(changed(V2_0_0, ("encodings", 0, "y_scale"), "number").replace('"number"', number))
    refused(changed(V2_0_0, ("quantizer_args",), "number").replace('"number"', number))


def test_keys_that_occur_twice(refused):
    refused('{"version": "2.0.0", "encodings": [], "encodings": []}', "'encodings' occurs 2 times")


@pytest.mark.parametrize("depth", [33, 1000, 2_000_000])
@pytest.mark.parametrize("open_close", ["[]", "{}"])
def test_nesting(refused, depth, open_close):
    inside = open_close[0] if open_close == "[]" else '{"a":'
    refused(
        '{"version": "2.0.0", "encodings": [], "x": ' + inside * depth + "1" + open_close[1] * depth + "}",
        f"nested {depth + 1} levels deep",
    )


def test_nesting_that_never_ends(refused):
    refused('{"version": "2.0.0", "x": ' + "[" * 3_000_000, "levels deep")


def test_brackets_in_strings_are_no_nesting(tmp_path):
    name = "[{" * 500 + '\\"[[[\\\\'
    (tmp_path / "file").write_text('{"version": "2.0.0", "encodings": [], "name": ["name"]}'.replace("name", name))
    assert len(qsim.load_encodings(tmp_path / "file").extra) == 1


def test_nesting_of_the_deepest_document_that_is_read_can_be_written(tmp_path):
    (tmp_path / "file").write_text('{"version": "2.0.0", "encodings": [], "x": ' + "[" * 31 + "]" * 31 + "}")
    file = qsim.load_encodings(tmp_path / "file")
    limit = sys.getrecursionlimit()
    assert limit < 10_000
    qsim.save_encodings(file, tmp_path / "file")
    assert qsim.load_encodings(tmp_path / "file") == file


def test_size(tmp_path):
    (tmp_path / "file").write_text(json.dumps(V2_0_0))
    size = (tmp_path / "file").stat().st_size
    assert qsim.load_encodings(tmp_path / "file", max_bytes=size).entries
    with pytest.raises(qsim.FileFormatError, match=rf"more than {size - 1} bytes; give load_encodings a larger max_bytes"):
        qsim.load_encodings(tmp_path / "file", max_bytes=size - 1)


def test_files_without_end_are_read_up_to_the_limit():
    with pytest.raises(qsim.FileFormatError, match="more than 4096 bytes"):
        qsim.load_encodings("/dev/zero", max_bytes=4096)


@pytest.mark.parametrize("text", ["[" + "0," * 200 + "0]", "[" * 20 + "{}," * 100, '"' * 1000])
def test_number_of_values(refused, monkeypatch, text):
    monkeypatch.setattr(json_text, "MAX_VALUES", 100)
    refused('{"version": "2.0.0", "x": ' + text + "}", "more than 100 values")


@pytest.mark.parametrize("content", [CACHE, *map(json.dumps, AIMET.values())], ids=["cache", *AIMET])
def test_number_of_entries(refused, monkeypatch, content):
    monkeypatch.setattr(fields, "MAX_ENTRIES", 1)
    refused(content, "entries; expected at most 1,")


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        qsim.load_encodings(tmp_path / "none")


# Documents that are not what their format asks for.


@pytest.mark.parametrize("version", ["0.4.0", "3.0.0", "1.0", 2, 2.0, None, ["2.0.0"], {}, "", "2.0.0\n"])
def test_unknown_versions(refused, version):
    refused(json.dumps({"version": version, "encodings": []}), "format and version: got", "'0.6.1'", "'2.1.0'")
    refused(json.dumps({"format": "qsim-encodings", "version": version, "encodings": {}}), "format and version: got")


def test_no_version(refused):
    refused('{"encodings": []}', "format and version")


@pytest.mark.parametrize(("version", "sections"), [("0.6.1", "'activation_encodings' and 'param_encodings'"), ("2.0.0", "'encodings'")])
def test_no_entries(refused, version, sections):
    refused(json.dumps({"version": version}), f"has no entries; expected {sections}")


@pytest.mark.parametrize("value", [None, 1, "text", [1], {"a": 1}, True])
@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_sections_of_a_wrong_type(refused, version, value):
    section = "encodings" if version == "2.0.0" else "param_encodings"
    refused(json.dumps({"version": version, section: value}))


@pytest.mark.parametrize("name", ["", "n" * 4097, "\ud800", 1, None, ["a"]])
def test_names(refused, name):
    refused(changed(V2_0_0, ("encodings", 0, "name"), name), "the name of an entry")
    if isinstance(name, str):
        refused(changed(V0_6_1, ("param_encodings", name), []), "the name of an entry")


def test_names_that_occur_twice(refused):
    refused(changed(V2_0_0, ("encodings", 0, "name"), "relu"), "entry 'relu': occurs twice")
    refused(changed(V1_0_0, ("param_encodings", 0, "name"), "input"), "entry 'input': occurs twice")
    refused(CACHE + "images: 3f800000\n", "entry 'images': occurs again in line 5")


A, P = "activation_encodings", "param_encodings"
WRONG = [
    # 0.6.1
    (V0_6_1, (A, "input"), {}, "'input'", "list with one object a channel"),
    (V0_6_1, (A, "input"), [], "'input'", "list with one object a channel"),
    (V0_6_1, (A, "input", 0), 1, "'input'", "an object"),
    (V0_6_1, (A, "input", 0, "scale"), ..., "'input'", "has no 'scale'"),
    (V0_6_1, (A, "input", 0, "scale"), -0.25, "'scale' holds -0.25", "positive"),
    (V0_6_1, (A, "input", 0, "scale"), 0, "'scale' holds 0"),
    (V0_6_1, (A, "input", 0, "scale"), 1e-60, "'scale' holds 1e-60", "float32"),
    (V0_6_1, (A, "input", 0, "scale"), 1e60, "'scale' holds 1e+60", "float32"),
    (V0_6_1, (A, "input", 0, "scale"), "0.25", "'scale' is '0.25'", "a number"),
    (V0_6_1, (A, "input", 0, "scale"), [0.25], "'scale' is [0.25]", "a number"),
    (V0_6_1, (A, "input", 0, "scale"), True, "'scale' is true"),
    (V0_6_1, (A, "input", 0, "offset"), 1, "'offset' is 1", "from -255 to 0"),
    (V0_6_1, (A, "input", 0, "offset"), -256, "'offset' is -256"),
    (V0_6_1, (A, "input", 0, "offset"), -1.5, "'offset' is -1.5", "an integer"),
    (V0_6_1, (A, "input", 0, "offset"), 10**30, "'offset' is 1000000000000000000000000000000"),
    (V0_6_1, (A, "input", 0, "bitwidth"), 3, "'bitwidth' is 3", "from 4 to 32"),
    (V0_6_1, (A, "input", 0, "bitwidth"), 33, "'bitwidth' is 33"),
    (V0_6_1, (A, "input", 0, "bitwidth"), True, "'bitwidth' is true"),
    (V0_6_1, (A, "input", 0, "dtype"), "bool", "'dtype' is 'bool'", "'int', 'float'"),
    (V0_6_1, (A, "input", 0, "is_symmetric"), "yes", "'is_symmetric' is 'yes'"),
    (V0_6_1, (A, "input", 0, "is_symmetric"), 1, "'is_symmetric' is 1"),
    (V0_6_1, (A, "input", 0, "min"), -24.0, "'min' is not offset * scale"),
    (V0_6_1, (A, "input", 0, "max"), 39.5, "'max' is not"),
    (V0_6_1, (A, "input", 0, "max"), ..., "has no 'max'"),
    (V0_6_1, (A, "input", 0, "max"), 38.5, "254 steps; expected 255"),
    (V0_6_1, (P, "conv.weight", 1, "bitwidth"), 8, "'conv.weight'", "differ in 'dtype' or 'bitwidth'"),
    (V0_6_1, (P, "conv.weight", 1, "is_symmetric"), "False", "'conv.weight'", "differ in 'is_symmetric'"),
    # 1.0.0
    (V1_0_0, (A, 0), [], "is []", "an object"),
    (V1_0_0, (A, 0, "enc_type"), "PER_ROW", "'enc_type' is 'PER_ROW'"),
    (V1_0_0, (A, 0, "enc_type"), ["PER_TENSOR"], "'enc_type' is ['PER_TENSOR']"),
    (V1_0_0, (A, 0, "dtype"), "int", "'dtype' is 'int'", "'INT'"),
    (V1_0_0, (A, 0, "bw"), 1, "'bw' is 1", "from 2 to 32"),
    (V1_0_0, (A, 0, "is_sym"), "True", "'is_sym' is 'True'"),
    (V1_0_0, (A, 0, "scale"), [0.25, 0.5], "flat lists of one length"),
    (V1_0_0, (A, 0, "scale"), 0.25, "flat lists of one length"),
    (V1_0_0, (A, 0, "scale"), [], "'scale' is []", "not empty"),
    (V1_0_0, (A, 0, "scale"), [None], "'scale' holds null"),
    (V1_0_0, (A, 0, "scale"), [-1.0], "'scale' holds -1"),
    (V1_0_0, (A, 0, "offset"), [5], "'offset' holds 5"),
    (V1_0_0, (P, 0, "enc_type"), "PER_TENSOR", "PER_TENSOR has 2 scales"),
    (V1_0_0, (P, 0, "scale"), [[0.5], [0.1]], "flat lists"),
    (V1_0_0, (P, 1, "block_size"), 0, "'block_size' is 0"),
    (V1_0_0, (P, 1, "block_size"), ..., "has no 'block_size'"),
    (V1_0_0, (P, 2, "per_block_int_scale"), [1, 2, 3], "as many numbers for each of the 2 scales"),
    (V1_0_0, (P, 2, "per_block_int_scale"), [0, 2, 3, 4], "'per_block_int_scale' holds 0"),
    (V1_0_0, (P, 2, "compressed_bw"), 9, "'compressed_bw' is 9", "from 2 to 8"),
    (V1_0_0, (P, 2, "is_sym"), False, "symmetric"),
    # 2.x
    (V2_0_0, ("encodings", 0, "output_dtype"), "int7", "'output_dtype' is 'int7'"),
    (V2_0_0, ("encodings", 0, "output_dtype"), "float16", "'output_dtype' is 'float16'"),
    (V2_0_0, ("encodings", 0, "y_scale"), ..., "has no 'y_scale'"),
    (V2_0_0, ("encodings", 0, "y_scale"), [0.5, 0.5], "axis=None, block_size=None and scales of shape (2,)"),
    (V2_0_0, ("encodings", 0, "y_scale"), {"x": [1], "x_scale": 1.0}, "version 2.1.0"),
    (V2_0_0, ("encodings", 0, "y_scale"), -1, "'y_scale' holds -1"),
    (V2_0_0, ("encodings", 0, "y_zero_point"), 256, "expected a number from 0 to 255"),
    (V2_0_0, ("encodings", 0, "y_zero_point"), -1, "expected a number from 0 to 255"),
    (V2_0_0, ("encodings", 0, "y_zero_point"), 2**31, "'y_zero_point' holds 2147483648"),
    (V2_0_0, ("encodings", 0, "y_zero_point"), "41", "'y_zero_point' holds '41'"),
    (V2_0_0, ("encodings", 3, "y_zero_point"), [0], "has the shape (1,); expected that of the scales, (2,)"),
    (V2_0_0, ("encodings", 3, "axis"), 8, "'axis' is 8"),
    (V2_0_0, ("encodings", 3, "axis"), ..., "axis=None"),
    (V2_0_0, ("encodings", 3, "y_scale"), 0.5, "has axis=-3, block_size=None and scales of shape ()"),
    (V2_0_0, ("encodings", 4, "y_scale"), [[0.1, 0.2], [0.3]], "lists of equal lengths"),
    (V2_0_0, ("encodings", 4, "y_scale"), [[0.1, 0.2], 0.3], "lists of equal lengths"),
    (V2_0_0, ("encodings", 4, "y_scale"), [0.1, [0.3]], "'y_scale' holds [0.3]"),
    (V2_0_0, ("encodings", 4, "y_scale"), [[[[[[[[[[1]]]]]]]]]], "at most 8 levels"),
    (V2_0_0, ("encodings", 4, "block_size"), -4, "'block_size' is -4"),
    (V2_0_0, ("encodings", 4, "axis"), ..., "has axis=None, block_size=4 and scales of shape (2, 2)"),
    (V2_0_0, ("encodings", 8, "per_channel_float_scale"), [[1.0, 2.0, 3.0]], "(1, 3) beside numbers of shape (2, 2)"),
    (V2_1_0, ("encodings", 10, "y_scale", "axis"), 2, "along axis 2"),
    (V2_1_0, ("encodings", 10, "y_scale", "x_scale"), [0.001, 0.002], "'x_scale' has the shape (2, 1)"),
    (V2_1_0, ("encodings", 10, "y_scale", "x_scale"), 0, "'x_scale' holds 0"),
    (V2_1_0, ("encodings", 10, "y_scale", "x"), ..., "has no 'x'"),
    (V2_1_0, ("encodings", 11, "y_scale", "x_zero_point"), [[[1]]], "'x_zero_point' has the shape (1, 1, 1)"),
    (V2_1_0, ("encodings", 11, "y_scale", "x_zero_point"), 7, "'y_scale' holds -"),
    # qsim
    (OWN, ("encodings", "w", "scale"), [0.5, 0.0], "'scale' holds 0"),
    (OWN, ("encodings", "w", "scale"), [0.5], "scale has shape (1,) and zero_point (2,)"),
    (OWN, ("encodings", "w", "scale"), 0.5, "scales of shape ()"),
    (OWN, ("encodings", "w", "zero_point"), [0, 200], "has the zero point 200"),
    (OWN, ("encodings", "w", "scale_dtype"), "float16", "'scale_dtype' is 'float16'"),
    (OWN, ("encodings", "w", "dtype"), "int0", "dtype='int0'"),
    (OWN, ("encodings", "w", "dtype"), 8, "'dtype' is 8"),
    (OWN, ("encodings", "w", "quant_max"), 128, "does not fit into int8"),
    (OWN, ("encodings", "w", "quant_max"), -128, "expected a number from -128 to -128"),
    (OWN, ("encodings", "w", "axis"), [0, 1], "axis=(0, 1), block_size=None"),
    (OWN, ("encodings", "w", "axis"), [[0]], "'axis' is a list of 1"),
    (OWN, ("encodings", "w", "axis"), "0", "'axis' holds '0'"),
    (OWN, ("encodings", "w", "block_size"), [4], "block_size=(4,)"),
    (OWN, ("encodings", "w", "role"), "bias", "'role' is 'bias'"),
    (OWN, ("encodings", "w", "colour"), "red", "a field is 'colour'"),
]


@pytest.mark.parametrize(
    ("document", "at", "value", "words"), [(d, a, v, w) for d, a, v, *w in WRONG], ids=[f"{i}-{c[1][-1]}" for i, c in enumerate(WRONG)]
)
def test_wrong_values(refused, document, at, value, words):
    entry = next((step for step in at[1:] if isinstance(step, str)), None) if not isinstance(at[1], int) else None
    refused(changed(document, at, value), *words, *([f"entry '{entry}'"] if isinstance(entry, str) else []))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name 3f800000", ["line 3", "'name: hhhhhhhh'"]),
        ("name: 3f8000", ["line 3", "Is the file complete?"]),
        ("name: 3f800000 ", ["line 3"]),
        ("name: 0x3f8000", ["line 3"]),
        ("name: \u0663f800000", ["line 3"]),
        (": 3f800000", ["the name of an entry"]),
        ("name: 3f800000: 3f800000", ["line 3", "write one scale in a line"]),
        ("name: 3f800000other: 3f800000", ["line 3", "two values"]),
        ("name: 00000000", ["'name'", "scale 0"]),
        ("name: 7fc00000", ["'name'", "holds nan"]),
        ("name: ff800000", ["'name'", "positive and finite"]),
        ("name: bf800000", ["'name'", "holds -1"]),
        ("a" * 5000 + ": 3f800000", ["the name of an entry"]),
    ],
)
def test_lines_of_a_cache(refused, line, words):
    refused(f"TRT-8501-EntropyCalibration2\ninput: 3f800000\n{line}\n", *words)


@pytest.mark.parametrize(
    "header", ["TRT-", "TRT-8501", "TRT-8501-", "TRT-85 01-Entropy", "TRT-8501-EntropyCalibration2 ", "TRT-8501-a: 3f800000"]
)
def test_headers_of_a_cache(refused, header):
    refused(f"{header}\ninput: 3f800000\n", "the first line", "TRT-<version>-<calibrator>")


# Writing.


@pytest.mark.parametrize("name", ["a: b", "a\nb", "a\r"])
def test_names_that_a_cache_cannot_hold(tmp_path, name):
    entry = Entry(qsim.Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), -128, 127), "activation")
    with pytest.raises(qsim.FileFormatError, match=re.escape(repr(name)) + ".*rename it"):
        qsim.save_encodings(qsim.EncodingFile({name: entry}), tmp_path / "cache", "tensorrt-cache")
    assert not list(tmp_path.iterdir())


def test_unknown_format(tmp_path):
    with pytest.raises(ValueError, match=r"format='aimet'; expected one to write: qsim, aimet-0\.6\.1"):
        qsim.save_encodings(qsim.EncodingFile({}), tmp_path / "file", "aimet")


def test_extra_that_json_cannot_hold(tmp_path):
    for extra in ({"x": float("nan")}, {"x": object()}, {"version": "7"}):
        with pytest.raises(qsim.FileFormatError, match=r"EncodingFile\.extra"):
            qsim.save_encodings(qsim.EncodingFile({}, extra=extra), tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        qsim.save_encodings(qsim.EncodingFile({}), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_have_the_permissions_of_other_files(tmp_path):
    (tmp_path / "other").write_text("")
    qsim.save_encodings(qsim.EncodingFile({}), tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_a_pattern_that_matches_no_entry():
    entry = Entry(qsim.Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), -128, 127))
    with pytest.raises(ValueError, match=r"'conv1\.weigth'; close to it: 'conv1\.weight'"):
        qsim.EncodingFile({"conv1.weight": entry}).without("conv1.weigth")


def test_a_role_that_there_is_not():
    with pytest.raises(ValueError, match="role='bias'"):
        Entry(None, "bias")
