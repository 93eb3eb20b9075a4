"""The BoTorch model: joint Gaussians, gradients, exact conditioning against dense algebra, acquisition optimised."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor, nn

import lapwing as lw
from lapwing.botorch import FunctionDraw, LapwingModel
from oracle import assert_close

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]

NOISE = 0.1


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def posterior(m: int = 1, structure: str = "full") -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, m)).double()
    X = draw(15, 2)
    Y = torch.stack([X.sin().sum(1), X.cos().sum(1)], 1)[:, :m]
    return lw.fit(model, (X, Y), lw.Gaussian(noise_std=NOISE), structure=structure)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("shape", [(3, 2), (4, 1, 2), (2, 4, 3, 2)])
def test_the_joint_gaussian_is_that_of_the_posterior(m: int, shape: tuple[int, ...]):
    own = posterior(m)
    X = draw(*shape, seed=1)
    found = LapwingModel(own).posterior(X)
    assert found.mean.shape == (*shape[:-1], m)
    q = shape[-2]
    for one, mean, cov in zip(
        X.reshape(-1, q, 2),
        found.mean.reshape(-1, q * m),
        found.distribution.covariance_matrix.reshape(-1, q * m, q * m),
        strict=True,
    ):
        true = own.joint_outputs(one)
        assert_close(mean, true.mean)
        assert_close(cov, true.cov, 1e-9)


def test_noise_is_added_when_asked_for():
    X, model = draw(2, 3, 2), LapwingModel(posterior(2))
    plain, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    assert_close(noisy.variance, plain.variance + NOISE**2)
    given = model.posterior(X, observation_noise=torch.full((1, 1), 4.0).double())
    assert_close(given.variance, plain.variance + 4.0)


@pytest.mark.parametrize("m", [1, 2])
def test_conditioning_is_the_update_with_more_data(m: int):
    """For the linear model at fixed weights: the curvature of all data, and the mean of its own mode."""
    own = posterior(m)
    X, Y, x = draw(4, 2, seed=2), draw(4, m, seed=3), draw(3, 2, seed=4)
    found = LapwingModel(own).condition_on_observations(X, Y).posterior(x)
    more = own.updated((X, Y))
    truth = more.joint_outputs(x)
    assert_close(found.distribution.covariance_matrix, truth.cov, 1e-8)
    both = own.joint_outputs(torch.cat([x, X]))
    k = 3 * m
    gain = both.cov[:k, k:] @ torch.linalg.inv(both.cov[k:, k:] + NOISE**2 * torch.eye(4 * m).double())
    assert_close(found.mean.flatten(), both.mean[:k] + gain @ (Y.flatten() - both.mean[k:]), 1e-8)
    again = LapwingModel(own).condition_on_observations(X[:1], Y[:1]).condition_on_observations(X[1:], Y[1:])
    assert_close(again.posterior(x).mean, found.mean, 1e-8)


def test_fantasies_have_a_batch_of_their_own():
    model = LapwingModel(posterior())
    X = draw(5, 2, 2, seed=5)
    fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.batch_shape == (3, 5)
    found = fantasies.posterior(draw(3, 5, 1, 2, seed=6))
    assert found.mean.shape == (3, 5, 1, 1)
    assert bool((found.variance > 0).all())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_gradients_with_respect_to_x(structure: str):
    acquisition = LogExpectedImprovement(LapwingModel(posterior(structure=structure)), best_f=1.2)
    X = draw(3, 1, 2, seed=7).requires_grad_()
    (g,) = torch.autograd.grad(acquisition(X).sum(), X)
    h, step = 1e-6, draw(3, 1, 2, seed=8)
    with torch.no_grad():
        slope = (acquisition(X + h * step).sum() - acquisition(X - h * step).sum()) / (2 * h)
    assert_close((g * step).sum(), slope, 1e-5)


def test_acquisitions_are_optimised():
    model, bounds = LapwingModel(posterior()), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    small = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 5}}
    for q, acquisition in (
        (1, LogExpectedImprovement(model, best_f=1.0)),
        (2, qLogExpectedImprovement(model, best_f=1.0, sampler=SobolQMCNormalSampler(torch.Size([16])))),
        (2, qKnowledgeGradient(model, num_fantasies=2)),
    ):
        candidates, value = optimize_acqf(acquisition, bounds=bounds, q=q, **small)
        assert candidates.shape == (q, 2) and bool(value.isfinite().all())


def test_transforms_are_undone():
    X, Y = 10 * draw(15, 2), 100 + 50 * draw(15, 1, seed=1)
    normalize, standardize = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [10.0, 10.0]]).double()), Standardize(1)
    scaled = standardize(Y)[0]
    standardize.eval()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    own = lw.fit(net, (X / 10, scaled), lw.Gaussian(noise_std=NOISE))
    model = LapwingModel(own, input_transform=normalize, outcome_transform=standardize)
    found, inside = model.posterior(X[:3]), own.outputs(X[:3] / 10)
    assert_close(found.mean, inside.mean * Y.std() + Y.mean(), 1e-7)
    assert_close(found.variance, inside.var * Y.var(), 1e-7)
    (one,) = model.function_draws(1)
    assert_close(one(X[:3]), own.functions(1)(X[:3] / 10)[0] * Y.std() + Y.mean(), 1e-7)


def test_function_draws_are_models_for_thompson_sampling():
    own = posterior(2)
    draws = LapwingModel(own).function_draws(3, torch.Generator().manual_seed(1))
    X = draw(4, 5, 2, seed=9)
    truth = own.functions(3, torch.Generator().manual_seed(1))(X.reshape(-1, 2)).reshape(3, 4, 5, 2)
    for one, expected in zip(draws, truth, strict=True):
        assert isinstance(one, FunctionDraw)
        assert_close(one(X), expected)
        assert_close(one.posterior(X).mean, expected)


def test_some_of_the_outputs():
    X, model = draw(3, 2), LapwingModel(posterior(2))
    whole = model.posterior(X)
    for found in (model.posterior(X, output_indices=[1]), model.subset_output([1]).posterior(X)):
        assert_close(found.mean, whole.mean[..., 1:])
        assert_close(found.variance, whole.variance[..., 1:])
    assert model.subset_output([1]).num_outputs == 1


def test_bad_input():
    with pytest.raises(lw.InputTypeError, match="expected a Posterior"):
        LapwingModel(nn.Linear(2, 1))
    for Y in (draw(1, 1), draw(2, 3), draw(2)):  # for two inputs and one output
        with pytest.raises(lw.ShapeError, match=r"\(\.\.\., 2, 1\)"):
            LapwingModel(posterior()).condition_on_observations(draw(2, 2), Y)
    classes = lw.fit(nn.Linear(2, 2).double(), (draw(6, 2), torch.arange(6) % 2), "classification")
    with pytest.raises(lw.StructureError, match="Gaussian likelihood"):
        LapwingModel(classes).condition_on_observations(draw(1, 2), draw(1, 2))
    with pytest.raises(lw.StructureError, match="no noise"):
        LapwingModel(classes).posterior(draw(1, 2), observation_noise=True)
