"""Cholesky's factorization in place: against torch's, where it fails at first, and what memory it touches."""

import pytest
import torch

from qsim.restoration.cholesky import factored


def symmetric(groups, size, dtype=torch.float64, seed=0):
    a = torch.randn(groups, size, 2 * size, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return a @ a.mT / size


@pytest.mark.parametrize("size", [1, 2, 9, 255, 256, 257, 600])
@pytest.mark.parametrize("groups", [1, 3])
def test_it_is_torchs_factor_in_the_memory_of_the_matrix(size, groups):
    matrix, extra = symmetric(groups, size), torch.linspace(0.01, 0.02, groups, dtype=torch.float64)
    expected = torch.linalg.cholesky(matrix + extra[:, None, None] * torch.eye(size, dtype=torch.float64))
    found = factored(matrix, extra)
    assert found.data_ptr() == matrix.data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [5, 300, 520])
def test_an_indefinite_matrix_gets_ten_times_as_much_until_there_is_a_factor(size):
    a = torch.randn(2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix = a + a.mT
    smallest = float(torch.linalg.eigvalsh(matrix)[:, 0].min())
    added = next(total for k in range(8) if smallest + (total := sum(0.01 * 10**i for i in range(k + 1))) > 0)
    expected = matrix + added * torch.eye(size, dtype=torch.float64)
    found = factored(matrix.clone(), torch.full((2,), 0.01, dtype=torch.float64))
    torch.testing.assert_close(found @ found.mT, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(found, found.tril())


def test_what_no_diagonal_makes_definite_has_none():
    matrix = torch.full((1, 4, 4), torch.nan)
    assert factored(matrix, torch.ones(1)) is None
