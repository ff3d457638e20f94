"""Calls of every operator on inputs that live on the GPU."""

import itertools

import torch

from qsim import ops

QINT = torch.ops.qsim


def range_state(x, axis, block_size):
    shape = list(x.shape) if block_size else [] if axis is None else [x.shape[axis]]
    if block_size:
        shape[axis] = -(-shape[axis] // block_size)
    return torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)


def sketch_state():
    return torch.zeros(16384, dtype=torch.int64), torch.zeros((), dtype=torch.int32)


def device_calls():
    """Pairs (operator, a call of it that gives the same again)."""
    x = torch.randn(64, 3, 33, 35, device="cuda")
    one = torch.tensor(0.1, device="cuda"), torch.tensor(3, dtype=torch.int32, device="cuda")
    channel = torch.full((3,), 0.1, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    grad, mask = torch.randn_like(x), QINT.fake_quantize_with_mask(x, *one, -8, 7)[1]
    state = [t.cuda() for t in range_state(x, None, None)]
    per_channel = [t.cuda() for t in range_state(x, 1, None)]
    sketch, low_bits = (t.cuda() for t in sketch_state())
    rows = torch.randn(40, 100, device="cuda")
    q = ops.quantize(x, *one, -8, 7)
    packed = ops.pack_int4(q)
    on, ends = torch.tensor(True, device="cuda"), [t.cuda() for t in range_state(x, None, None)]
    running = (*ends, torch.tensor(torch.nan, device="cuda"), torch.tensor(0, dtype=torch.int32, device="cuda"))
    formats = torch.zeros(6, dtype=torch.int64, device="cuda"), torch.zeros(2, dtype=torch.float64, device="cuda")
    grads = [torch.randn(1000, device="cuda"), torch.randn(30000, device="cuda")]
    yield "fake_quantize", lambda: ops.fake_quantize(x, *one, -8, 7)
    yield "fake_quantize per channel", lambda: ops.fake_quantize(x, *channel, -8, 7, axis=1)
    yield "fake_quantize_with_mask", lambda: QINT.fake_quantize_with_mask(x, *one, -8, 7)
    yield "mask_backward", lambda: QINT.fake_quantize_mask_backward(grad, mask)
    yield "backward", lambda: QINT.fake_quantize_backward(grad, x, *one, -8, 7)
    yield "learnable_backward", lambda: QINT.fake_quantize_learnable_backward(grad, x, *channel, -8, 7, axis=1)
    yield "observe_range", lambda: ops.observe_range_(x, *state) or state[0].clone()
    yield "observe_range per channel", lambda: ops.observe_range_(x, *per_channel, axis=1) or per_channel[0].clone()
    yield "observe", lambda: ops.observe_(x, *state, sketch, low_bits) or state[1].clone()
    yield "search_range", lambda: ops.search_range(state[0], state[1], sketch, -128, 127, low_bits=low_bits)
    yield "search_range_data", lambda: ops.search_range_data(x[0], -128, 127, axis=0)
    yield "search_range_weights", lambda: [*itertools.chain(*ops.search_range_weights([rows, x[0]], -8, 7, axis=0))]
    yield "quantize", lambda: ops.quantize(x, *channel, -128, 127, axis=1)
    yield "dequantize", lambda: ops.dequantize(q, *one)
    yield "pack_int4", lambda: ops.pack_int4(q)
    yield "unpack_int4", lambda: ops.unpack_int4(packed, x.shape)
    yield "round_to_format", lambda: ops.round_to_format(x, "float8_e4m3fn")
    yield "round_to_format_with_mask", lambda: QINT.round_to_format_with_mask(x, "float8_e4m3fn")
    yield "round_to_format_counted", lambda: ops.round_to_format_counted(x, "float16", *formats)
    yield "count_format", lambda: ops.count_format_(x, "float16", *formats)
    yield "observe_fake_quantize", lambda: ops.observe_fake_quantize(x, on, on, *running, -8, 7, averaging=1.0)
    yield "fake_quantize_dynamic", lambda: ops.fake_quantize_dynamic(rows, -128, 127, axis=-1)
    yield (
        "round_to_format_dynamic",
        lambda: ops.round_to_format_dynamic(rows, "float4_e2m1fn", axis=-1, block_size=16, scale_format="float8_e4m3fn"),
    )
    yield "choose_block_scale", lambda: ops.choose_block_scale(*per_channel[:2], "float4_e2m1fn", "float8_e8m0fnu")
    yield "fake_quantize_bias", lambda: ops.fake_quantize_bias(rows[0], one[0], channel[0][:1])
    yield "fake_quantize_bias_with_mask", lambda: QINT.fake_quantize_bias_with_mask(rows[0], one[0], channel[0][:1])
    yield "choose_qparams", lambda: ops.choose_qparams(*per_channel[:2], -128, 127)
    yield "clip_grad", lambda: ops.clip_grad_([g.clone() for g in grads], 1.0)
