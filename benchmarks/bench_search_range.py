"""Range searches: microseconds a tensor on the sketch, nanoseconds an element on the data, one thread.

The peer is the search of torch's HistogramObserver, which also ends at scale and zero point.
"""

import torch
from timing import interleaved
from torch.ao.quantization.observer import HistogramObserver

import qsim

GRID = -128, 127


def seen(x):
    return x.min(), x.max(), torch.bincount((x.view(torch.int32) >> 18) & 16383, minlength=16384)


def main():
    torch.set_num_threads(1)
    normal = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    state, relu = seen(normal), seen(normal.relu())
    batch = [part.expand(64, *part.shape).contiguous() for part in state]
    peer = HistogramObserver()
    peer(normal)

    def encode(state, symmetric):
        return qsim.ops.choose_qparams(*qsim.ops.search_range(*state, *GRID, symmetric=symmetric), *GRID, symmetric=symmetric)

    cases = {"torch HistogramObserver": peer.calculate_qparams}
    for symmetric in (False, True):
        kind = "symmetric" if symmetric else "asymmetric"
        cases[f"{kind}, normal"] = lambda s=symmetric: qsim.ops.search_range(*state, *GRID, symmetric=s)
        cases[f"{kind}, ReLU"] = lambda s=symmetric: qsim.ops.search_range(*relu, *GRID, symmetric=s)
        cases[f"{kind}, with choose_qparams"] = lambda s=symmetric: encode(state, s)
        cases[f"{kind}, one of 64 in a call"] = lambda s=symmetric: qsim.ops.search_range(*batch, *GRID, symmetric=s)
    for method in ("mse", "percentile", "entropy"):
        cases[method] = lambda m=method: qsim.ops.search_range(*state, *GRID, method=m)
    seconds = interleaved(cases)
    baseline = seconds["torch HistogramObserver"]
    for name, taken in seconds.items():
        each = taken / 64 if "one of 64" in name else taken
        print(f"{name:36} {each * 1e6:10.1f} us {each / baseline:8.4f} of torch's")

    weight = normal[: 256 * 1152].view(256, 1152)
    cases = {
        "symmetric, per channel of 1152": lambda: qsim.ops.search_range_data(weight, *GRID, axis=0, symmetric=True),
        "asymmetric, per channel of 1152": lambda: qsim.ops.search_range_data(weight, *GRID, axis=0),
        "symmetric 4 bit, blocks of 32": lambda: qsim.ops.search_range_data(weight, -8, 7, axis=1, block_size=32, symmetric=True),
        "symmetric, per tensor": lambda: qsim.ops.search_range_data(weight, *GRID, symmetric=True),
    }
    for name, taken in interleaved(cases).items():
        print(f"{name:36} {taken / weight.numel() * 1e9:10.1f} ns an element")


if __name__ == "__main__":
    main()
