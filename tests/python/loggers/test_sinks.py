"""Loggers are told apart by what they have, and get scalars and histograms as they take them."""

import math
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qsim.loggers.figures import Figures, Histogram
from qsim.loggers.sinks import writer_of

HISTOGRAM = Histogram(torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 5.0], dtype=torch.float64))
FIGURES = Figures({"a/x": 0.5, "a/y": math.nan, "b": math.inf}, {"h": HISTOGRAM})


def received(**methods):
    """An object with these methods, which keep what they are given."""
    calls = []
    return SimpleNamespace(**{name: made(calls) for name, made in methods.items()}), calls


def test_a_dict_with_and_without_a_step():
    stepped, calls = received(log=lambda calls: lambda figures, step=None: calls.append((figures, step)))
    writer_of(stepped, "test")(FIGURES, 7)
    assert calls == [({"a/x": 0.5, "b": math.inf}, 7)]
    plain, calls = received(log=lambda calls: lambda figures: calls.append(figures))
    writer_of(plain, "test")(FIGURES, 7)
    assert calls == [{"a/x": 0.5, "b": math.inf, "step": 7}]


def test_mlflow_and_loggers_of_lightning():
    mlflow = ModuleType("mlflow")
    calls = []
    mlflow.log_metrics = lambda metrics, step=None: calls.append((metrics, step))
    writer_of(mlflow, "test")(FIGURES, 3)
    assert calls == [({"a/x": 0.5, "b": math.inf}, 3)]


def test_a_lightning_module_knows_its_step():
    module, calls = received(log_dict=lambda calls: lambda figures: calls.append(figures), log=lambda calls: lambda name, value: None)
    writer_of(module, "test")(FIGURES, 3)
    assert calls == [{"a/x": 0.5, "b": math.inf}]


def test_a_run_of_wandb_gets_histograms(monkeypatch):
    wandb = ModuleType("wandb")
    wandb.Histogram = lambda np_histogram: ("histogram", np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    calls = []

    class Run:
        def log(self, data, step=None):
            calls.append((data, step))

    Run.__module__ = "wandb.sdk.wandb_run"
    writer_of(Run(), "test")(FIGURES, 2)
    ((data, step),) = calls
    assert (step, data["a/x"], data["h"]) == (2, 0.5, ("histogram", ([3.0, 5.0], [-1.0, 0.0, 2.0])))


def test_a_summary_writer_without_histograms():
    writer, calls = received(add_scalar=lambda calls: lambda name, value, step: calls.append((name, value, step)))
    writer_of(writer, "test")(FIGURES, 1)
    assert calls == [("a/x", 0.5, 1), ("b", math.inf, 1)]


@pytest.mark.parametrize(
    ("logger", "says"),
    [
        (print, "got a builtin_function_or_method; expected a SummaryWriter"),
        ("runs", "got a str; expected a SummaryWriter"),
        (None, "got a NoneType"),
        (type("Run", (), {"log": lambda self, figures: None}), "got the class Run, of which an instance logs"),
    ],
)
def test_what_is_no_logger(logger, says):
    with pytest.raises(TypeError, match=f"QuantSim.monitor: {says}"):
        writer_of(logger, "QuantSim.monitor")


def test_a_summary_writer_keeps_scalars_and_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        writer_of(writer, "test")(FIGURES, 4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["a/x", "b"]
    (event,) = events.Scalars("a/x")
    assert (event.step, event.value) == (4, 0.5)
    (event,) = events.Histograms("h")
    kept = event.histogram_value
    assert (kept.min, kept.max, kept.num, kept.sum, kept.sum_squares) == (-1, 2, 8, 3 * -0.5 + 5 * 1, 3 * 0.25 + 5 * 1)
    assert [count for count in kept.bucket if count] == [3, 5]
    assert [limit for limit, count in zip(kept.bucket_limit, kept.bucket, strict=True) if count] == [0, 2]


def test_nothing_is_imported_until_it_is_used():
    others = "{'tensorboard', 'torch.utils.tensorboard', 'wandb', 'mlflow'}"
    code = f"import sys, qsim; qsim.QuantSim, qsim.Monitor; assert not {others} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
