"""Iterative linear algebra against dense decompositions: each answer, and what it says of its own error."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from lapwing.linalg import (
    Estimated,
    GramSum,
    ProductSum,
    apply_function,
    conjugate_gradients,
    hutch_plus_plus,
    hutchinson,
    inverse_root,
    lanczos_quadrature,
    leading_eigenpairs,
    semidefinite_eigenvalues,
    signs,
    trace,
    xtrace,
)
from lapwing.linalg.estimated import student_quantile
from makers import randn
from oracle import assert_close


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(p: int, condition: float, seed: int = 0) -> torch.Tensor:
    """Symmetric, eigenvalues spread over decades from 1 to the condition number."""
    Q = torch.linalg.qr(randn(p, p, g=gen(seed))).Q
    values = condition ** torch.linspace(0, 1, p, dtype=torch.float64)
    return (Q * values) @ Q.T


def product(A: torch.Tensor):
    return lambda v: v @ A


# --- conjugate gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("condition", "rtol"), [(1.0, 1e-10), (1e2, 1e-10), (1e6, 1e-7)])
def test_solves_to_the_stated_residual(condition: float, rtol: float) -> None:
    # The residual of the recurrence drifts from the true one by about ε κ, 2e-10 for κ = 1e6: far below what is asked.
    A, b = matrix(40, condition), randn(5, 40, g=gen(1))
    found = conjugate_gradients(product(A), b, rtol=rtol)
    residuals = (b - found.x @ A).norm(dim=1) / b.norm(dim=1)
    assert found.converged and float(residuals.max()) < 10 * rtol
    assert_close(found.residuals, residuals, rtol=0.1)


def test_a_good_preconditioner_saves_iterations() -> None:
    A, b = matrix(60, 1e6), randn(3, 60, g=gen(1))
    values, Q = torch.linalg.eigh(A)
    near = (Q / torch.where(values > 1e2, 1.2 * values, 30.0)) @ Q.T  # the large eigenvalues alone
    plain = conjugate_gradients(product(A), b, rtol=1e-8)
    helped = conjugate_gradients(product(A), b, rtol=1e-8, precondition=product(near))
    assert 3 * helped.iterations < plain.iterations
    assert_close(helped.x, torch.linalg.solve(A, b.T).T, rtol=1e-7)


def test_vectors_that_are_done_are_left_alone() -> None:
    A = matrix(30, 1e4)
    Q = torch.linalg.eigh(A).eigenvectors
    asked = []

    def mv(v: torch.Tensor) -> torch.Tensor:
        asked.append(len(v))
        return v @ A

    b = torch.stack([Q[:, 0], randn(30, g=gen(3)), torch.zeros(30, dtype=torch.float64)])
    found = conjugate_gradients(mv, b, rtol=1e-10)
    assert asked[:2] == [2, 1]  # an eigenvector needs one step, zero none
    assert_close(found.x[2], torch.zeros(30))


def test_an_indefinite_matrix_is_flagged() -> None:
    A = matrix(20, 10.0) - 3 * torch.eye(20, dtype=torch.float64)
    found = conjugate_gradients(product(A), randn(2, 20, g=gen(0)))
    assert found.indefinite and not found.converged


def test_rounding_is_noticed() -> None:
    A, b = matrix(50, 1e8), randn(1, 50, g=gen(0))
    noisy = conjugate_gradients(lambda v: (v @ A).float().double(), b, rtol=1e-15, max_iterations=10_000)
    assert not noisy.converged and noisy.iterations < 10_000


def test_its_tridiagonal_matrix_has_the_eigenvalues() -> None:
    A, b = matrix(12, 50.0), randn(2, 12, g=gen(0))
    found = conjugate_gradients(product(A), b, rtol=1e-13)
    diagonal, off = found.tridiagonal(1)
    T = diagonal.diag() + off.diag(1) + off.diag(-1)
    assert_close(torch.linalg.eigvalsh(T)[-1], torch.linalg.eigvalsh(A)[-1], rtol=1e-8)
    e = torch.linalg.solve(T, torch.eye(len(T), dtype=torch.float64)[0])[0] * b[1].dot(b[1])
    assert_close(e, b[1] @ torch.linalg.solve(A, b[1]), rtol=1e-9)


# --- Lanczos --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [1.0, 30.0, 1e5])
def test_inverse_roots(condition: float) -> None:
    A, b = matrix(40, condition), randn(4, 40, g=gen(2))
    values, Q = torch.linalg.eigh(A)
    truth = b @ (Q * values.rsqrt()) @ Q.T
    found = inverse_root(product(A), b, rtol=1e-9)
    assert found.converged
    assert_close(found.values, truth, rtol=1e-8)


def test_the_error_estimate_is_the_error() -> None:
    A, b = matrix(200, 1e4), randn(3, 200, g=gen(2))
    values, Q = torch.linalg.eigh(A)
    truth = b @ (Q * values.log()) @ Q.T
    found = apply_function(product(A), b, torch.log, rtol=1e-3)
    errors = (found.values - truth).norm(dim=1) / truth.norm(dim=1)
    assert found.steps < 150 and float((errors / found.errors).max()) < 5


def test_quadrature_is_exact_when_the_space_is_exhausted() -> None:
    """With P steps and P orthogonal probes it is the trace itself; copies of eigenvalues would spoil it."""
    A = matrix(25, 1e6)
    probes = torch.eye(25, dtype=torch.float64)
    found = lanczos_quadrature(product(A), probes, torch.log, rtol=0.0)
    assert found.value * 25 == pytest.approx(float(torch.logdet(A)), rel=1e-9)


def test_eigenvalues_of_a_kernel_of_low_rank_come_from_its_few_columns() -> None:
    M = randn(40, 5, g=gen(3))
    found = semidefinite_eigenvalues(M @ M.T)
    assert_close(found, torch.linalg.eigvalsh(M.T @ M), rtol=1e-10)


def test_quadrature_is_quadratic_in_the_length_of_a_probe() -> None:
    """zᵀ log(A) z of each, for probes that are not unit vectors."""
    A, z = matrix(25, 1e3), signs(4, 25, gen(1)) * torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    values, Q = torch.linalg.eigh(A)
    found = lanczos_quadrature(product(A), z, torch.log, rtol=0.0)
    assert found.value == pytest.approx(float(((z @ Q) ** 2 @ values.log()).mean()), rel=1e-9)


@pytest.mark.statistical
def test_quadrature_is_unbiased_and_knows_its_error() -> None:
    A = matrix(60, 1e3)
    truth, inside = float(torch.logdet(A)), 0
    for seed in range(200):
        found = lanczos_quadrature(product(A), signs(12, 60, gen(seed)), torch.log)
        low, high = found.interval(0.99)
        inside += low <= truth <= high
    assert inside >= 194


# --- traces ---------------------------------------------------------------------------------------------------


def test_hutchinson_is_exact_on_a_diagonal_and_hutch_plus_plus_at_low_rank() -> None:
    D = torch.rand(30, generator=gen(0), dtype=torch.float64).diag()
    assert hutchinson(product(D), signs(2, 30, gen(1))).value == pytest.approx(float(D.trace()))
    M = randn(4, 30, g=gen(2))
    A = M.T @ M
    found = hutch_plus_plus(product(A), signs(4, 30, gen(3)), signs(3, 30, gen(4)))
    assert found.value == pytest.approx(float(A.trace()), rel=1e-10) and found.std_error < 1e-10


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_xtrace_is_exact_at_low_rank(rank: int) -> None:
    M = randn(rank, 30, g=gen(2))
    found = xtrace(product(M.T @ M), signs(5, 30, gen(3)))
    assert found.value == pytest.approx(float((M**2).sum()), rel=1e-9, abs=1e-9) and found.std_error < 1e-9


def test_xtrace_is_what_leaving_each_probe_out_gives() -> None:
    A, probes = matrix(20, 1e3), signs(5, 20, gen(1))
    values = []
    for i in range(5):
        Q = torch.linalg.qr((probes[[j for j in range(5) if j != i]] @ A).T).Q
        z = probes[i] - Q @ (Q.T @ probes[i])
        values.append(torch.trace(Q.T @ A @ Q) + z @ A @ z)
    found = xtrace(product(A), probes)
    assert found.value == pytest.approx(float(torch.stack(values).mean()), rel=1e-10)
    assert found.std_error == pytest.approx(float(torch.stack(values).std()) / 5**0.5, rel=1e-6)


def xtrace_errors(planted: float = 0.0) -> tuple[float, float]:
    """Mean error over 300 runs in its own standard errors, and the true spread over the one that is reported."""
    A = matrix(40, 1e3)
    truth = float(A.trace())
    found = [xtrace(product(A), signs(8, 40, gen(seed))) for seed in range(300)]
    errors = torch.tensor([planted + e.value - truth for e in found])
    reported = torch.tensor([e.std_error for e in found]).square().mean().sqrt()
    return float(errors.mean() / errors.std() * 300**0.5), float(errors.std() / reported)


def test_xtrace_is_unbiased_and_its_error_estimate_is_right() -> None:
    bias, ratio = xtrace_errors()
    assert abs(bias) < 4 and 0.7 < ratio < 1.4
    assert abs(xtrace_errors(planted=0.02 * float(matrix(40, 1e3).trace()))[0]) > 4  # a bias would be noticed


def test_the_pilot_takes_the_better_of_both() -> None:
    M = randn(3, 80, g=gen(2))
    low_rank = M.T @ M + 1e-3 * torch.eye(80, dtype=torch.float64)
    diagonal = torch.linspace(1, 2, 80, dtype=torch.float64).diag() + 1e-3 * low_rank
    for A in (low_rank, diagonal):
        found = trace(product(A), 80, n_products=45, generator=gen(5))
        plain = hutchinson(product(A), signs(45, 80, gen(6)))
        assert abs(found.value - float(A.trace())) < 5 * found.std_error + 1e-9
        assert found.std_error <= 1.5 * plain.std_error


@pytest.mark.parametrize("q", [0.9, 0.995])
def test_students_quantiles(q: float) -> None:
    """Four terms of a series in 1/n: what they leave out falls with the fifth power."""
    left_out = [n**5 * abs(student_quantile(q, n) - stats.t.ppf(q, n)) for n in (20, 40, 80)]
    assert max(left_out) < 1.2 * left_out[0] < 20
    assert student_quantile(0.995, 5) == pytest.approx(4.032, abs=2e-2)  # printed tables


def test_an_estimate_adds_what_is_known() -> None:
    assert Estimated.of(torch.tensor([1.0, 2.0, 3.0]), exact=4.0).value == 6.0


# --- eigenpairs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 5, 12, 40])
def test_leading_eigenpairs(rank: int) -> None:
    A = matrix(40, 1e4)
    values, Q = torch.linalg.eigh(A)
    found = leading_eigenpairs(product(A), randn(min(rank + 4, 40), 40, g=gen(1)), rank, rtol=1e-7)
    assert found.converged
    assert_close(found.values, values.flip(0)[:rank], rtol=1e-10)
    assert_close(found.vectors.T @ found.vectors, Q.flip(1)[:, :rank] @ Q.flip(1)[:, :rank].T, rtol=1e-5)
    assert_close(found.vectors @ found.vectors.T, torch.eye(rank))


def test_a_matrix_of_low_rank_has_no_more_pairs_than_that() -> None:
    M = randn(3, 30, g=gen(0))
    A = M.T @ M
    found = leading_eigenpairs(product(A), randn(8, 30, g=gen(1)), 6)
    assert len(found.values) == 3 and found.converged
    assert_close((found.vectors.T * found.values) @ found.vectors, A)


def test_too_few_rounds_are_admitted_and_repeated_eigenvalues_found() -> None:
    A = matrix(100, 10.0)
    assert not leading_eigenpairs(product(A), randn(12, 100, g=gen(1)), 10, max_rounds=2).converged
    twice = torch.block_diag(A[:30, :30], A[:30, :30])
    found = leading_eigenpairs(product(twice), randn(6, 60, g=gen(1)), 4)
    assert_close(found.values, torch.linalg.eigvalsh(twice).flip(0)[:4], rtol=1e-9)


# --- running sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 5), (70, 130, 2), (3000, 1500, 300)])
@pytest.mark.parametrize(("q", "d"), [(1, 7), (3, 7), (1, 128), (1, 255), (1, 256), (1, 300), (1, 512)])
def test_a_column_of_ones_need_not_be_given(q: int, d: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Σ x xᵀ and Σ y xᵀ of rows (x, 1): few or many at a time, of one map or several, narrow, wide or a page apart."""
    gram, products = GramSum(q, d + 1, torch.device("cpu")), ProductSum()
    pieces = [randn(m, q, d, g=gen(m)).to(dtype) for m in sizes]
    weights = [randn(m, q, 3, g=gen(m + 1)).to(dtype) for m in sizes]
    for x, y in zip(pieces, weights, strict=True):
        gram.add(x, ones=True)
        products.add(y, x, ones=True)
    x, y = torch.cat(pieces).double(), torch.cat(weights).double()
    x = torch.cat([x, torch.ones(*x.shape[:2], 1)], dim=-1)
    rtol = 1e-12 if dtype == torch.float64 else 1e-4
    assert_close(gram.result(), torch.einsum("mqi,mqj->qij", x, x), rtol)
    product = products.take()
    assert product is not None
    assert_close(product.double(), torch.einsum("mqo,mqi->qoi", y, x), rtol)


def test_a_sum_of_nothing_is_zero_and_says_so() -> None:
    gram = GramSum(2, 3, torch.device("cpu"))
    assert gram.empty
    assert torch.equal(gram.result(), torch.zeros(2, 3, 3, dtype=torch.float64))
    gram.add(torch.ones(1, 2, 3))
    assert not gram.empty
