"""Operators: exact adjoints, Joseph's matrix against chords and sums, filtered back-projection, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lapwing as lw
from lapwing.imaging.projections import joseph_matrix


def _back(y: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(6, 6, dtype=y.dtype)
    x[:, ::2] = y.flip(0).cumsum(0).flip(0)
    return x


OPERATORS = {
    "radon": lambda: lw.imaging.radon(9, 7),
    "radon, given angles": lambda: lw.imaging.radon(8, [0.0, 0.3, 1.2, 2.9], 13, 0.7),
    "blur": lambda: lw.imaging.blur(9, 1.3),
    "blur, reflected": lambda: lw.imaging.blur((9, 6), 2.0, edges="reflect"),
    "fourier": lambda: lw.imaging.fourier(8, torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.5),
    "fourier, columns": lambda: lw.imaging.fourier((6, 8), torch.arange(8) % 3 == 0),
    "dense": lambda: lw.imaging.Operator(_random(11, 30), (5, 6)),
    "sparse": lambda: lw.imaging.Operator(_random(11, 30).relu().to_sparse(), (5, 6)),
    "functions": lambda: lw.imaging.Operator(image_shape=(6, 6), forward=lambda x: x.cumsum(0)[:, ::2], adjoint=_back),
}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=OPERATORS, ids=str)
def A(request: pytest.FixtureRequest) -> lw.imaging.Operator:
    return OPERATORS[request.param]()


def test_adjoint(A: lw.imaging.Operator) -> None:
    x, y = _random(3, *A.image_shape), _random(3, *A.data_shape)
    left, right = (A(x) * y).sum(), (x * A.adjoint(y)).sum()
    assert abs(left - right) <= 1e-12 * A(x).norm() * y.norm()


def test_matrix_is_what_is_applied(A: lw.imaging.Operator) -> None:
    x = _random(*A.image_shape)
    assert A.matrix().dtype == torch.float64
    torch.testing.assert_close(A.matrix() @ x.flatten(), A(x).flatten(), rtol=1e-12, atol=1e-12)


def test_derivatives_are_the_operator_itself(A: lw.imaging.Operator) -> None:
    x, v = _random(*A.image_shape).requires_grad_(), _random(*A.image_shape)
    assert torch.autograd.gradcheck(A, (x,))
    assert torch.autograd.gradgradcheck(A, (x,))
    torch.testing.assert_close(torch.func.jvp(A, (x.detach(),), (v,))[1], A(v))
    torch.testing.assert_close(torch.vmap(A)(_random(2, *A.image_shape)), A(_random(2, *A.image_shape)))


def test_single_precision_and_leading_axes(A: lw.imaging.Operator) -> None:
    x = _random(2, 1, *A.image_shape)
    assert A(x.float()).dtype == torch.float32
    assert A(x).shape == (2, 1, *A.data_shape)
    torch.testing.assert_close(A(x.float()).double(), A(x), rtol=1e-4, atol=1e-5)


def test_projections_at_right_angles_are_sums() -> None:
    A, x = lw.imaging.radon(9, 2, 9, 1.0), _random(9, 9)
    torch.testing.assert_close(A(x)[0], x.sum(0))
    torch.testing.assert_close(A(x)[1], x.sum(1).flip(0))


def _disc(n: int, radius: float) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    distance = (at[:, None] ** 2 + at**2).sqrt()
    return (distance < radius).double(), distance


def test_projections_of_a_disc_are_chords() -> None:
    n, radius = 128, 50.0
    A = lw.imaging.radon(n, 12, 129, 1.0)
    data = A(_disc(n, radius)[0])
    u = torch.arange(129, dtype=torch.float64) - 64
    inside = u.abs() < 0.9 * radius
    chord = 2 * (radius**2 - u[inside] ** 2).sqrt()
    assert ((data[:, inside] - chord) / chord).abs().mean() < 0.01
    assert ((data[:, inside] - chord) / chord).abs().max() < 0.06


def test_every_angle_sees_every_pixel_once() -> None:
    """Of single pixels only on average: rays further apart than a pixel, along rows, may miss a part of it."""
    spacing = 2**0.5 * 28 / 41
    A = joseph_matrix(28, torch.arange(10, dtype=torch.float64) * torch.pi / 10, 41, spacing)
    mass = A.to_dense().reshape(10, 41, -1).sum(1) * spacing
    assert (mass.mean(1) - 1).abs().max() < 0.01
    assert (mass.mean(0) - 1).abs().max() < 0.07


def test_a_quarter_turn_of_the_image_is_a_quarter_turn_of_the_scanner() -> None:
    A, x = lw.imaging.radon(10, [0.3, 0.3 + torch.pi / 2], 15, 0.9), _random(10, 10)
    torch.testing.assert_close(A(torch.rot90(x, 1))[1], A(x)[0], rtol=1e-10, atol=1e-10)


def test_filtered_back_projection_of_a_disc() -> None:
    A = lw.imaging.radon(64, 180)
    disc, distance = _disc(64, 20)
    found = A.fbp(A(disc))
    assert abs(float(found[distance < 16].mean()) - 1) < 0.01
    assert abs(float(found[(distance > 24) & (distance < 31)].mean())) < 1e-3
    assert A.fbp(A(disc)[None]).shape == (1, 64, 64)


def test_default_geometry_is_the_published_one() -> None:
    A = lw.imaging.radon(28, 20)
    assert A.data_shape == (20, 41)
    assert A.sparse_matrix().layout == torch.sparse_csr


def test_scipy_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(7, 16, density=0.4, format="csc", random_state=0)
    A = lw.imaging.Operator(matrix, 4)
    torch.testing.assert_close(A.matrix(), torch.from_numpy(matrix.toarray()))


def test_numpy_images_and_data() -> None:
    A = lw.imaging.radon(6, 3)
    assert A(np.ones((6, 6), dtype=np.float32)).dtype == torch.float32
    assert A(np.ones((6, 6), dtype=np.uint8)).dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lw.imaging.radon(8, 0), "at least 1 angle"),
        (lambda: lw.imaging.radon(8, []), "at least one"),
        (lambda: lw.imaging.radon(8, [0.0, float("nan")]), "finite"),
        (lambda: lw.imaging.radon(0, 3), "n"),
        (lambda: lw.imaging.radon(8, 3, 0), "detectors"),
        (lambda: lw.imaging.radon(8, 3, 9, -1.0), "spacing"),
        (lambda: lw.imaging.blur(8, 0.0), "std"),
        (lambda: lw.imaging.fourier(8, torch.zeros(8, 8)), "no frequency"),
        (lambda: lw.imaging.fourier(8, torch.ones(8, 7)), "mask of"),
        (lambda: lw.imaging.Operator(torch.ones(3, 10), (4, 4)), "16 pixels"),
        (lambda: lw.imaging.Operator(torch.full((3, 16), torch.nan), (4, 4)), "NaN"),
        (lambda: lw.imaging.Operator(torch.ones(3, 16)), "image_shape"),
        (lambda: lw.imaging.Operator(image_shape=4), "two functions"),
        (lambda: lw.imaging.Operator(image_shape=4, forward=torch.relu, adjoint=torch.relu), "not the adjoint"),
        (lambda: lw.imaging.Operator(image_shape=4, forward=lambda x: x + 1, adjoint=lambda y: y), "adjoint|linear"),
        (lambda: lw.imaging.radon(8, 3)(torch.ones(7, 8)), "expected \\(8, 8\\)"),
        (lambda: lw.imaging.radon(8, 3).adjoint(torch.ones(8, 8)), "expected \\(3"),
        (lambda: lw.imaging.blur(8, 1.0).fbp(torch.ones(8, 8)), "no filtered"),
    ],
)
def test_bad_input(call: object, says: str) -> None:
    with pytest.raises(lw.LapwingError, match=says):
        call()  # type: ignore[operator]
