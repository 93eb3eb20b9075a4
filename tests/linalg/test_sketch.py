"""Sketches of Gram matrices against the matrices themselves, and the Nyström approximation by its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg import GramSketch, Sketch
from lapwing.linalg.sketch import test_matrix as cosines
from oracle import assert_close

CPU = torch.device("cpu")


def rows(n: int, q: int, d: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of a matrix of this rank, with columns of unequal size."""
    g = torch.Generator().manual_seed(seed)
    scales = 2.0 ** -torch.arange(rank, dtype=torch.float64)
    left, right = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((q, n, rank), (q, rank, d)))
    return ((left * scales) @ right).transpose(0, 1).to(dtype)


def gram(x: Tensor) -> Tensor:
    return torch.einsum("mqd,mqe->qde", x.double(), x.double())


def dense(values: Tensor, U: Tensor) -> Tensor:
    inside = U @ U.mT
    return (U * values[:, None, :-1]) @ U.mT + values[:, -1:, None] * (torch.eye(U.shape[1]) - inside)


def sketched(parts: list[Tensor], rank: int, *, ones: bool = False) -> Sketch:
    _, q, d = parts[0].shape
    total = GramSketch(q, d + ones, rank, CPU, {})
    for part in parts:
        total.add(part, ones=ones)
    return total.result()


@pytest.mark.parametrize("d", [7, 40])
def test_the_test_matrix_is_orthonormal_and_always_the_same(d: int) -> None:
    Omega = cosines(d, d - 1, torch.float64, CPU)
    assert_close(Omega.T @ Omega, torch.eye(d - 1, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(cosines(d, d - 1, torch.float64, CPU), Omega)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("q", [1, 2])
def test_a_matrix_of_small_rank_is_found_exactly(q: int, ones: bool) -> None:
    x = rows(50, q, 20, 5)
    with_ones = torch.cat([x, torch.ones(50, q, 1)], -1) if ones else x
    values, U = sketched(list(x.split(7)), 9, ones=ones).leading(1.0)
    assert_close(dense(values, U), gram(with_ones), rtol=1e-10)
    assert_close(U.mT @ U, torch.eye(U.shape[2]).double().expand(q, -1, -1))
    assert float(values[:, -1].max()) == 0


def test_every_way_to_add_gives_the_same_sum() -> None:
    x = rows(30, 1, 12, 6)
    whole = sketched([x], 8)
    product = GramSketch(1, 12, 8, CPU, {})
    product.add_product(gram(x[:10]))
    product.add_transposed(x[10:, 0].reshape(2, 10, 12).mT)
    again = GramSketch(1, 12, 8, CPU, {})
    again.restore(sketch_state(sketched([x[:10]], 8)))
    again.add(x[10:])
    for found in (product.result(), again.result(), Sketch.of(gram(x), 8)):
        assert_close(found.Y, whole.Y)
        assert_close(found.trace, whole.trace)


def sketch_state(sketch: Sketch) -> dict[str, Tensor]:
    return {"Y": sketch.Y, "trace": sketch.trace}


def test_a_truncated_sketch_is_the_nystrom_approximation_and_the_mean_of_the_rest() -> None:
    M, rank = gram(rows(60, 1, 24, 24)), 6
    values, U = Sketch.of(M, rank).leading(1.0)
    Omega = cosines(24, rank, torch.float64, CPU)
    Y = M[0] @ Omega
    near = Y @ torch.linalg.inv(Omega.T @ Y) @ Y.T
    rest = (M[0].trace() - near.trace()) / (24 - rank)
    top = torch.linalg.eigh(near).eigenvectors[:, -rank:]
    assert_close(dense(values, U)[0], near + rest * (torch.eye(24) - top @ top.T), rtol=1e-9)
    assert_close(dense(values, U)[0].trace(), M[0].trace(), rtol=1e-12)
    assert torch.linalg.eigvalsh(M[0] - near).min() > -1e-9 * M[0].trace()  # never more curvature than there is


def test_the_fewest_directions_that_hold_the_energy_are_kept() -> None:
    M = gram(rows(200, 1, 30, 30))
    exact = torch.linalg.eigvalsh(M[0]).flip(0)
    for energy in (0.5, 0.9, 0.99):
        values, U = Sketch.of(M, 20).leading(energy)
        kept, share = U.shape[2], values[0, :-1].cumsum(0) / M[0].trace()
        assert share[-1] >= energy and (kept == 1 or share[-2] < energy)
        assert_close(values[0, :kept], exact[:kept], rtol=1e-2)  # fast decay: the leading ones are found well
    assert Sketch.of(M, 3).leading(0.9999)[1].shape[2] == 3  # out of reach: all there are


def test_a_sketch_of_directions_kept_is_that_of_their_matrix() -> None:
    values, U = Sketch.of(gram(rows(60, 2, 24, 24)), 6).leading(0.9)
    again, direct = Sketch.of_pairs(values, U, 6), Sketch.of(dense(values, U), 6)
    assert_close(again.Y, direct.Y)
    assert_close(again.trace, direct.trace)


def test_float32_rows_and_nothing_at_all() -> None:
    x = rows(300, 1, 600, 8, dtype=torch.float32)
    sketch = sketched(list(x.split(64)), 40)
    assert sketch.Y.dtype == torch.float32
    values, U = sketch.leading(1.0)
    assert_close(dense(values, U.double()), gram(x), rtol=1e-4)
    values, U = GramSketch(2, 9, 4, CPU, {}).result().leading(0.99)
    assert_close(dense(values, U), torch.zeros(2, 9, 9))
