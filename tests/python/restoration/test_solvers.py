"""Weights on grids: against brute force, least squares, and the algorithms as their papers write them."""

import dataclasses
from itertools import product as every

import pytest
import torch

import qsim
from qsim.graph.execute.tapped import WeightedCall
from qsim.restoration.grids import Grid
from qsim.restoration.moments import Moments
from qsim.restoration.operands import product_of
from qsim.restoration.rounding import learned
from qsim.restoration.solvers import SOLVERS, Problem, descended, gptq, gptq_refined

DAMPING = 0.01


def setting(rows=6, size=9, count=400, bits=3, seed=0, groups=1, axis=0, block_size=None, symmetric=True, dtype=None):
    """Weight, columns in float and simulated, the problem and the grid."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(groups, size, size, generator=g)
    x = mixing @ torch.randn(groups, size, count, generator=g)
    y = x + 0.2 * torch.randn(groups, size, count, generator=g)
    weight = torch.randn(groups * rows, size, generator=g)
    spec = qsim.TensorSpec(bits=bits, symmetric=symmetric, axis=axis, block_size=block_size, method="minmax")
    if dtype is not None:
        spec = qsim.TensorSpec(dtype=dtype, axis=axis, block_size=block_size, method="minmax")
    encoding = qsim.Quantizer(spec, weight.shape).compute_encoding_from(weight)
    call = WeightedCall("w", "linear", 1, (torch.zeros(1, size), weight), {})
    if groups > 1:
        call = WeightedCall("w", "conv1d", 1, (torch.zeros(1, groups * size, 1), weight[..., None]), {"groups": groups})
    product = product_of(call)
    grid = Grid.of(spec, encoding, product) if groups == 1 else grid_of_groups(spec, weight[..., None], product)
    moments = Moments.empty(groups, size, torch.device("cpu"))
    moments.add(x, y)
    rows_of = product.to_rows(weight if groups == 1 else weight[..., None]).double()
    moments.averaged()
    return rows_of, x.double(), y.double(), Problem.of(rows_of, moments, DAMPING, keeps_moments=True), grid


def grid_of_groups(spec, weight, product):
    return Grid.of(spec, qsim.Quantizer(spec, weight.shape).compute_encoding_from(weight), product)


def error(weight, solved, x, y):
    return (weight @ x - solved @ y).square().mean(2).sum()


def test_the_target_is_the_ridge_regression_of_the_floats_results_on_what_is_read():
    weight, x, y, problem, _ = setting()
    extra = DAMPING * (y @ y.transpose(1, 2) / 400).diagonal(dim1=1, dim2=2).mean()
    # rows that pull the solution to the weight: ridge regression as least squares
    pull = torch.eye(9, dtype=torch.float64) * (extra * 400).sqrt()
    left = torch.cat([y[0].T, pull])
    right = torch.cat([(weight[0] @ x[0]).T, pull @ weight[0].T])
    expected = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(problem.target[0], expected, rtol=1e-3, atol=1e-4)  # moments are sums of float32 products


def gptq_as_published(target, own, grid, order):
    """Frantar et al. 2023, algorithm 1, without its blocks: errors handed on by the Cholesky factor of the inverse."""
    order = order.flip(0)  # most power first
    own = own[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(own), upper=True)
    left, solved = target[:, order].clone(), torch.empty_like(target)
    for i in range(len(order)):
        numbers = grid.rounded(left[:, i][None], order[i].item())[0]
        solved[:, order[i]] = numbers
        left[:, i:] -= torch.outer((left[:, i] - numbers) / upper[i, i], upper[i, i:])
    return solved


@pytest.mark.parametrize("size", [1, 2, 9, 127, 128, 129, 300])
def test_gptq_is_the_published_algorithm(size):
    _, _, _, problem, grid = setting(rows=5, size=size, count=2000, seed=size)
    own = problem.moments.own
    extra = DAMPING * own.diagonal(dim1=1, dim2=2).mean()
    expected = gptq_as_published(problem.target[0], own[0] + extra * torch.eye(size), grid, problem.order[0])
    got = gptq(problem, grid)[0]
    assert (got - expected).abs().gt(1e-6).float().mean() < 0.002  # ties that rounding breaks


@pytest.mark.parametrize("seed", range(5))
def test_brute_force_is_at_least_as_good_and_rounding_is_worse(seed):
    weight, x, y, problem, grid = setting(rows=1, size=4, bits=2, seed=seed)
    numbers = [
        sorted({float(grid.rounded(torch.tensor([[v]], dtype=torch.float64), i)) for v in torch.linspace(-9, 9, 400)}) for i in range(4)
    ]
    best = min(error(weight, torch.tensor([[choice]], dtype=torch.float64), x, y) for choice in every(*numbers))
    solved = error(weight, SOLVERS["gptq"](problem, grid), x, y)
    assert best <= solved + 1e-9
    assert solved <= best + 0.5 * weight.square().sum() * (y.square().mean())


def test_on_average_gptq_beats_rounding_of_the_target_and_that_beats_rounding_of_the_weight():
    totals = dict.fromkeys(("gptq", "gpfq", "nearest", "weight"), 0.0)
    for seed in range(20):
        weight, x, y, problem, grid = setting(seed=seed, size=24)
        for method, solve in SOLVERS.items():
            totals[method] += float(error(weight, solve(problem, grid), x, y))
        totals["weight"] += float(error(weight, grid.rounded(weight), x, y))
    assert totals["gptq"] < 0.8 * totals["nearest"]
    assert totals["gpfq"] < totals["nearest"]
    assert totals["nearest"] < totals["weight"]


@pytest.mark.parametrize("size", [1, 2, 9, 60])
def test_descent_ends_where_no_single_number_is_better_and_never_rises(size):
    _, _, _, problem, grid = setting(rows=4, size=size, bits=2, groups=1, seed=size)
    straight = problem.straight()

    def costs(rows):
        return ((rows - problem.target) @ straight).square().sum(-1)

    before = gptq(problem, grid)
    after = descended(problem, grid, before)
    assert bool((costs(after) <= costs(before) * (1 + 1e-9)).all())
    assert torch.allclose(grid.rounded(after), after)
    for i in range(size):
        for sign in (-1, 1):
            other = after.clone()
            other[..., i] = grid.rounded(other[..., i] + sign * grid.step[..., i], i)
            assert bool((costs(other) >= costs(after) * (1 - 1e-9)).all())


GRIDS = [
    {},
    {"size": 150},
    {"groups": 3},
    {"axis": 1, "block_size": 3},
    {"axis": None, "symmetric": False},
    {"dtype": "float4_e2m1fn"},
    {"dtype": "float8_e4m3fn", "axis": 1, "block_size": 3},
]


def in_dtype(problem, grid, dtype):
    problem = dataclasses.replace(problem, target=problem.target.to(dtype), factor=problem.factor.to(dtype))
    return problem, dataclasses.replace(grid, step=grid.step.to(dtype), low=grid.low.to(dtype), high=grid.high.to(dtype))


@pytest.mark.parametrize("options", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_descent_is_the_published_one_to_the_bit(options, dtype):
    """Behdin et al. 2023, algorithm 1: all columns of all rows in order, again and again."""
    _, _, _, problem, grid = setting(rows=5, bits=2, **options)
    problem, grid = in_dtype(problem, grid, dtype)
    straight = problem.straight()
    moments = straight @ straight.mT
    start = torch.zeros_like(problem.target)  # far off: many columns change, in several rounds
    expected, pull = start.clone(), (problem.target - start) @ moments
    for _ in range(10):
        for i in range(expected.shape[-1]):
            number = grid.rounded(expected[..., i] + pull[..., i] / moments[:, i, i, None], i)
            pull -= (number - expected[..., i])[..., None] * moments[:, None, i]
            expected[..., i] = number
    found = descended(problem, grid, start)
    assert torch.equal(found, expected)
    assert bool((found != start).any())


@pytest.mark.parametrize("options", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_feedback_is_the_published_one_in_blocks_to_the_bit(options, dtype):
    """What a column loses is handed on to those that are still to be solved: at once in its block, in a product behind it."""
    _, _, _, problem, grid = setting(rows=5, bits=3, **options)
    problem, grid = in_dtype(problem, grid, dtype)
    order = problem.order[:, None].expand_as(problem.target)
    target, factor, ordered = problem.target.gather(2, order), problem.factor, grid.reordered(order)
    solved = torch.zeros_like(target)
    for end in range(target.shape[-1], 0, -128):
        begin = max(0, end - 128)
        errors = torch.empty_like(target[..., begin:end])
        for i in range(end - 1, begin - 1, -1):
            number = ordered.rounded(target[..., i] + solved[..., i] / factor[:, i, i, None], i)
            errors[..., i - begin] = target[..., i] - number
            solved[..., i] = number
            solved[..., begin:i] += errors[..., i - begin, None] * factor[:, None, i, begin:i]
        solved[..., :begin] += errors @ factor[:, begin:end, :begin]
    found = gptq(problem, grid)
    assert torch.equal(found.gather(2, order), solved)
    assert not torch.equal(found, SOLVERS["nearest"](problem, grid))


def test_the_kernels_say_what_they_expect():
    rows, step = torch.zeros(2, 3, 4), torch.ones(2, 3, 1)
    moments = torch.eye(4).expand(2, 4, 4).contiguous()
    descend = torch.ops.qsim_restoration.descend_
    descend(rows, rows.clone(), moments, step, -step, step, 1)
    for wrong, said in (
        ((rows.half(), rows, moments, step, step, step), "rows is Half of shape"),
        ((rows, rows.mT.contiguous().mT, moments, step, step, step), "pull is Float of shape"),
        ((rows, rows.clone(), moments[:, :3], step, step, step), r"moments is .*; expected a contiguous Float of shape \[2, 4, 4\]"),
        ((rows, rows.clone(), moments, step, step.double(), step), "low is Double"),
        ((rows, rows.clone(), moments, step, step, step.expand(2, 3, 4)), r"high is .*; expected a contiguous Float of shape \[2, 3, 1\]"),
        ((rows, rows, moments, step, step, step), "share"),
    ):
        with pytest.raises(ValueError, match=said):
            descend(*wrong, 1)
    for format, said in (
        ("int3", "got format 'int3'; expected one of 'float16', "),
        ("float16", "got format 'float16'; expected one that is scaled"),
    ):
        with pytest.raises(ValueError, match=said):
            descend(rows, rows.clone(), moments, step, -step, step, 1, format=format)
    descend(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4), torch.zeros(0, 4, 4), *[torch.ones(0, 3, 1)] * 3, 1)
    feed_back = torch.ops.qsim_restoration.feed_back_
    for wrong, said in (
        (
            (rows[0], rows[0], moments, step, step, step, 0, 4),
            r"rows is .*; expected float32 or float64 of shape \[groups, rows, columns\]",
        ),
        ((rows, rows[:, :2], moments, step, step, step, 0, 4), r"target is .*; expected a contiguous Float of shape \[2, 3, 4\]"),
        ((rows, rows.clone(), moments[..., :3], step, step, step, 0, 4), r"factor is .*; expected a contiguous Float of shape \[2, 4, 4\]"),
        ((rows, rows.clone(), moments, step, step[:, :2], step, 0, 4), "low is Float of shape"),
        ((rows, rows.clone(), moments, step, step, step, 0, 5), "begin is 0, end 5; expected 0 <= begin <= end <= 4, the columns"),
        ((rows, rows.clone(), moments, step, step, step, 3, 2), "begin is 3, end 2"),
        ((rows, rows, moments, step, step, step, 0, 4), "share"),
    ):
        with pytest.raises(ValueError, match=said):
            feed_back(*wrong)
    assert feed_back(rows, rows.clone(), moments, step, -step, step, 2, 2).shape == (2, 3, 0)
    soft_round, kept = torch.ops.qsim_restoration.soft_round_, [torch.zeros(2, 3, 4) for _ in range(5)]
    for wrong, said in (
        (([t.double() for t in kept], step, -step, step, 1), "variable is Double of shape .*; expected float32 of shape"),
        (([*kept[:4], kept[4][:1]], step, -step, step, 1), r"target is .*; expected a contiguous Float of shape \[2, 3, 4\]"),
        ((kept, step, -step, step[:1], 1), "high is Float of shape"),
        ((kept, step, -step, step, 0), "at is 0; expected the number of the step, from 1 on"),
        (([kept[0], kept[0], *kept[2:]], step, -step, step, 1), "share"),
    ):
        with pytest.raises(ValueError, match=said):
            soft_round(*wrong[0], *wrong[1:], 0.02, 0.01, 2.0)


@pytest.mark.parametrize(("axis", "block_size"), [(0, None), (1, 3)])
def test_soft_rounding_is_adam_on_the_published_loss(axis, block_size):
    """Nagel et al. 2020, "Up or Down?", equations 21 to 24, by autograd and torch's Adam in float64."""
    _, _, _, problem, grid = setting(rows=5, bits=3, axis=axis, block_size=block_size)
    target, root = problem.target, problem.straight()
    step, low, high = grid.tables()
    below = (target / step).floor()
    variable = torch.randn(target.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = variable.detach().float()
    mean, square, errors = (torch.zeros_like(found) for _ in range(3))
    arguments = [t.float() for t in (target, step, low, high)]
    torch.ops.qsim_restoration.soft_round_(found, mean, square, errors, *arguments, 1, 0.0, 0.0, 2.0)
    assert torch.equal(found, variable.detach().float())
    optimizer = torch.optim.Adam([variable], 0.05)
    for i, (weight, exponent) in enumerate([(0.0, 20.0), (0.0, 20.0), (0.5, 7.3), (0.5, 3.1), (0.5, 2.0)]):
        up = (1.2 * torch.sigmoid(variable) - 0.1).clamp(0, 1)
        error = torch.clamp(below + up, low, high) * step - target
        torch.testing.assert_close(errors.double(), error.detach(), rtol=1e-4, atol=1e-5)
        loss = (error @ root).square().sum() + weight * (1 - (2 * up - 1).abs() ** exponent).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pull = 2 * (errors @ root.float()) @ root.float().mT
        errors.copy_(pull)
        torch.ops.qsim_restoration.soft_round_(found, mean, square, errors, *arguments, i + 1, 0.05, weight, exponent)
        torch.testing.assert_close(found.double(), variable.detach(), rtol=1e-4, atol=1e-4)


def test_gpfq_is_the_greedy_choice_on_the_columns_themselves():
    weight, x, y, problem, grid = setting()
    left, expected = torch.zeros(6, 400, dtype=torch.float64), torch.empty(6, 9, dtype=torch.float64)
    for i in range(9):
        left = left + weight[0, :, i, None] * x[0, i]
        expected[:, i] = grid.rounded((left @ y[0, i] / y[0, i].square().sum())[None], i)[0]
        left = left - expected[:, i, None] * y[0, i]
    torch.testing.assert_close(SOLVERS["gpfq"](problem, grid)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [9, 80])
def test_learned_rounding_is_never_worse_than_gptq_on_any_row(size):
    better = 0
    for seed in range(3):
        _, _, _, problem, grid = setting(size=size, bits=2, seed=seed)
        costs = []
        for rows in (learned(problem, grid, 150), gptq_refined(problem, grid)):
            assert torch.allclose(grid.rounded(rows), rows)
            costs.append(((rows - problem.target) @ problem.straight()).square().sum(-1))
        assert bool((costs[0] <= costs[1] * (1 + 1e-9)).all())
        better += int((costs[0] < costs[1] * 0.999).sum())
    assert better > 0


def test_groups_are_solved_each_by_itself():
    _, _, _, problem, grid = setting(groups=3)
    together = SOLVERS["gptq"](problem, grid)
    for i in range(3):
        one = Problem(*(t[i : i + 1] for t in (problem.weight, problem.factor, problem.order, problem.target)))
        alone = SOLVERS["gptq"](
            one, Grid(grid.spec, grid.encoding, grid.product, *(t[i : i + 1] for t in (grid.step, grid.low, grid.high)))
        )
        assert torch.equal(together[i], alone[0])


def test_inputs_that_are_always_zero_leave_their_weights_to_rounding():
    weight, _, y, _, grid = setting()
    y[:, 4] = 0
    moments = Moments.empty(1, y.shape[1], torch.device("cpu"))
    moments.add(y, y)
    moments.averaged()
    solved = SOLVERS["gptq"](Problem.of(weight, moments, DAMPING), grid)
    assert torch.equal(solved[..., 4], grid.rounded(weight)[..., 4])
    assert Problem.of(weight, Moments.empty(1, y.shape[1], torch.device("cpu")), DAMPING) is None


def test_a_problem_uses_the_moments_up_or_keeps_them():
    weight, _, _, problem, _ = setting(size=300, count=1000)
    moments = problem.moments
    alike = Problem.of(weight, moments, DAMPING)
    assert torch.equal(alike.factor, problem.factor)
    assert torch.equal(alike.target, problem.target)
    assert (moments.own.numel(), moments.cross.numel(), alike.moments) == (0, 0, None)


@pytest.mark.parametrize(("groups", "size"), [(2, 600), (1, 1100)])
def test_large_moments_are_summed_by_halves(groups, size):
    """Of 600 columns in float64, of 1100 in float32; exactly symmetric, whatever the panels are."""
    torch.manual_seed(0)
    moments = Moments.empty(groups, size, torch.device("cpu"))
    y = torch.randn(groups, size, 40)
    for each in (y, 2 * y):
        moments.add(y, each)
    assert torch.equal(moments.own, moments.own.mT)
    torch.testing.assert_close(moments.own.double(), 5 * y.double() @ y.double().mT, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(moments.cross.double(), 3 * y.double() @ y.double().mT, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("rows", "size", "is_kept"), [(6, 9, True), (9, 9, False), (12, 9, False)])
def test_moments_made_for_a_weight_give_the_same_problem_from_less(rows, size, is_kept):
    weight, x, y, problem, _ = setting(rows=rows, size=size)
    moments = Moments.empty(1, size, torch.device("cpu"), weight)
    for _ in range(3):
        moments.add(x.float(), y.float())
    assert (moments.weight is not None, moments.cross.shape[1]) == (is_kept, min(rows, size))
    moments.averaged()
    means = x.mean(2, keepdim=True), y.mean(2, keepdim=True)
    expected = weight @ (x @ y.mT / x.shape[2] - means[0] @ means[1].mT)
    alike = Problem.of(weight, dataclasses.replace(moments), DAMPING, keeps_moments=True)
    torch.testing.assert_close(alike.target, problem.target, rtol=1e-4, atol=1e-5)
    moments.centre()
    torch.testing.assert_close(moments.results(weight), expected, rtol=1e-4, atol=1e-4)


def test_the_root_squared_is_the_damped_moments():
    for size in (9, 300):
        _, _, _, problem, _ = setting(size=size, count=1000)
        root = problem.root()
        own = problem.moments.own
        damped = own + DAMPING * own.diagonal(dim1=1, dim2=2).mean() * torch.eye(size, dtype=torch.float64)
        if size == 9:
            torch.testing.assert_close(root @ root.transpose(1, 2), damped, rtol=1e-5, atol=1e-5)
        else:  # in the mean: what it says of a vector is right to some percent
            vector = torch.randn(1, 1, size, dtype=torch.float64)
            true, sketched = (vector @ damped * vector).sum(), (vector @ root).square().sum()
            assert 0.6 < float(sketched / true) < 1.6
