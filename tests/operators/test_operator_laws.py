"""The algebra every structure must obey, against the dense matrix it stands for."""

from __future__ import annotations

import pytest
import torch

from lapwing.errors import StructureError
from lapwing.operators import (
    Basis,
    EigenCurvature,
    GroupedDiagonal,
    KroneckerCurvature,
    KroneckerFactors,
)
from lapwing.operators.conditioning import smallest_eigenvalue
from lapwing.operators.dense_rows import DenseRows
from makers import (
    GROUPS,
    MAKERS,
    eigen,
    factors,
    jacobian,
    kronecker,
    kronecker_groups,
    kronecker_split,
    one_layer,
    positions,
    randn,
    rows_for,
    spread,
)
from oracle import assert_close

pytestmark = pytest.mark.parametrize("seed", [0, 1])
over_makers = pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.__name__)
EYE = torch.eye(12, dtype=torch.float64)


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + seed)


@over_makers
def test_to_dense_and_mv(make, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    v = randn(2, 3, 12, g=gen(seed))
    assert_close(H.to_dense(), H_dense)
    assert_close(H.mv(v), v @ H_dense)
    assert_close(H.diagonal(), H_dense.diagonal())
    assert_close(H.trace(), H_dense.trace())
    P = H_dense + P0.diagonal.diag()
    assert_close(H.plus(P0).to_dense(), P)
    assert_close(H.plus(P0).mv(v), v @ P)


@over_makers
def test_spectrum_holds_every_nonzero_eigenvalue(make, seed: int) -> None:
    H, H_dense, _ = make(seed)
    true = torch.linalg.eigvalsh(H_dense)
    found = torch.zeros_like(true)
    spectrum = H.spectrum().sort().values
    found[len(true) - len(spectrum) :] = spectrum
    assert_close(found, true.clamp(min=0), rtol=1e-12)


@over_makers
def test_solve_and_inverse_diagonal(make, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    Sigma = torch.linalg.inv(H_dense + P0.diagonal.diag())
    v = randn(2, 3, 12, g=gen(seed))
    assert_close(H.plus(P0).solve(v), v @ Sigma)
    assert_close(H.plus(P0).solve(H.plus(P0).mv(v)), v)
    assert_close(H.plus(P0).inv_diagonal(), Sigma.diagonal())
    assert_close(H.plus(P0).approximate_solve(v), v @ Sigma, rtol=1e-4)


@over_makers
def test_half_solve_is_a_root_of_the_inverse(make, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    P = H_dense + torch.diag(P0.diagonal)
    R = H.plus(P0).half_solve(EYE).T
    assert_close(R @ R.T, torch.linalg.inv(P))


@over_makers
def test_logdet(make, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    assert_close(H.plus(P0).logdet(), torch.linalg.slogdet(H_dense + P0.diagonal.diag()).logabsdet)


@over_makers
@pytest.mark.parametrize("n_positions", [1, 3])
def test_quadratic_forms(make, n_positions: int, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    rows, J = rows_for(make)(4, 2, gen(seed), n_positions)
    Sigma = torch.linalg.inv(H_dense + P0.diagonal.diag())
    cov = J @ Sigma @ J.mT
    flat = J.reshape(-1, 12)
    P = H.plus(P0)
    assert_close(P.inv_quad(rows), cov)
    assert_close(P.inv_quad_diagonal(rows), cov.diagonal(dim1=-2, dim2=-1))
    assert_close(P.inv_gram(rows), flat @ Sigma @ flat.T)


@over_makers
def test_scaled_and_mixed(make, seed: int) -> None:
    H, H_dense, P0 = make(seed)
    other, other_dense, _ = make(seed + 10)
    c = torch.tensor(2.5, dtype=torch.float64)
    assert_close(H.scaled(c).to_dense(), 2.5 * H_dense)
    assert_close(H.scaled(c).spectrum().sum(), 2.5 * H_dense.trace())
    scales = torch.tensor([0.5, 3.0], dtype=torch.float64)
    both = H.mixed([other], scales)
    assert_close(both.to_dense(), 0.5 * H_dense + 3 * other_dense)
    assert_close(both.plus(P0).logdet(), torch.linalg.slogdet(0.5 * H_dense + 3 * other_dense + P0.diagonal.diag())[1])


@over_makers
def test_gradients_in_prior_and_scale(make, seed: int) -> None:
    """logdet, solve and inv_quad differentiate in δ and c as the dense formulas do."""
    H, H_dense, P0 = make(seed)
    rows, J = rows_for(make)(2, 2, gen(seed))
    v = randn(12, g=gen(seed))

    def ours(delta, c):
        P = H.scaled(c).plus(GroupedDiagonal(delta, P0.index))
        return P.logdet() + P.solve(v).sum() + P.inv_quad(rows).sum()

    def dense(delta, c):
        P = c * H_dense + delta[P0.index].diag()
        Sigma = torch.linalg.inv(P)
        return torch.logdet(P) + (Sigma @ v).sum() + (J @ Sigma @ J.mT).sum()

    point = (P0.values.clone().requires_grad_(), torch.tensor(1.3, dtype=torch.float64, requires_grad=True))
    for mine, true in zip(torch.autograd.grad(ours(*point), point), torch.autograd.grad(dense(*point), point)):
        assert_close(mine, true, rtol=1e-9)


@pytest.mark.parametrize("n_positions", [1, 3])
def test_rows(n_positions: int, seed: int) -> None:
    rows, J = jacobian(4, 2, gen(seed), n_positions)
    more, K = jacobian(3, 2, gen(seed + 5), n_positions)
    w = torch.rand(12, generator=gen(seed), dtype=torch.float64)
    v = randn(5, 12, g=gen(seed))
    assert_close(rows.dense(), J)
    assert_close(rows.mv(v), torch.einsum("ncp,sp->snc", J, v))
    many, weights = randn(9, 12, g=gen(seed)), torch.rand(4, 12, generator=gen(seed), dtype=torch.float64)
    assert_close(rows.mv(many), torch.einsum("ncp,sp->snc", J, many))
    assert_close(rows.quad(w), (J * w) @ J.mT)
    assert_close(rows.quads(weights), torch.einsum("ncp,sp,ndp->sncd", J, weights, J))
    assert_close(rows.quad_diagonal(w), (J**2 * w).sum(-1))
    assert_close(rows.sum_squares(), (J**2).sum((0, 1)))
    for index in (torch.zeros(12, dtype=torch.long), torch.tensor([0] * 6 + [1] * 6), torch.arange(12)):
        D = GroupedDiagonal(w[: int(index.max()) + 1], index)
        assert_close(rows.cross(more, D), (J.reshape(-1, 12) * D.diagonal) @ K.reshape(-1, 12).T)
    assert_close(rows.concatenated([more]).dense(), torch.cat([J, K]))
    assert_close(rows.columns(slice(0, 8)).dense(), J[..., :8])
    assert_close(rows.columns(slice(8, 12)).dense(), J[..., 8:])
    assert_close(rows.single_rows().dense(), J.reshape(-1, 1, 12))
    assert_close(rows.outputs_at(torch.tensor([1])).dense(), J[:, [1]])


def test_rows_of_a_matrix(seed: int) -> None:
    """Rows without a layer behind them, alone and against a layer's."""
    M, (more, K) = randn(4, 12, g=gen(seed)), jacobian(3, 2, gen(seed + 5))
    w, v = torch.rand(12, generator=gen(seed), dtype=torch.float64), randn(5, 12, g=gen(seed))
    rows, D = DenseRows(M), GroupedDiagonal(w, torch.arange(12))
    assert_close(rows.mv(v), torch.einsum("np,sp->sn", M, v)[..., None])
    assert_close(rows.push(v), v @ M.T)
    assert_close(rows.pull(v[:, :4]), v[:, :4] @ M)
    assert_close(rows.quad(w), (M**2 * w).sum(-1)[:, None, None])
    assert_close(rows.quads(v.square()), (M**2 @ v.square().T).T[..., None, None])
    assert_close(rows.quad_diagonal(w), (M**2 * w).sum(-1)[:, None])
    assert_close(rows.sum_squares(), (M**2).sum(0))
    assert_close(rows.cross(more, D), (M * w) @ K.reshape(-1, 12).T)
    assert_close(rows.cross(rows, D), (M * w) @ M.T)


@pytest.mark.parametrize("n_positions", [1, 3])
def test_rows_differentiate_in_the_weights(n_positions: int, seed: int) -> None:
    rows, J = jacobian(4, 2, gen(seed), n_positions)
    w = (0.1 + torch.rand(12, generator=gen(seed), dtype=torch.float64)).requires_grad_()
    pairs = [
        (rows.quad(w), (J * w) @ J.mT),
        (rows.quads(torch.stack([w, w**2])), torch.stack([(J * w) @ J.mT, (J * w**2) @ J.mT])),
        (rows.quad_diagonal(w), (J**2 * w).sum(-1)),
    ]
    for mine, true in pairs:
        assert_close(mine, true)
        assert_close(*(torch.autograd.grad(found.sum(), w)[0] for found in (mine, true)))


def test_the_smallest_eigenvalue_is_found_from_above_and_closely(seed: int) -> None:
    values, Q = 10.0 ** torch.linspace(-5, 2, 12, dtype=torch.float64), torch.linalg.qr(randn(12, 12, g=gen(seed))).Q
    found = smallest_eigenvalue(torch.linalg.cholesky((Q * values) @ Q.T))
    assert 1e-5 * (1 - 1e-6) <= found < 1.01e-5


def test_rows_with_other_numbers_of_positions_stack(seed: int) -> None:
    rows, J = jacobian(2, 2, gen(seed), 3)
    more, K = jacobian(3, 2, gen(seed), 1)
    assert_close(rows.concatenated([more]).dense(), torch.cat([J, K]))
    assert_close(more.concatenated([rows]).dense(), torch.cat([K, J]))
    assert_close(more.concatenated([rows]).sum_squares(), (torch.cat([K, J]) ** 2).sum((0, 1)))


# --- Kronecker structures ---------------------------------------------------------------------------------------


def test_split_damping_is_the_product_of_the_damped_factors(seed: int) -> None:
    """(B + √δ I) ⊗ (A + √δ I), with eigenvalues (b + √δ)(a + √δ); every verb of the precision, and its gradient."""
    H, H_dense, P0 = kronecker_split(seed)
    A, B = factors(GROUPS, seed)
    root = P0.values[0].sqrt()
    damped = [torch.kron(0.6 * B_q + root * EYE[:2, :2], A_q + root * EYE[:3, :3]) for A_q, B_q in zip(A, B)]
    P = spread(torch.stack(damped), positions(GROUPS))
    Sigma = torch.linalg.inv(P)
    rows, J = one_layer(GROUPS)(4, 2, gen(seed), 3)
    v = randn(2, 12, g=gen(seed))
    found = H.plus(P0)
    eigenvalues = [torch.outer(0.6 * b + root, a + root) for a, b in zip(*map(torch.linalg.eigvalsh, (A, B)))]
    assert not H.exact_prior
    assert_close(H.to_dense(), H_dense)
    assert_close(found.to_dense(), P)
    assert_close(torch.linalg.eigvalsh(P), torch.stack(eigenvalues).flatten().sort().values)
    assert_close(found.mv(v), v @ P)
    assert_close(found.solve(v), v @ Sigma)
    assert_close(found.logdet(), torch.linalg.slogdet(P).logabsdet)
    assert_close(found.inv_diagonal(), Sigma.diagonal())
    R = found.half_solve(EYE).T
    assert_close(R @ R.T, Sigma)
    assert_close(found.inv_quad(rows), J @ Sigma @ J.mT)
    assert_close(found.inv_gram(rows), J.reshape(-1, 12) @ Sigma @ J.reshape(-1, 12).T)
    more = torch.linalg.eigvalsh(P - H_dense - P0.diagonal.diag())
    assert more.min() > -1e-12 and more.max() > 0.1  # always more concentrated


def test_split_and_exact_damping_agree_without_curvature(seed: int) -> None:
    H, _, P0 = kronecker_split(seed)
    assert isinstance(H, KroneckerCurvature)
    nothing = KroneckerFactors(torch.zeros(2, 3, 3).double(), 1.0, torch.zeros(2, 2, 2).double())
    idle = KroneckerCurvature("layer", GROUPS, nothing, H.scale, H.damping)
    assert_close(idle.plus(P0).to_dense(), P0.diagonal.diag())


@pytest.mark.parametrize("make", [kronecker, kronecker_groups, kronecker_split, eigen], ids=lambda m: m.__name__)
def test_an_uneven_prior_inside_a_block_is_refused(make, seed: int) -> None:
    H, _, _ = make(seed)
    values = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with pytest.raises(StructureError, match=r"'layer' needs one prior precision.*2 groups.*8, 4 entries"):
        H.plus(GroupedDiagonal(values, torch.tensor([0] * 8 + [1] * 4)))


def test_curvatures_of_other_data_pool_their_inputs(seed: int) -> None:
    """A is a mean over all positions seen, B a sum: not the sum of two Kronecker products."""
    H, _, _ = kronecker_groups(seed)
    assert isinstance(H, KroneckerCurvature)
    (A, B), (_, B_more) = factors(GROUPS, seed), factors(GROUPS, seed + 1)
    A_more = A + EYE[:3, :3]
    other = KroneckerCurvature("layer", GROUPS, KroneckerFactors(2 * A_more, 2.0, B_more), H.scale / 0.6, H.damping)
    both = H.mixed([other], torch.tensor([1.0, 3.0], dtype=torch.float64))
    A_all, B_all = (5 * A + 2 * A_more) / 7, 0.6 * B + 3 * B_more
    expected = torch.stack([torch.kron(B_q, A_q) for A_q, B_q in zip(A_all, B_all)])
    assert_close(both.to_dense(), spread(expected, positions(GROUPS)))


def test_eigenbases_of_their_own_do_not_add_up(seed: int) -> None:
    H, _, _ = eigen(seed)
    assert isinstance(H, EigenCurvature)
    other = EigenCurvature("layer", GROUPS, Basis(H.basis.U_A.flip(-1), H.basis.U_B.clone()), H.s)
    with pytest.raises(StructureError, match="EKFAC"):
        H.mixed([other], torch.ones(2, dtype=torch.float64))


def test_arrangements_go_there_and_back(seed: int) -> None:
    v = randn(2, 5, 12, g=gen(seed))
    W = GROUPS.matrices(v)
    assert_close(W, v[..., positions(GROUPS)])
    assert_close(GROUPS.flat(W, 12), v)
    moved = torch.cat([v.new_zeros(2, 5, 3), v], -1)
    assert_close(GROUPS.shifted(3).matrices(moved), W)
    assert_close(torch.cat(GROUPS.flat_parts(W), -1), v)
