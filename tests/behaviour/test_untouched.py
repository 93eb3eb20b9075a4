"""A model is borrowed, never kept: after every call, and after every failure inside one, it is what it was."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lapwing as lw
from oracle import assert_close
from untouched import changes, model_facts, stir, untouched

N = 5
X = torch.linspace(-1, 1, 3 * N, dtype=torch.float64).reshape(N, 3)
Y = torch.arange(N) % 2
REAL = torch.linspace(-1, 1, 2 * N, dtype=torch.float64).reshape(N, 2)


# --- models as training leaves them -------------------------------------------------------------------------


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model(torch.randn(8, 3)).sum().backward()  # running averages, gradients
    return model


def dropout() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    model[1].eval()  # a mode of its own
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model.heard = []  # what the user's hooks saw
    model[0].register_forward_hook(lambda *_: model.heard.append("forward"))
    model[1].register_forward_pre_hook(lambda *_: model.heard.append("before"))
    model[2].register_full_backward_hook(lambda *_: model.heard.append("backward"))
    model[2].weight.register_hook(lambda gradient: model.heard.append("weight"))
    return model


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[..., None])[0][:, -1])


class Writer(nn.Module):
    """Writes into a buffer, a counter, a list, a dictionary and the global random states at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(4))
        self.calls, self.log, self.cache = 0, [], {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        self.total += 1.0
        self.calls += 1
        self.log.append(self.calls)
        self.cache["last"] = self.latest = h
        torch.rand(1), np.random.rand()
        return self.head(h)


def writer() -> nn.Module:
    return Writer()


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].bias.grad = torch.full((2,), -0.0)
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.square()], -1)
        return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


MAKERS = [
    batch_norm, dropout, hooked, old_weight_norm, spectral, Recurrent, writer, partly_frozen, Attention
]  # fmt: skip


def made(maker: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = maker().double().train()
    if maker is dropout:
        model[1].eval()
    stir()
    return model


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return made(request.param)


# --- after every call ---------------------------------------------------------------------------------------


def fits(model: nn.Module) -> Iterator[Callable[[], lw.Posterior]]:
    for structure in ("auto", "full", "block", "diag"):
        yield lambda structure=structure: lw.fit(model, (X, Y), "classification", structure=structure)
    for fisher in ("exact", "mc", "empirical"):
        yield lambda fisher=fisher: lw.fit(model, (X, REAL), lw.Gaussian(noise_std=0.4), fisher=fisher)
    for params in ("last_layer", ["*bias*"]):
        yield lambda params=params: lw.fit(model, (X, REAL), "regression", params=params)


def test_fit_leaves_no_trace(model: nn.Module) -> None:
    for call in fits(model):
        with untouched(model):
            call()
    with untouched(model):
        lw.prior(model, groups="layer")
        shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2, shuffle=True)
        lw.fit(model, shuffled, "classification")


def questions(posterior: lw.Posterior) -> Iterator[Callable[[], Any]]:
    yield lambda: tuple(posterior.outputs(X))
    yield lambda: posterior.joint_outputs(X)
    yield lambda: posterior.functions(3)(X)
    yield lambda: posterior.sample(2)
    yield posterior.marginal_variance
    yield posterior.covariance
    yield posterior.log_evidence
    yield posterior.effective_dimension
    yield lambda: str(posterior.diagnose())
    yield lambda: posterior.with_prior(3.0).predict(X)
    for predictive in ("glm", "bnn"):
        yield lambda predictive=predictive: posterior.predict(X, predictive=predictive, n_samples=4)


def test_questions_to_a_classifier_leave_no_trace(model: nn.Module) -> None:
    posterior = lw.fit(model, (X, Y), "classification")
    for call in questions(posterior):
        with untouched(model):
            call()
    for link in ("probit", "pairwise", "bridge", "bridge_norm", "mc"):
        with untouched(model):
            prediction = posterior.predict(X, link=link, n_samples=4)
            _ = prediction.probs, prediction.entropy, prediction.epistemic, prediction.log_prob(Y)
    with untouched(model):
        posterior.updated((X, Y)).predict(X)


@pytest.mark.filterwarnings("ignore:The best held-out NLL")
def test_tuning_leaves_no_trace(model: nn.Module) -> None:
    posterior = lw.fit(model, (X, REAL), "regression")
    for by in ("evidence", "fixed_point", "validation"):
        with untouched(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = lw.tune(posterior, by=by, validation=(X, REAL), progress=False)
            tuned.predict(X).interval(0.9)
    with untouched(model):
        lw.tune(posterior, groups="layer").predict(X, predictive="bnn", n_samples=3)


def test_users_hooks_still_fire_and_only_theirs(seed: int) -> None:
    model = made(hooked)
    posterior = lw.fit(model, (X, Y), "classification")
    posterior.predict(X)
    model.heard.clear()
    model(X).sum().backward()
    assert sorted(model.heard) == ["backward", "before", "forward", "weight"]


def test_the_watch_itself_sees_changes(seed: int) -> None:
    """A check that nothing changed is worth something only if it notices a change."""
    deeds: list[Callable[[nn.Module], Any]] = [
        lambda m: m.eval(),
        lambda m: m[0].weight.data.add_(0.0),
        lambda m: m[0].weight.data.mul_(1 + 1e-15).add_(1e-16),
        lambda m: m[1].running_mean.add_(1.0),
        lambda m: m.zero_grad(),
        lambda m: m[0].weight.grad.add_(1.0),
        lambda m: m[3].bias.requires_grad_(False),
        lambda m: m[2].register_forward_hook(lambda *_: None),
        lambda m: m[2].register_full_backward_pre_hook(lambda *_: None),
        lambda m: setattr(m, "extra", 1),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    ]
    for deed in deeds[:1] + deeds[2:]:
        model = made(batch_norm)
        before = model_facts(model)
        deed(model)
        assert changes(before, model_facts(model))


# --- after a failure in the middle --------------------------------------------------------------------------


@dataclass
class Fuse:
    """Raises at the k-th call, and never again."""

    k: int
    error: type[BaseException]
    calls: int = field(default=0)

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.k:
            raise self.error("blown")


ERRORS = [RuntimeError, KeyboardInterrupt, lw.ShapeError]


def work(model: nn.Module, data: Any = None, likelihood: Any = None, x: Any = X) -> None:
    """Every kind of visit to the model: probe, pass, predictions."""
    posterior = lw.fit(model, data or [(X[:3], REAL[:3]), (X[3:], REAL[3:])], likelihood or lw.Gaussian(0.5))
    posterior.predict(x)
    posterior.predict(x, predictive="bnn", n_samples=3)
    posterior.updated([(x, REAL)])


def survived(model: nn.Module, fuse: Fuse, run: Callable[[], Any]) -> bool:
    """Whether the fuse blew; the model must be untouched in either case."""
    stir()
    with untouched(model):
        try:
            run()
        except (RuntimeError, KeyboardInterrupt, lw.LapwingError) as error:
            assert "blown" in str(error)
    return fuse.calls >= fuse.k


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_failures_in_a_hook(error: type[BaseException]) -> None:
    k = 1
    while True:  # at the first, second, third, … visit to the layer, until the work gets through
        model = made(batch_norm)
        fuse = Fuse(k, error)
        model[2].register_forward_hook(fuse)
        if not survived(model, fuse, lambda: work(model)):  # noqa: B023
            break
        k += 1 if k < 12 else 5
    assert k > 12


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_failures_in_a_backward_pass(error: type[BaseException], k: int) -> None:
    model = made(batch_norm)
    fuse = Fuse(k, error)
    model[2].register_full_backward_hook(fuse)
    assert survived(model, fuse, lambda: work(model))


@pytest.mark.parametrize("maker", [batch_norm, old_weight_norm, spectral, Recurrent, writer, Attention])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_failures_in_the_forward_of_any_model(maker: Callable[[], nn.Module], k: int) -> None:
    model = made(maker)
    fuse = Fuse(k, KeyboardInterrupt)
    model.register_forward_hook(fuse)
    assert survived(model, fuse, lambda: work(model))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_failures_in_the_data_set(error: type[BaseException], k: int) -> None:
    fuse = Fuse(k, error)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            torch.rand(1), np.random.rand()
            fuse()
            return X[i], REAL[i]

    model = made(batch_norm)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
    assert survived(model, fuse, lambda: work(model, loader))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_failures_in_a_likelihood(error: type[BaseException], k: int) -> None:
    fuse = Fuse(k, error)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        fuse()
        return -0.5 * (f - y).square().sum()

    model = made(dropout)
    assert survived(model, fuse, lambda: work(model, likelihood=lw.CustomLikelihood(log_prob)))


def test_work_goes_on_after_a_failure() -> None:
    """A lock or a mode left behind would show in the next call."""
    model = made(batch_norm)
    expected = lw.fit(model, (X, REAL), lw.Gaussian(0.5)).predict(X).variance
    fuse = Fuse(6, KeyboardInterrupt)
    handle = model[2].register_forward_hook(fuse)
    with pytest.raises(KeyboardInterrupt):
        work(model)
    handle.remove()
    assert torch.equal(lw.fit(model, (X, REAL), lw.Gaussian(0.5)).predict(X).variance, expected)


# --- the surroundings do not matter -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")],
    ids=["no_grad", "inference", "autocast"],
)
def test_grad_modes_do_not_matter(model: nn.Module, mode: Callable[[], Any]) -> None:
    def answers() -> list[Tensor]:
        posterior = lw.fit(model, (X * 1.0, REAL * 1.0), lw.Gaussian(0.5), structure="block")
        tuned = lw.tune(lw.fit(model, (X * 1.0, REAL * 1.0), lw.Gaussian(0.5), structure="full"), groups="layer")
        return [posterior.outputs(X * 1.0).cov, posterior.log_evidence(), tuned.predict(X * 1.0).variance]

    expected = answers()
    with untouched(model), mode():
        found = answers()
    for a, b in zip(found, expected, strict=True):
        assert_close(a.clone(), b, rtol=1e-12)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp"])
def test_autocast_changes_no_bit(structure: str) -> None:
    """Nor does it reach what is computed outside the network: products of float32 Jacobians."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(20, 3), torch.arange(20) % 2

    def answers() -> list[Tensor]:
        posterior = lw.fit(model, (x, y), "classification", structure=structure)
        tuned = lw.tune(posterior, groups="layer")
        samples = [tuned.sample(3), tuned.functions(3)(x), tuned.predict(x, predictive="bnn", n_samples=5).probs]
        gaussians = [posterior.outputs(x).cov, posterior.outputs(x).var, posterior.joint_outputs(x[:4]).cov]
        sums = [tuned.log_evidence(), tuned.marginal_variance(), tuned.effective_dimension()]
        return [tuned.predict(x).probs, lw.refine(posterior).predict(x).probs, *samples, *gaussians, *sums]

    expected = answers()
    with untouched(model), torch.autocast("cpu", torch.bfloat16):
        found = answers()
        assert (x @ x.T).dtype == torch.bfloat16  # it was on all the time
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), k


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "ipu", "maia", "privateuseone"])
def test_autocast_is_off_inside_for_every_kind_of_device(device: str) -> None:
    """Without the device: what counts is the state that its kernels would read."""
    seen: list[bool] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled(device))
            return super().forward(x)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled(device))
        return -(f - y).square().sum()

    model, x = Looking(3, 1), torch.randn(6, 3)
    torch.set_autocast_enabled(device, True)
    try:
        posterior = lw.fit(model, (x, torch.randn(6, 1)), lw.CustomLikelihood(log_prob), prior=2.0)
        posterior.predict(x).log_prob(torch.zeros(6, 1))
        posterior.outputs(x).cov  # noqa: B018
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)
    assert len(seen) > 2 and not any(seen)


def test_a_buffer_may_be_made_on_first_use() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("scale", None)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(2), persistent=False)
                self.scale = torch.full((2,), 0.5)
            return self.scale * self.mask * self.layer(x)

    model, X, Y = Masked(), torch.randn(6, 3), torch.arange(6) % 2
    with untouched(model):
        posterior = lw.tune(lw.fit(model, (X, Y), "classification", structure="kron", progress=False))
        mean = posterior.outputs(X).mean
    torch.testing.assert_close(mean, 0.5 * model.layer(X))


def test_a_model_built_in_inference_mode_can_be_fitted() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2).double()
    posterior = lw.fit(model, (X, Y), "classification")
    assert bool(torch.isfinite(posterior.predict(X).probs).all())


def test_training_and_evaluation_mode_do_not_matter(model: nn.Module) -> None:
    trained = lw.fit(model.train(), (X, REAL), lw.Gaussian(0.5)).outputs(X).cov
    evaluated = lw.fit(model.eval(), (X, REAL), lw.Gaussian(0.5)).outputs(X).cov
    assert torch.equal(trained, evaluated)


def test_training_on_does_not_move_the_posterior(model: nn.Module) -> None:
    posterior = lw.fit(model, (X, REAL), lw.Gaussian(0.5))
    before = posterior.predict(X), posterior.functions(2)(X), posterior.predict(X, predictive="bnn", n_samples=3).mean
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(X).square().sum().backward()
        optimiser.step()
    model.eval()
    with untouched(model):
        after = (
            posterior.predict(X),
            posterior.functions(2)(X),
            posterior.predict(X, predictive="bnn", n_samples=3).mean,
        )
    assert torch.equal(before[0].mean, after[0].mean)
    assert torch.equal(before[0].variance, after[0].variance)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


def test_two_threads_give_the_serial_answers() -> None:
    models = [made(batch_norm), made(Attention)]
    posteriors = [lw.fit(model, (X, Y), "classification") for model in models]
    inputs = [X + 0.01 * i for i in range(6)]
    expected = {(i, j): p.predict(x).probs for i, p in enumerate(posteriors) for j, x in enumerate(inputs)}
    found: dict[tuple[int, int], Tensor] = {}

    def ask(offset: int) -> None:
        for step in range(2 * len(inputs)):
            i, j = (step + offset) % 2, (step // 2 + offset) % len(inputs)
            found[i, j] = posteriors[i].predict(inputs[j]).probs

    with untouched(*models):
        threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_was_computed_in_inference_mode_can_be_differentiated_later() -> None:
    model = made(batch_norm)
    with torch.inference_mode():
        posterior = lw.fit(model, (X * 1.0, REAL * 1.0), "regression", prior=lw.prior(model, torch.ones(()) * 2.0))
        posterior.predict(X * 1.0)
        posterior.diagnose()
        lw.tune(posterior)
    noise = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    posterior.with_likelihood(lw.Gaussian(noise)).log_evidence().backward()
    assert noise.grad is not None and bool(noise.grad != 0)
    assert lw.tune(posterior).log_evidence() >= posterior.log_evidence()
