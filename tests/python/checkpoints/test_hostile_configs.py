"""Whatever a quantization_config says: a checkpoint is read, or a FileFormatError says what is wrong."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import qsim
from qsim.errors import FileFormatError

pytest.importorskip("safetensors")
X = torch.randn(5, 64)
FLOAT8 = qsim.TensorSpec(dtype="float8_e4m3fn")
CASES = {
    "mixed": (qsim.fp8_block(32).override("2", weight=qsim.w4a16(group=32).weight, activation=None), "compressed-tensors"),
    "static": (qsim.w8a8_static(), "compressed-tensors"),
    "packed": (qsim.w4a16(group=32), "compressed-tensors"),
    "tiles": (qsim.fp8_block(32), "fp8"),
    "one scale": (dataclasses.replace(qsim.fp8_static(), weight=FLOAT8), "fp8"),
    "gptq": (qsim.w4a16(group=32), "gptq"),
    "awq": (qsim.w4a16(group=32), "awq"),
}
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    8.0,
    1e300,
    10**30,
    "",
    "re:[",
    "8",
    [],
    [[]],
    [1, 2],
    ["re:.*", "0"],
    [128, 128],
    {},
    {"a": {}},
    {"num_bits": 8},
)


def places(value, path=()):
    """Every value of a document."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in entries:
        yield from places(part, (*path, key))


def changed(document, path, value):
    document = copy.deepcopy(document)
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return document


@pytest.mark.parametrize("name", CASES)
def test_each_value_is_read_or_refused(name, tmp_path):
    config, format = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    sim = qsim.QuantSim(model, X, config)
    sim.calibrate([X], progress=False)
    sim.round_scales(torch.float16)
    sim.save_compressed(tmp_path, format)
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"].setdefault("kv_cache_scheme", None)
    document["quantization_config"].setdefault("transform_config", None)
    document["quantization_config"].setdefault("sparsity_config", None)
    expected = qsim.load_checkpoint(tmp_path).state_dict()
    refused = 0
    for path in places(document):
        for value in VALUES if path else ():
            (tmp_path / "config.json").write_text(json.dumps(changed(document, path, value)))
            try:
                read = qsim.load_checkpoint(tmp_path).state_dict()
            except FileFormatError:
                refused += 1
                continue
            assert all(torch.equal(t, read[key]) for key, t in expected.items()), (path, value)
    assert refused > 20


@pytest.mark.parametrize(
    "said", [{"transform_config": {"config_groups": {"R3": {}}}}, {"sparsity_config": {"format": "sparse-24-bitmask"}}]
)
def test_what_changes_the_numbers_and_is_not_read_is_refused(said, tmp_path):
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)).eval(), X, qsim.fp8_dynamic())
    sim.calibrate([X], progress=False)
    sim.save_compressed(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"] |= {"transform_config": {}, "sparsity_config": {"format": "dense"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert len(qsim.load_checkpoint(tmp_path).weights) == 1
    document["quantization_config"] |= said
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=f"{next(iter(said))} is .*; expected null"):
        qsim.load_checkpoint(tmp_path)
