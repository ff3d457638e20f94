"""Every operator on a GPU: on any stream, in a graph, without waiting for the device. Without a GPU everything here is skipped."""

import pytest
import torch
from cuda_calls import QINT, device_calls, range_state, sketch_state

import qsim
from qsim import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def flat(result):
    return [t.clone() for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, torch.Tensor)]


def captured(call):
    """The graph of a call that ran before: loading its kernels is no part of a capture."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_no_operator_waits_for_the_device():
    calls = list(device_calls())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_operator_in_a_graph():
    for name, call in device_calls():
        expected = flat(call())
        graph, result = captured(call)
        for _ in range(2):
            graph.replay()
        for got, wanted in zip(flat(result), expected, strict=True):
            assert torch.equal(got, wanted), name


def test_a_replayed_observer_reads_new_data_and_keeps_its_state():
    x = torch.zeros(100_000, device="cuda")
    state = [*(t.cuda() for t in (*range_state(x, None, None), *sketch_state()))]
    ops.observe_(x, *state)
    graph, _ = captured(lambda: ops.observe_(x, *state))
    for value in (2.5, -7.0, torch.nan):
        x.fill_(value)
        graph.replay()
    assert [t.item() for t in state[:2]] == [-7.0, 2.5]
    assert state[2].tolist() == [400_000, 100_000, 0, 0]
    assert state[3].sum() == 300_000


def test_on_a_stream_of_its_own():
    stream = torch.cuda.Stream()
    for name, call in device_calls():
        expected = flat(call())
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # work on another stream would be done long before this
            got = flat(call())
        stream.synchronize()
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_on_the_device_of_its_input():
    x = torch.randn(1000, device="cuda:1")
    scale, zero_point = torch.tensor(0.1, device="cuda:1"), torch.tensor(0, dtype=torch.int32, device="cuda:1")
    y = ops.fake_quantize(x, scale, zero_point, -8, 7)
    assert y.device == x.device
    assert torch.equal(y.cpu(), ops.fake_quantize(x.cpu(), scale.cpu(), zero_point.cpu(), -8, 7))


def test_saved_for_backward_and_peak_memory():
    n = 2**24
    x = torch.randn(n, device="cuda", requires_grad=True)
    one = torch.tensor(0.1, device="cuda"), torch.tensor(0, dtype=torch.int32, device="cuda")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = ops.fake_quantize(x * 1, *one, -8, 7)  # of a leaf it keeps the leaf, which lives anyway
    assert sum(saved) <= n / 8 + 64
    grad = torch.ones_like(y)
    y.backward(grad)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    QINT.fake_quantize_learnable_backward(grad, x.detach(), *one, -8, 7)
    assert torch.cuda.max_memory_allocated() - before <= 4 * n * 1.02  # dx and little else


def test_a_quantizer_in_a_graph_quantizes_new_data():
    quantizer = qsim.Quantizer(qsim.TensorSpec(bits=4, method="minmax")).cuda()
    x = torch.linspace(-1, 2, 1000, device="cuda")
    quantizer.observing, quantizer.enabled = True, False
    quantizer(x)
    quantizer.compute_encoding()
    quantizer.observing, quantizer.enabled = False, True
    expected = quantizer(x * 0.5)
    graph, y = captured(lambda: quantizer(x))
    x.mul_(0.5)
    graph.replay()
    assert torch.equal(y, expected)


def test_a_running_range_in_a_graph_follows_new_data_and_its_switches():
    spec = qsim.TensorSpec(bits=8, method="ema", averaging=0.25)
    quantizer, eager = qsim.Quantizer(spec).cuda(), qsim.Quantizer(spec)
    batches = [torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(6)]
    x = batches[0].cuda()
    quantizer(x)
    eager(batches[0])
    graph, y = captured(lambda: quantizer(x))  # observes nothing: it only records
    for number, batch in enumerate(batches[1:]):
        for q in (quantizer, eager):
            q.observing, q.enabled = number != 2, number != 3
        x.copy_(batch)
        graph.replay()
        expected = eager(batch)
        assert torch.equal(y.cpu(), expected), number
        assert torch.equal(quantizer.scale.cpu(), eager.scale), number
        assert torch.equal(quantizer.zero_point.cpu(), eager.zero_point), number
    assert quantizer.observer.counts == eager.observer.counts


def test_a_training_step_in_a_graph():
    """Forward and backward through a running range and a learned scale."""
    running = qsim.Quantizer(qsim.TensorSpec(bits=8, method="ema")).cuda()
    learned = qsim.Quantizer(qsim.TensorSpec(bits=4, method="minmax", learnable=True)).cuda()
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    learned.compute_encoding_from(x.detach())
    running(x.detach())
    running.observing = False  # so that every step gives the same

    def step():
        return torch.autograd.grad(learned(running(x)).square().sum(), (x, learned.scale))

    stream = torch.cuda.Stream()  # autograd must have run on another stream than the default before it is captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, got = captured(step)
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
