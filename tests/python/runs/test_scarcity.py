"""What the system says of its memory, and of a container's; and what is kept of a simulation where it is scarce."""

import gc

import pytest
import torch
from torch import nn

import qsim
from qsim.runs import scarcity

GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system as it is told: KiB of the machine, and files of its control group."""

    def told(total, available, **files):
        (tmp_path / "meminfo").write_text(f"MemTotal:  {total >> 10} kB\nMemFree:  1 kB\nMemAvailable:  {available >> 10} kB\n")
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".", 1)
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")

    monkeypatch.setattr(scarcity, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(scarcity, "_CONTAINER", tmp_path)
    return told


@pytest.mark.parametrize(("free", "expected"), [(3 * GIB, False), (2 * GIB, False), (2 * GIB - 4096, True), (0, True)])
def test_a_quarter_of_the_machine(system, free, expected):
    system(8 * GIB, free)
    assert scarcity.is_scarce() is expected


@pytest.mark.parametrize(
    ("limit", "used", "files", "expected"),
    [
        ("max", 7 * GIB, 0, False),
        (4 * GIB, 2 * GIB, 0, False),
        (4 * GIB, 3.5 * GIB, 0, True),
        (4 * GIB, 3.5 * GIB, GIB, False),
        (2**63 - 4096, 7 * GIB, 0, False),
    ],
)
@pytest.mark.parametrize("names", [("max", "current"), ("limit_in_bytes", "usage_in_bytes")])
def test_a_quarter_of_the_container(system, names, limit, used, files, expected):
    folder = "" if names[0] == "max" else "memory__"
    statistics = f"anon 5\n{'' if names[0] == 'max' else 'total_'}inactive_file {int(files)}\nactive_file 7"
    told = zip((*names, "stat"), (limit, used if limit == "max" else int(used), statistics), strict=True)
    system(16 * GIB, 9 * GIB, **{f"{folder}memory_{name}": text for name, text in told})
    assert scarcity.is_scarce() is expected


def test_where_the_system_says_nothing_there_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(scarcity, "_MACHINE", tmp_path / "none")
    assert not scarcity.is_scarce()


def held():
    """Bytes of all tensors."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)
    }
    return sum(storages.values())


def test_where_memory_is_scarce_no_second_model_is_kept(system):
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).eval()
    size = sum(p.nbytes for p in model.parameters())
    x = torch.randn(3, 512)
    sim = qsim.QuantSim(model, x, qsim.w4a16(group=128), inplace=True)
    sim.calibrate([x], progress=False)
    system(8 * GIB, GIB)
    with torch.no_grad():
        before = held()
        scarce = sim(x)
        assert held() - before < size / 8
        system(8 * GIB, 4 * GIB)
        assert torch.equal(sim(x), scarce)
        assert held() - before >= size * 3 / 4  # the head stays in float
