"""Checkpoint folders, written tensor by tensor: in shards as Hugging Face numbers them, and nothing of what was written held."""

import json
import weakref

import pytest
import torch

import qsim
from qsim.checkpoints import load_checkpoint, write_packed

safetensors = pytest.importorskip("safetensors.torch")
COUNT, BYTES = 6, 4096 * 4  # each weight takes 16 KiB with its scales


def weight(seed, columns=256):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (128, columns), dtype=torch.int8, generator=generator)
    return qsim.PackedWeight(
        integers, torch.rand(128, columns // 64, generator=generator).half(), torch.zeros(128, columns // 64).int(), 4, 64
    )


def named(count=COUNT):
    norms = {f"layers.{i}.norm.weight": torch.full((128,), float(i)) for i in range(count)}
    return norms, {f"layers.{i}.fc.weight": weight(i) for i in range(count)}


def entries(count=COUNT):
    for i in range(count):
        yield f"layers.{i}.norm.weight", torch.full((128,), float(i))
        yield f"layers.{i}.fc.weight", weight(i)


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq"])
def test_shards_are_read_as_one_file_is(tmp_path, format):
    write_packed(tmp_path / "pieces", entries(), format, {"model_type": "own"}, shard_bytes=3 * BYTES)
    norms, weights = named()
    qsim.save_checkpoint(qsim.Checkpoint(weights, norms, format, {"model_type": "own"}), tmp_path / "whole", format)
    assert (tmp_path / "whole" / "config.json").read_bytes() == (tmp_path / "pieces" / "config.json").read_bytes()

    files = sorted(path.name for path in (tmp_path / "pieces").glob("*.safetensors"))
    assert len(files) > 1
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    whole = safetensors.load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "pieces" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert set(index["weight_map"]) == set(whole)
    for file in files:
        held = safetensors.load_file(tmp_path / "pieces" / file)
        assert sum(t.nbytes for t in held.values()) <= 3 * BYTES
        for name, t in held.items():
            assert index["weight_map"][name] == file
            assert torch.equal(t, whole[name])

    found = load_checkpoint(tmp_path / "pieces")
    assert found.weights.keys() == weights.keys()
    assert all(torch.equal(found.weights[name].dequantize(), weights[name].dequantize()) for name in weights)
    assert all(torch.equal(found.tensors[name], norms[name]) for name in norms)


def test_what_was_written_is_not_held(tmp_path):
    alive: list[weakref.ref] = []
    most = 0

    def one_by_one():
        nonlocal most
        for name, entry in entries(20):
            alive.append(weakref.ref(entry.integers if isinstance(entry, qsim.PackedWeight) else entry))
            most = max(most, sum(ref() is not None for ref in alive))
            yield name, entry
            del entry

    write_packed(tmp_path, one_by_one(), "compressed-tensors", {}, shard_bytes=2 * BYTES)
    assert most <= 6  # norms of a shard, and what is being packed: of 40


def test_a_folder_of_before_is_replaced_whole_or_not_at_all(tmp_path):
    write_packed(tmp_path, entries(), "awq", {}, shard_bytes=2 * BYTES)
    (tmp_path / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refused():
        yield from entries(3)
        yield "odd.weight", weight(0, columns=192)
        yield "other.weight", qsim.PackedWeight(*(getattr(weight(1), part) for part in ("integers", "scale", "zero_point")), 3, 64)

    with pytest.raises(qsim.FileFormatError, match=r"'other\.weight' has 3 bits"):
        write_packed(tmp_path, refused(), "awq", {}, shard_bytes=2 * BYTES)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def fails():
        yield from entries(3)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_packed(tmp_path / "new", fails(), "awq", {}, shard_bytes=2 * BYTES)
    assert not (tmp_path / "new").exists()

    write_packed(tmp_path, entries(2), "awq", {})
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    (tmp_path / "plain").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert load_checkpoint(tmp_path).weights.keys() == {"layers.0.fc.weight", "layers.1.fc.weight"}


def test_weights_that_are_packed_otherwise_than_the_first_are_named(tmp_path):
    def two_sizes():
        yield "a.weight", weight(0)
        yield "b.weight", qsim.PackedWeight(weight(1).integers, torch.ones(128, 2).half(), torch.zeros(128, 2).int(), 4, 128)

    with pytest.raises(qsim.FileFormatError, match=r"'b\.weight' has 4 bits in groups of 128, others 4 in groups of 64"):
        write_packed(tmp_path / "gptq", two_sizes(), "gptq", {})
    assert not (tmp_path / "gptq").exists()


def saved(folder, seed=0):
    write_packed(folder, [("fc.weight", weight(seed)), ("fc.bias", torch.ones(128))], "awq", {})
    return safetensors.load_file(folder / "model.safetensors")


def test_files_that_would_be_read_beside_what_is_written_are_named_before_anything_is(tmp_path):
    old = saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "quantized.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(qsim.FileFormatError, match=r"has 'quantized\.safetensors', which readers would take.*move them"):
        saved(tmp_path, seed=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    safetensors.save_file(old, tmp_path / "model.safetensors")
    with pytest.raises(qsim.FileFormatError, match=r"'fc\..*' is in 'model\.safetensors' and in 'quantized\.safetensors'"):
        load_checkpoint(tmp_path)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("own", "named", "message"),
    [
        ({}, {"gone.weight": TWO}, rf"has 'gone\.weight' in '{TWO}', and it is in no file"),
        ({}, {"fc.scales": TWO}, rf"has 'fc\.scales' in '{TWO}', and it is in '{ONE}'"),
        ({TWO: "fc.scales"}, {}, rf"'fc\.scales' is in '{ONE}' and in '{TWO}'"),
        ({"model.safetensors": "other"}, {}, r"'model\.safetensors' lies beside 'model\.safetensors\.index\.json', which does not name it"),
    ],
)
def test_the_index_and_the_files_say_the_same(own, named, message, tmp_path):
    tensors = saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / ONE)
    safetensors.save_file({"norm.weight": torch.ones(1)}, tmp_path / TWO)
    index = {**dict.fromkeys(tensors, ONE), "norm.weight": TWO}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load_checkpoint(tmp_path).tensors.keys() == {"fc.bias", "norm.weight"}
    for file, name in own.items():
        safetensors.save_file({"norm.weight": torch.ones(1), name: torch.ones(2)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index, **named}}))
    with pytest.raises(qsim.FileFormatError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq"])
def test_a_weight_that_is_there_packed_and_in_float_is_refused(format, tmp_path):
    write_packed(tmp_path, [("fc.weight", weight(0))], format, {})
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({**tensors, "fc.weight": torch.zeros(128, 256)}, tmp_path / "model.safetensors")
    with pytest.raises(qsim.FileFormatError, match=r"fc.*in float"):
        load_checkpoint(tmp_path)
