"""Answers are differentiable in the inputs: against autograd through dense Jacobians, and central differences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from cases import CASES, Case, by_name
from lapwing.linalg import CG
from oracle import assert_close, batch_size, outputs, parameters, slice_x

STRUCTURES = {
    "full": lw.Full(),
    "block": lw.Block(),
    "kron": lw.Kron(),
    "kron-split": lw.Kron(damping="split"),
    "kron-reduce": lw.Kron(sharing="reduce"),
    "ekfac": lw.Ekfac(),
    "diag": lw.Diag(),
    "lowrank": lw.LowRank(rank=7),
    "gp": lw.GP(),
    "matrixfree": lw.MatrixFree(solver=CG(rtol=1e-12)),
}
OF_OUTPUTS: dict[str, Callable[[lw.Posterior, Any], Tensor]] = {
    "mean": lambda posterior, x: posterior.outputs(x).mean,
    "var": lambda posterior, x: posterior.outputs(x).var,
    "cov": lambda posterior, x: posterior.outputs(x).cov,
    "joint mean": lambda posterior, x: posterior.joint_outputs(x).mean,
    "joint cov": lambda posterior, x: posterior.joint_outputs(x).cov,
    "one function": lambda posterior, x: posterior.functions(1)(x),
    "functions": lambda posterior, x: posterior.functions(5)(x),
}
OF_TARGETS: dict[str, Callable[[lw.Posterior, Any], Tensor]] = {
    "mean": lambda posterior, x: posterior.predict(x).mean,
    "variance": lambda posterior, x: posterior.predict(x).variance,
    "interval": lambda posterior, x: posterior.predict(x).interval(0.8)[1],
    "log_prob": lambda posterior, x: posterior.predict(x).log_prob(torch.ones(3, 2, dtype=torch.float64)),
    "bnn": lambda posterior, x: posterior.predict(x, predictive="bnn", n_samples=4).std,
    "bnn interval": lambda posterior, x: posterior.predict(x, predictive="bnn", n_samples=4).interval(0.8)[0],
}
OF_CLASSES: dict[str, Callable[[lw.Posterior, Any], Tensor]] = {
    "probs": lambda posterior, x: posterior.predict(x).probs,
    "epistemic": lambda posterior, x: posterior.predict(x).epistemic,
    "class variance": lambda posterior, x: posterior.predict(x).class_variance.epistemic,
    "log_prob": lambda posterior, x: posterior.predict(x).log_prob(torch.ones(3, dtype=torch.long)),
    "probit": lambda posterior, x: posterior.predict(x, link="probit").probs,
    "pairwise": lambda posterior, x: posterior.predict(x, link="pairwise").probs,
    "bnn": lambda posterior, x: posterior.predict(x, predictive="bnn", n_samples=4).probs,
}


def mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def convolutional(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Softplus(), nn.Conv2d(3, 2, 2, stride=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(8, outputs),
    ).double()  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(structure: Any, task: str, network: str = "mlp", **options: Any) -> tuple[lw.Posterior, Tensor]:
    """A posterior, and inputs to ask at."""
    classes, shape = task == "classification", (3,) if network == "mlp" else (1, 4, 4)
    model = mlp(3, 3 if classes else 2) if network == "mlp" else convolutional(3 if classes else 2)
    Y = torch.arange(8) % 3 if classes else draw(8, 2, seed=2)
    likelihood = task if classes else lw.Gaussian(noise_std=0.3)
    return lw.fit(model, (draw(8, *shape), Y), likelihood, structure=structure, **options), draw(3, *shape, seed=1)


def leaves(x: Any) -> list[Tensor]:
    values = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    return [v for v in values if v.is_floating_point()]


def moved(x: Any, steps: list[Tensor], size: float) -> Any:
    supply = iter(steps)

    def step(v: Tensor) -> Tensor:
        return v.detach() + size * next(supply) if v.is_floating_point() else v

    if isinstance(x, dict):
        return {key: step(v) for key, v in x.items()}
    return tuple(map(step, x)) if isinstance(x, tuple) else step(x)


def attached(x: Any) -> Any:
    x = moved(x, [torch.zeros_like(v) for v in leaves(x)], 0.0)
    for v in leaves(x):
        v.requires_grad_()
    return x


def check_along_a_line(ask: Callable[[Any], Tensor], x: Any, rtol: float = 1e-6, h: float = 1e-5) -> None:
    """⟨∇ (w · answer), d⟩ is the central difference along d, and the value is the same with and without a graph."""
    directions = [draw(*v.shape, seed=3) for v in leaves(x)]
    with_graph = attached(x)
    answer = ask(with_graph)
    with torch.no_grad():
        plain = ask(x)
    assert not plain.requires_grad
    assert_close(answer.detach(), plain, 1e-9)
    w = draw(*answer.shape, seed=4)
    if not answer.requires_grad:  # then it must not depend on x
        gradients: Any = [None] * len(directions)
    else:
        gradients = torch.autograd.grad((w * answer).sum(), leaves(with_graph), allow_unused=True)
    slope = sum((float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None), 0.0)
    with torch.no_grad():
        up, down = (float((w * ask(moved(x, directions, side * h))).sum()) for side in (1, -1))
    scale = abs(slope) + float((w * plain).abs().sum())
    assert abs(slope - (up - down) / (2 * h)) <= rtol * scale


def dense_gaussian(model: nn.Module, x: Any, Sigma: Tensor) -> tuple[Tensor, Tensor]:
    """f (B, K) and J Σ J'ᵀ (BK, BK), from Jacobians whose rows keep their graph."""
    ps = list(parameters(model).values())
    rows, values = [], []
    for i in range(batch_size(x)):
        f = outputs(model, slice_x(x, i))[0]
        values.append(f)
        for f_k in f:
            grads = torch.autograd.grad(f_k, ps, create_graph=True, retain_graph=True, allow_unused=True)
            rows.append(torch.cat([(p * 0 if g is None else g).reshape(-1) for g, p in zip(grads, ps, strict=True)]))
    J = torch.stack(rows)
    return torch.stack(values), J @ Sigma @ J.T


@pytest.mark.parametrize("network", ["mlp", "conv"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients_are_those_of_dense_linear_algebra(name: str, network: str):
    posterior, x = fitted(STRUCTURES[name], "regression", network)
    model = mlp(3, 2) if network == "mlp" else convolutional(2)
    Sigma = posterior.covariance()
    ours, truth = attached(x), attached(x)
    f, cov = dense_gaussian(model, truth, Sigma)
    rtol = 1e-7 if name == "matrixfree" else 1e-9
    for answer, true in zip(posterior.joint_outputs(ours), (f.flatten(), cov), strict=True):
        w = draw(*true.shape, seed=5)
        for got, expected in zip(
            torch.autograd.grad((w * answer).sum(), ours, retain_graph=True),
            torch.autograd.grad((w * true).sum(), truth, retain_graph=True),
            strict=True,
        ):
            assert_close(got, expected, rtol)
    w = draw(3, 2, seed=6)
    (got,) = torch.autograd.grad((w * posterior.outputs(ours).var).sum(), ours)
    (expected,) = torch.autograd.grad((w * cov.diagonal().view(3, 2)).sum(), truth)
    assert_close(got, expected, rtol)


@pytest.mark.parametrize("name", ["kron", "ekfac", "diag"])
def test_contractions_that_are_recomputed_give_the_same(name: str, monkeypatch):
    monkeypatch.setattr(sys.modules["lapwing.linalg.recomputed"], "_KEPT_FLOATS", -1)
    for network in ("mlp", "conv"):
        test_gradients_are_those_of_dense_linear_algebra(name, network)


@pytest.mark.parametrize("question", OF_OUTPUTS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_equal_central_differences(name: str, question: str):
    posterior, x = fitted(STRUCTURES[name], "classification", "conv")
    check_along_a_line(lambda x: OF_OUTPUTS[question](posterior, x), x)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize(
    ("task", "question"), [("regression", q) for q in OF_TARGETS] + [("classification", q) for q in OF_CLASSES]
)
def test_predictions_equal_central_differences(task: str, question: str, params: str, structure: str):
    posterior, x = fitted(structure, task, params=params)
    ask = (OF_TARGETS if task == "regression" else OF_CLASSES)[question]
    check_along_a_line(lambda x: ask(posterior, x), x)


ONCE_ONLY = {"embedding-bag-weighted", "checkpointed"}  # torch cannot differentiate these twice
FLOATING = [case for case in CASES if leaves(case.make_x(1)) and case.name not in ONCE_ONLY]


@pytest.mark.parametrize("case", FLOATING, ids=lambda case: case.name)
def test_every_network_of_the_zoo(case: Case):
    model, x = case.make_model(), case.make_x(case.n)
    y = case.make_y(case.n, case.flat_outputs(model, x))
    likelihood = lw.HeteroscedasticGaussian() if case.kind == "hetero" else case.word
    if case.class_axis != -1 and case.kind == "categorical":
        likelihood = lw.Categorical(class_axis=case.class_axis)
    posterior = lw.fit(model, (x, y), likelihood, structure="kron", prior=2.0)
    at = case.make_x(2, seed=1)
    for question in ("mean", "var", "one function"):
        check_along_a_line(lambda x, q=question: OF_OUTPUTS[q](posterior, x), at, rtol=3e-6)


@pytest.mark.parametrize("name", sorted(ONCE_ONLY))
def test_what_torch_cannot_differentiate_twice_is_an_error_and_no_wrong_number(name: str):
    case = by_name(name)
    model, x = case.make_model(), case.make_x(case.n)
    posterior = lw.fit(model, (x, case.make_y(case.n, case.flat_outputs(model, x))), case.word, structure="kron")
    at = attached(case.make_x(2, seed=1))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(posterior.outputs(at).var.sum(), leaves(at))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
def test_a_moved_mean_has_gradients_too(structure: str):
    posterior, x = fitted(structure, "regression")
    tuned = lw.tune(posterior, (draw(8, 3), draw(8, 2, seed=2)), mean="linear_mode")
    refined = lw.refine(posterior, (draw(8, 3), draw(8, 2, seed=2)))
    for each in (tuned, refined):
        for question in ("mean", "var", "functions"):
            check_along_a_line(lambda x, p=each, q=question: OF_OUTPUTS[q](p, x), x)


def test_counts_and_heteroscedastic_noise():
    x, at = draw(8, 3), draw(3, 3, seed=1)
    counts = lw.fit(mlp(3, 1), (x, torch.arange(8.0)[:, None].double() % 4), "count")
    both = lw.fit(mlp(3, 2), (x, draw(8, seed=2)), lw.HeteroscedasticGaussian())
    for posterior in (counts, both):
        for question in ("mean", "variance"):
            check_along_a_line(lambda x, p=posterior, q=question: OF_TARGETS[q](p, x), at)
    check_along_a_line(lambda x: both.predict(x).interval(0.8)[1], at)


def test_a_logit_without_variance_has_a_finite_gradient():
    model = nn.Linear(2, 1, bias=False).double()
    posterior = lw.fit(model, (draw(8, 2), torch.arange(8.0)[:, None].double() % 2), "binary")
    x = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(posterior.predict(x).probs.sum(), x)
    assert_close(g, model.weight / 4)  # σ′(0) w: the variance has its minimum there


def test_classes_whose_covariance_is_singular():
    """Two weights, three classes: the covariance has rank two at every input."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    posterior = lw.fit(model, (draw(8, 3), torch.arange(8) % 3), "classification", params=["0.bias"], structure="full")
    check_along_a_line(lambda x: posterior.predict(x).probs, draw(3, 3, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_datum_and_batches_agree(dtype: torch.dtype):
    model = mlp(3, 2).to(dtype)
    posterior = lw.fit(model, (draw(8, 3).to(dtype), draw(8, 2, seed=2).to(dtype)), "regression", structure="kron")
    x = draw(5, 3, seed=1).to(dtype).requires_grad_()
    (together,) = torch.autograd.grad(posterior.predict(x).variance.sum(), x)
    alone = [torch.autograd.grad(posterior.predict(row[None]).variance.sum(), x)[0] for row in x]
    assert together.dtype == dtype
    assert_close(together, sum(alone), 1e-4 if dtype == torch.float32 else 1e-10)


def test_nothing_has_a_graph_when_nobody_asks():
    posterior, x = fitted("kron", "regression")
    for ask in (*OF_OUTPUTS.values(), *OF_TARGETS.values()):
        assert not ask(posterior, x).requires_grad
        with torch.no_grad():
            assert not ask(posterior, attached(x)).requires_grad


def test_the_model_and_its_gradients_stay_as_they_were():
    model = mlp(3, 2)
    posterior = lw.fit(model, (draw(8, 3), draw(8, 2, seed=2)), "regression", structure="kron")
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    x = draw(3, 3).requires_grad_()
    posterior.predict(x).variance.sum().backward()
    assert x.grad is not None and bool(x.grad.ne(0).all())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_second_derivatives_exist():
    posterior, x = fitted("kron", "regression")
    hessian = torch.autograd.functional.hessian(lambda x: posterior.outputs(x).var.sum(), x[:1])
    h = 1e-4
    up, down, here = (posterior.outputs(x[:1] + side * h * torch.eye(3)[0]).var.sum() for side in (1, -1, 0))
    assert_close(hessian[0, 0, 0, 0], (up - 2 * here + down) / h**2, 1e-4)
