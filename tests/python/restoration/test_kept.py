"""`restore(path=)`: what was found before the process was cut off is not looked for again, and nothing else is taken for it."""

import pytest
import torch
from restorable import batches_of, calibrated, digits_net

import qsim


class CutOffError(Exception):
    pass


def cut_off_after(count, monkeypatch):
    """Has restorations end after so many weights."""
    from qsim.restoration import weight_by_weight

    choose, calls = weight_by_weight.choose, []

    def counted(sim, key, *args):
        if len(calls) == count:
            raise CutOffError
        calls.append(key)
        return choose(sim, key, *args)

    monkeypatch.setattr(weight_by_weight, "choose", counted)
    return calls


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_goes_on_where_it_was(tmp_path, monkeypatch, count):
    expected = calibrated()
    whole = expected.restore(batches_of(8), progress=False)
    sim = calibrated()
    with monkeypatch.context() as patch:
        if count < 4:
            cut_off_after(count, patch)
            with pytest.raises(CutOffError):
                sim.restore(batches_of(8), path=tmp_path / "found", progress=False)
        else:
            sim.restore(batches_of(8), path=tmp_path / "found", progress=False)
            sim = calibrated()
    looked_at = cut_off_after(4, monkeypatch)
    report = sim.restore(batches_of(8), path=tmp_path / "found", progress=False)
    assert len(looked_at) == 4 - count
    assert sorted(report.weights, key=str) == sorted(whole.weights, key=str)
    assert report.after == whole.after
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, sim.state_dict()[name]), name
    assert any("path=" in note for note in report.notes) == (count > 0)


def test_weights_that_were_skipped_stay_skipped(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(-1)  # nothing but zeros reaches the second layer
    data = [torch.randn(8, 4) for _ in range(4)]
    reports = []
    for _ in range(2):
        sim = calibrated(model, qsim.w4a8(), data)
        reports.append(sim.solve_weights(data, path=tmp_path, progress=False))
    assert reports[0].skipped == reports[1].skipped != {}


def test_what_belongs_to_another_simulation_is_refused(tmp_path):
    calibrated().restore(batches_of(8), path=tmp_path, progress=False)
    other = digits_net()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1e-3
    for sim in (calibrated(other), calibrated(config=qsim.w4a8()), calibrated(data=batches_of(8, seed=2))):
        state = {name: t.clone() for name, t in sim.state_dict().items()}
        with pytest.raises(ValueError, match="another model, other encodings, or with other options"):
            sim.restore(batches_of(8), path=tmp_path, progress=False)
        assert all(torch.equal(t, sim.state_dict()[name]) for name, t in state.items())
    with pytest.raises(ValueError, match="other options"):
        calibrated().solve_weights(batches_of(8), path=tmp_path, progress=False)


@pytest.mark.parametrize("damage", ["truncated", "other", "nonsense", "json"])
def test_damaged_files_are_named(tmp_path, damage):
    calibrated().restore(batches_of(8), path=tmp_path, progress=False)
    first, second, *_ = sorted(tmp_path.glob("*.pt"))
    if damage == "truncated":
        first.write_bytes(first.read_bytes()[:-200])
    elif damage == "other":
        first.write_bytes(second.read_bytes())
    elif damage == "nonsense":
        torch.save({"key": "0.weight", "row": {}}, first)
    else:
        first = tmp_path / "restoration.json"
        first.write_text("{")
    with pytest.raises(qsim.FileFormatError, match=first.name):
        calibrated().restore(batches_of(8), path=tmp_path, progress=False)
