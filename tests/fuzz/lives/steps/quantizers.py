"""Steps that change what is quantized and by which ranges: calibration, switches, encodings, fallbacks, schedules, modes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random

import torch

import qsim

from ...programs.results import same_bits
from ..life import Life, Skip
from . import step

METHODS = ("minmax", "percentile", "mse", "tf_enhanced", "entropy")


def one(life: Life, rng: random.Random) -> qsim.Quantizer:
    if not life.sim.quantizers():
        raise Skip
    return rng.choice(list(life.sim.quantizers().values()))


@step("calibrate", share=4, keeps=True, parameters=True)
def _calibrate(life: Life, rng: random.Random) -> None:
    life.sim.calibrate(life.batches(rng, 4), progress=False)


@step("calibrate on one batch", keeps=True, parameters=True)
def _once(life: Life, rng: random.Random) -> None:
    life.sim.calibrate(life.batches(rng), progress=False, max_batches=1)


@step("calibrate by a forward that fails", keeps=True, parameters=True)
def _failing(life: Life, rng: random.Random) -> None:
    calls = [life.call(rng.randrange(1 << 30)) for _ in range(2)]

    def forward(model: torch.nn.Module, call: object) -> object:
        if call is calls[1]:
            raise OSError("QuantSim: a disk is full")
        return model(*calls[0][0], **calls[0][1])

    life.sim.calibrate(calls, forward, progress=False)


@step("calibrate in parts", share=0.5, pure=True)
def _parts(life: Life, rng: random.Random) -> None:
    if life.changes or life.subject.is_stateful:
        raise Skip
    batches, found = life.batches(rng, 3), []
    for parts in ([batches], [batches[:1], batches[1:]]):
        sim = copy.deepcopy(life.sim)
        for part in parts:
            with contextlib.suppress(qsim.CalibrationError):
                sim.calibrate(part, progress=False)
        found.append(sim.state_dict())
    for name, t in found[0].items():
        assert not same_bits([found[1][name]], [t]), f"{name} after calibration in parts: {same_bits([found[1][name]], [t])}"


@step("set_method", keeps=True, parameters=True)
def _method(life: Life, rng: random.Random) -> None:
    life.sim.set_method(rng.choice([*METHODS, None]))


@step("enable")
def _enable(life: Life, rng: random.Random) -> None:
    life.sim.enable(rng.choice(["*", "*.weight", "*.output"]))


@step("disable")
def _disable(life: Life, rng: random.Random) -> None:
    keys = list(life.sim.quantizers()) or ["*.weight"]
    life.sim.disable(rng.choice([rng.choice(keys), "*.weight", "*.output"]))


@step("a switch of a quantizer")
def _switch(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    q.enabled = not q.enabled


@step("observe and choose")
def _observe(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    if q.spec.is_dynamic or q.spec.is_running:
        raise Skip
    q.reset()
    q.observing = True
    args, kwargs = life.call(rng.randrange(1 << 30))
    try:
        with torch.no_grad(), life.sim.in_float():
            life.sim(*args, **kwargs)
        q.observing = True
        was, q.enabled = q.enabled, False
        try:
            with torch.no_grad():
                life.sim(*args, **kwargs)
        finally:
            q.enabled = was
    finally:
        q.observing = False
    q.compute_encoding()


@step("set_encoding", keeps=True, parameters=True)
def _encoding(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    encoding = q.encoding
    if encoding is None or q.spec.scale_format is not None or not q.spec.has_scale:
        raise Skip
    q.set_encoding(dataclasses.replace(encoding, scale=encoding.scale * 1.25))


@step("write a scale in place")
def _scale(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    if q.spec.scale_format is not None or not q.spec.has_scale:
        raise Skip
    way = rng.randrange(3)
    with torch.no_grad():
        if way == 0:
            q.scale.mul_(0.8)
        elif way == 1:
            q.scale.data = q.scale.detach() * 1.1
        else:
            q.scale.data.mul_(0.95)


@step("another scale")
def _other_scale(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    if q.spec.scale_format is not None or not q.spec.has_scale:
        raise Skip
    scale = q.scale.detach() * 1.15
    q.scale = torch.nn.Parameter(scale) if q.spec.learnable else scale


@step("write a zero point in place")
def _zero_point(life: Life, rng: random.Random) -> None:
    q = one(life, rng)
    if q.spec.symmetric or q.spec.is_float:
        raise Skip
    q.zero_point.add_(1).clamp_(q.spec.quant_min, q.spec.quant_max)


@step("weights' encodings from their values", keeps=True, parameters=True)
def _from_values(life: Life, rng: random.Random) -> None:
    sim = life.sim
    for key, weight in sim.weights().items():
        sim.quantizers()[key].compute_encoding_from(weight.detach(), rng.choice(METHODS))


@step("reset a quantizer", share=0.5)
def _reset(life: Life, rng: random.Random) -> None:
    one(life, rng).reset()


@step("fall back")
def _fallback(life: Life, rng: random.Random) -> None:
    life.sim.fallback(rng.choice(list(life.sim.decisions.operations)), rng.choice(["fp16", "bf16", "fp32"]))


@step("fall back no more")
def _forward(life: Life, rng: random.Random) -> None:
    life.sim.fallback(rng.choice(["*", None]), "int")


@step("train")
def _train(life: Life, rng: random.Random) -> None:
    life.sim.train()


@step("eval", share=2)
def _eval(life: Life, rng: random.Random) -> None:
    life.sim.eval()


@step("a part in another mode", share=0.5)
def _part(life: Life, rng: random.Random) -> None:
    part = rng.choice(list(life.sim.model.children()))
    part.train(rng.random() < 0.5)


@step("train and eval", pure=True)
def _turned(life: Life, rng: random.Random) -> None:
    if life.sim.training:
        raise Skip
    was = {m: m.training for m in life.sim.modules()}
    life.sim.train().eval()
    for module, training in was.items():
        module.training = training


@step("a schedule", share=0.5)
def _schedule(life: Life, rng: random.Random) -> None:
    schedule = life.sim.schedule(quantize_from={"*": rng.randrange(3)}, observe_until=2)
    for _ in range(3):
        schedule.step()


@step("freeze_batch_norms", share=0.5)
def _freeze(life: Life, rng: random.Random) -> None:
    life.sim.freeze_batch_norms("*", affine=rng.random() < 0.5)


@step("reestimate_batch_norms", share=0.5, keeps=True)
def _reestimate(life: Life, rng: random.Random) -> None:
    life.sim.reestimate_batch_norms(life.batches(rng), progress=False)


@step("fold_batch_norms", share=0.5)
def _fold(life: Life, rng: random.Random) -> None:
    if life.folded_later:
        raise Skip
    if not [m for m in life.sim.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]:
        raise Skip
    report = life.sim.fold_batch_norms()
    if report.folded:
        life.folded_later = True
        examples = life.raw_examples()
        life.changes.append(lambda model: qsim.fold_batch_norms(model, examples) and None)


@step("round_scales", share=0.5, keeps=True, parameters=True)
def _round_scales(life: Life, rng: random.Random) -> None:
    life.sim.round_scales(rng.choice([torch.float16, torch.bfloat16]))


@step("encodings of a file", keeps=True, parameters=True)
def _encodings(life: Life, rng: random.Random) -> None:
    source = life.fresh()
    source.calibrate(life.batches(rng), progress=False)
    path = os.path.join(life.folder, "encodings.json")
    source.save_encodings(path)
    life.sim.load_encodings(path, strict=rng.random() < 0.7)
