"""Loops of lw.train: what comes out, what goes on after a kill, what is refused, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

DOUBLE = torch.float64


def task(n: int = 60) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def net(activation: type[nn.Module] = nn.Softplus) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), activation(), nn.Dropout(0.1), nn.Linear(6, 2))


LOOPS: dict[str, Any] = {
    "map": lw.train.map,
    "variational_laplace": lw.train.variational_laplace,
    "mean_field": lw.train.mean_field,
    "marglik": lw.train.marglik,
}
quick = pytest.mark.filterwarnings("ignore:.*stopping then would cut")


# --- what comes out ---------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("name", LOOPS)
def test_a_run_is_a_model_a_history_and_an_ordinary_posterior(name: str, tmp_path: Path):
    (x, y), model, seen = task(), net(), []
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    run = LOOPS[name](
        model, (x, y), "classification", epochs=3, lr=0.02, batch_size=16, validation=(x, y), callback=seen.append
    )
    assert torch.equal(random, torch.get_rng_state()) and modes == [m.training for m in model.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert run.model is model and list(run.history) == seen and [r.epoch for r in run.history] == [0, 1, 2]
    assert any(not torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert set(run.history[-1].validation) == {"nll", "accuracy"} and run.history[-1].seconds > 0
    posterior = run.posterior
    assert isinstance(posterior, lw.Posterior) and run.posterior is posterior
    model.eval()
    assert_close(posterior.predict(x, predictive="mean").probs, model(x).softmax(-1).detach(), atol=1e-6, rtol=1e-5)
    for way in ("glm", "bnn"):
        assert_close(posterior.predict(x, predictive=way).probs.sum(-1), torch.ones(60))
    lw.save(posterior, tmp_path / "run.lapwing")
    again = lw.load(tmp_path / "run.lapwing", model)
    assert_close(again.predict(x).probs, posterior.predict(x).probs)
    assert_close(again.marginal_variance(), posterior.marginal_variance())
    assert repr(run).startswith("Run of Sequential: 3 epochs") and posterior.diagnose().findings


def test_a_trained_posterior_has_the_objectives_moments():
    (x, y), model = task(), net()
    objective = lw.train.VariationalLaplace(model, "classification", 60)
    objective(x, y)
    with torch.no_grad():
        objective.log_std.copy_(torch.linspace(-4, 1, len(objective.log_std)))
    posterior = objective.posterior()
    assert_close(posterior.mean, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(posterior.marginal_variance(), (2 * objective.log_std).exp().detach(), rtol=1e-5, atol=0)
    assert posterior.layout.p == len(objective.log_std) == len(objective.prior_std)
    draws = posterior.sample(4000, torch.Generator().manual_seed(0))
    assert_close(draws.std(0), objective.log_std.exp().detach(), rtol=0.1, atol=0)
    with pytest.raises(lw.StructureError, match="pass over the training data"):
        _ = posterior.trained.elbo
    for what in (
        posterior.log_evidence,
        lambda: posterior.with_prior(1.0),
        lambda: posterior.updated((x, y)),
        lambda: lw.tune(posterior, (x, y)),
        lambda: lw.refine(posterior, (x, y)),
        lambda: lw.merge([posterior, posterior]),
    ):
        with pytest.raises(lw.StructureError, match="was trained"):
            what()


def test_default_predictions_are_the_papers():
    (x, y), model = task(), net()
    for make, way, n in (
        (lw.train.VariationalLaplace, "mean", 1),
        (lw.train.MeanField, "bnn", 10),
    ):
        objective = make(model, "classification", 60)
        objective(x, y)
        posterior = objective.posterior()
        assert_close(posterior.predict(x).probs, posterior.predict(x, predictive=way, n_samples=n).probs)
    fitted = lw.fit(model, (x, y), "classification", prior=1.0)
    assert_close(fitted.predict(x).probs, fitted.predict(x, predictive="glm", n_samples=1000).probs)


@quick
def test_runs_are_compared_by_their_bounds_apart_from_evidences():
    x, y = task()
    runs = {name: LOOPS[name](net(), (x, y), "classification", epochs=2) for name in LOOPS if name != "map"}
    with pytest.warns(lw.LapwingWarning, match="ranked apart"):
        table = lw.compare(runs)
    assert [r.evidence_at for r in table.ranks] == ["trained weights", "lower bound", "lower bound"]
    assert sum(r.probability for r in table.ranks[1:]) == pytest.approx(1)


@quick
def test_every_form_of_data_gives_the_same_run_when_it_is_read_in_order():
    x, y = task(48)
    forms = {
        "loader": DataLoader(TensorDataset(x, y), 12),
        "batches": [(x[i : i + 12], y[i : i + 12]) for i in range(0, 48, 12)],
        "mappings": [{"input": x[i : i + 12], "labels": y[i : i + 12]} for i in range(0, 48, 12)],
        "tuples": [((x[i : i + 12],), y[i : i + 12]) for i in range(0, 48, 12)],
    }

    def trained(data: Any) -> tuple[Any, ...]:
        model = net()
        model[3] = nn.Identity()  # a loader draws a number of its own before dropout does
        return lw.train.variational_laplace(model, data, "classification", epochs=2).history

    losses = {name: trained(data) for name, data in forms.items()}
    first = [r.loss for r in losses["loader"]]
    assert all([r.loss for r in history] == first for history in losses.values())
    for data in ((x, y), TensorDataset(x, y), (x.numpy(), y.numpy())):
        assert len(lw.train.mean_field(net(), data, "classification", epochs=1, batch_size=12).history) == 1


@quick
@pytest.mark.parametrize("likelihood", ["regression", "count", "binary"])
def test_other_likelihoods_train(likelihood: str):
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = {"regression": x[:, :1], "count": x[:, :1].abs().floor(), "binary": (x[:, :1] > 0).float()}[likelihood]
    for loop in LOOPS.values():
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        run = loop(model, (x, y), likelihood, epochs=2, batch_size=10)
        assert torch.isfinite(run.posterior.predict(x).log_prob(y)).all()
        if likelihood == "regression":
            assert 0 < float(run.posterior.likelihood.resolved()) < 3


def test_map_takes_the_steps_of_weight_decay():
    x, y = task(32)
    ours, theirs = net(nn.Tanh), net(nn.Tanh)
    ours[3], theirs[3] = nn.Identity(), nn.Identity()
    lw.train.map(
        ours, [(x, y)], "classification", epochs=5, prior=0.5, optimizer=lambda g: torch.optim.SGD(g, lr=0.1), lr=0.1
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=1 / (0.25 * 32))
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_marginal_likelihood_training_ends_at_mackays_optimum():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=g, dtype=DOUBLE)
    y = x @ (2 * torch.randn(8, 1, generator=g, dtype=DOUBLE)) + 0.4 * torch.randn(60, 1, generator=g, dtype=DOUBLE)
    model = nn.Linear(8, 1).double()
    options: dict[str, Any] = {"structure": "full", "groups": "one", "every_epochs": 5, "steps": 30}
    run = lw.train.marglik(model, (x, y), "regression", epochs=150, lr=0.05, batch_size=60, **options)
    # MacKay's fixed point, by hand: α = γ / |w|², 1/σ² = (N − γ) / SSE.
    J, alpha, beta = torch.cat([x, torch.ones(60, 1, dtype=DOUBLE)], 1), 1.0, 1.0
    for _ in range(500):
        A = beta * J.T @ J + alpha * torch.eye(9, dtype=DOUBLE)
        w = torch.linalg.solve(A, beta * J.T @ y)
        gamma = 9 - alpha * torch.linalg.inv(A).trace()
        alpha, beta = float(gamma / w.square().sum()), float((60 - gamma) / (y - J @ w).square().sum())
    assert float(run.posterior.prior.precisions) == pytest.approx(alpha, rel=0.02)
    assert float(run.posterior.likelihood.resolved()) == pytest.approx(beta**-0.5, rel=0.01)
    evidences = [r.log_evidence for r in run.history if r.log_evidence is not None]
    assert len(evidences) == 30 and evidences[-1] > evidences[0]
    assert float(run.posterior.log_evidence()) == pytest.approx(max(evidences), abs=1e-3)


# --- killed and run again ---------------------------------------------------------------------------------------


class _Killed(BaseException):
    pass


def dying(steps: int) -> Any:
    class Adam(torch.optim.Adam):
        taken = 0

        def step(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.param_groups[0]["params"]) > 1 and (taken := type(self).taken) == steps:
                raise _Killed(taken)
            type(self).taken += len(self.param_groups[0]["params"]) > 1
            return super().step(*args, **kwargs)

    return Adam


def interrupted(loop: Any, optimizer: Any, checkpoint: Path | None, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    (x, y), model = task(50), net()
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True, generator=torch.Generator().manual_seed(5))
    run = loop(
        model,
        loader,
        "classification",
        epochs=5,
        lr=0.02,
        optimizer=optimizer,
        checkpoint=checkpoint,
        every=0,
        validation=(x, y),
        **options,
    )
    return model, run


SCHEDULED = {"schedule": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2])}


@quick
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kill", [1, 6, 8, 11, 19])
def test_killed_and_run_again_gives_the_same_bits(name: str, kill: int, tmp_path: Path):
    options = {"steps": 5} if name == "marglik" else SCHEDULED
    whole, expected = interrupted(LOOPS[name], torch.optim.Adam, None, options)
    with pytest.raises(_Killed):
        interrupted(LOOPS[name], dying(kill), tmp_path, options)
    again, run = interrupted(LOOPS[name], torch.optim.Adam, tmp_path, options)
    for (key, a), b in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert [(r.loss, r.validation, r.log_evidence) for r in run.history] == [
        (r.loss, r.validation, r.log_evidence) for r in expected.history
    ]
    assert torch.equal(run.posterior.marginal_variance(), expected.posterior.marginal_variance())
    assert not list(tmp_path.iterdir())


@quick
def test_unfinished_work_of_another_run_is_refused(tmp_path: Path):
    with pytest.raises(_Killed):
        interrupted(lw.train.variational_laplace, dying(5), tmp_path, {"beta": 1.0})
    with pytest.raises(lw.StorageError, match="beta differed"):
        interrupted(lw.train.variational_laplace, torch.optim.Adam, tmp_path, {"beta": 0.5})


@quick
def test_early_stopping_returns_to_the_best():
    (x, y), model = task(), net()
    run = lw.train.variational_laplace(
        model, (x, y), "classification", epochs=40, lr=0.3, batch_size=16, patience=3, validation=(x[:20], 1 - y[:20])
    )
    values = [r.validation["nll"] for r in run.history]
    assert len(values) < 40 and len(values) - 1 - values.index(min(values)) == 3
    model.eval()
    assert float(nn.functional.cross_entropy(model(x[:20]), 1 - y[:20]).detach()) == pytest.approx(
        min(values), rel=1e-4
    )


def test_a_short_way_of_the_variances_is_said_with_its_numbers():
    x, y = task()
    with pytest.warns(lw.LapwingWarning, match=r"2 epochs of 4 steps .* move by 0\.08 at most"):
        lw.train.variational_laplace(net(), (x, y), "classification", epochs=2, batch_size=16)


# --- what a step leaves alone, and gets right -----------------------------------------------------------------------


def test_building_an_objective_changes_nothing():
    model = net()
    from untouched import untouched

    with untouched(model):
        lw.train.VariationalLaplace(model, "classification", 60)
        lw.train.MeanField(model, "classification", 60)


def test_a_step_moves_running_statistics_once_and_no_random_state():
    (x, y), model = task(), net()
    model[3] = nn.Identity()
    random = torch.get_rng_state()
    for make in (lw.train.VariationalLaplace, lw.train.MeanField):
        before = int(model[1].num_batches_tracked)
        make(model, "classification", 60)(x, y).backward()
        assert int(model[1].num_batches_tracked) == before + 1
    assert torch.equal(random, torch.get_rng_state())
    assert all(p is q for p, q in zip(model.parameters(), list(model.parameters()), strict=True))


def test_elbo_and_posterior_leave_the_model_as_it_is():
    from untouched import untouched

    (x, y), model = task(), net()
    objective = lw.train.MeanField(model, "classification", 60)
    objective(x, y)
    with untouched(model):
        first, second = objective.elbo((x, y)), objective.elbo((x, y))
        objective.posterior((x, y))
    assert torch.equal(first, second)


def test_gradients_accumulate():
    (x, y), model = task(40), net()
    model.eval()
    objective = lw.train.VariationalLaplace(model, "classification", 40, fisher="exact", prior=0.7)
    objective(x[:30], y[:30]).mul(0.75).backward()
    objective(x[30:], y[30:]).mul(0.25).backward()
    together = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
    objective.zero_grad()
    objective(x, y).backward()
    for a, b in zip(together, (p.grad for p in objective.parameters() if p.grad is not None), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_state_dict_is_that_of_a_module():
    (x, y), model = task(), net()
    objective = lw.train.VariationalLaplace(model, "classification", 60)
    optimizer = torch.optim.Adam(objective.param_groups(lr=1e-2, multiplier=10))
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 1e-1]
    objective(x, y).backward()
    optimizer.step()
    other = lw.train.VariationalLaplace(net(), "classification", 60)
    other.load_state_dict(objective.state_dict())
    torch.manual_seed(0)
    a = objective(x, y).detach()
    torch.manual_seed(0)
    assert torch.equal(a, other(x, y).detach())


def test_prior_scales():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    objective = lw.train.VariationalLaplace(model, "classification", 5)
    stds = {name: objective.prior_std[s] for name, s in objective.layout.slices.items()}
    assert {k: v.unique().tolist() for k, v in stds.items()} == {
        "0.weight": [1.0],
        "1.weight": [0.5],
        "1.bias": [1.0],
        "2.weight": [1.0],
        "2.bias": [1.0],
    }
    assert_close(objective.log_std.detach(), objective.prior_std.log() - 3)
    given = lw.train.MeanField(model, "classification", 5, prior=lw.prior(model, 4.0, groups="layer"))
    assert given.prior_std.unique().tolist() == [0.5]
    assert lw.train.MeanField(model, "classification", 5, prior=0.25).prior_std.unique().tolist() == [0.25]
    convolution = lw.train.MeanField(nn.ConvTranspose2d(6, 2, 3), "regression", 5)
    assert convolution.prior_std[0] == pytest.approx(54**-0.5)


def test_some_parameters_only():
    (x, y), model = task(), net()
    head = lw.train.VariationalLaplace(model, "classification", 60, params="last_layer", example=x)
    assert head.layout.names == ("4.weight", "4.bias") and len(head.log_std) == 14
    head(x, y).backward()
    assert model[0].weight.grad is not None  # trained all the same, as numbers
    assert head.posterior().layout.p == 14


# --- refusals ---------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(x))


def test_piecewise_linear_activations_are_refused_and_cured():
    (x, y), model = task(), net(nn.ReLU)
    with pytest.raises(lw.InputError, match=r"'2' is ReLU.*lw\.train\.smooth"):
        lw.train.VariationalLaplace(model, "classification", 60)
    with pytest.raises(lw.InputError, match=r"functional\.relu"):
        lw.train.VariationalLaplace(Functional(), "classification", 60)(x, y)
    lw.train.VariationalLaplace(model, "classification", 60, allow_piecewise=True)(x, y)
    lw.train.MeanField(model, "classification", 60)(x, y)
    copy = lw.train.smooth(model)
    assert isinstance(copy[2], nn.Softplus) and isinstance(model[2], nn.ReLU)
    assert torch.equal(copy[0].weight, model[0].weight) and copy[0].weight is not model[0].weight
    lw.train.VariationalLaplace(copy, "classification", 60)(x, y)
    encoder = lw.train.smooth(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    assert encoder.activation is nn.functional.softplus
    leaky = lw.train.smooth(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1), nn.PReLU(2)))
    assert_close(leaky[1](torch.tensor([-50.0, 50.0])), torch.tensor([-5.0, 50.0]))
    assert [n for n, _ in leaky.named_parameters()] == ["0.weight", "0.bias", "2.weight"]


BAD_OBJECTIVES = {
    "beta": ({"beta": 0.0}, lw.InputError, "positive"),
    "n_data": ({"n_data": 0}, lw.InputError, "at least 1"),
    "fisher": ({"fisher": "exakt"}, lw.InputError, 'Did you mean "exact"'),
    "prior": ({"prior": -1.0}, lw.InputError, "positive, finite standard deviation"),
    "prior word": ({"prior": "fan_out"}, lw.InputError, "Known"),
    "likelihood": ({"likelihood": "clasification"}, lw.InputError, "Did you mean"),
    "draws": ({"draws": 0}, lw.InputError, "at least 1"),
    "params": ({"params": ["nothing"]}, lw.InputError, "nothing in the model"),
    "last layer": ({"params": "last_layer"}, lw.InputError, "example=x"),
    "model": ({"model": nn.Linear}, lw.InputTypeError, "Make an instance"),
    "generator": ({"generator": 3}, lw.InputTypeError, "torch.Generator"),
}


@pytest.mark.parametrize("case", BAD_OBJECTIVES)
def test_bad_objectives_are_refused_in_words(case: str):
    options, error, words = BAD_OBJECTIVES[case]
    given = {"model": net(), "likelihood": "classification", "n_data": 60, **options}
    with pytest.raises(error, match=words):
        lw.train.VariationalLaplace(**given)


def frozen() -> nn.Module:
    model = net()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(lw.InputError, match="Nothing to infer"):
        lw.train.VariationalLaplace(frozen(), "classification", 60)
    with pytest.raises(lw.InputError, match="half precision"):
        lw.train.MeanField(net().half(), "classification", 60)
    with pytest.raises(lw.InputError, match="sparse"):
        lw.train.MeanField(nn.Embedding(3, 2, sparse=True), "classification", 60)


def test_bad_batches_are_refused_before_anything_moves():
    from untouched import untouched

    (x, y), model = task(), net()
    objective = lw.train.VariationalLaplace(model, "classification", 60)
    objective(x, y)
    bad = x.clone()
    bad[3, 1] = float("nan")
    with untouched(model):
        for given, error, words in (
            ((x, y + 1), lw.InputError, r"batch 1: .*labels in \[0, 2\)"),
            ((x, y.float()), lw.InputTypeError, "integer labels"),
            ((x, y[:-1]), lw.ShapeError, "pair up"),
            ((bad, y), lw.InputError, "NaN"),
            ((torch.cat([x, x]), torch.cat([y, y])), lw.InputError, "n_data is 60, but this batch alone has 120"),
        ):
            with pytest.raises(error, match=words):
                objective(*given)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(lw.InputError, match="autocast"):
            objective(x, y)


BAD_LOOPS = {
    "epochs": ({"epochs": 0}, lw.InputError, "at least 1 epoch"),
    "lr": ({"lr": 0}, lw.InputError, "positive"),
    "beta": ({"beta": -1}, lw.InputError, "positive"),
    "multiplier": ({"multiplier": 0}, lw.InputError, "positive"),
    "optimizer": ({"optimizer": 3}, lw.InputTypeError, "function of parameter groups"),
    "weight decay": ({"optimizer": lambda g: torch.optim.SGD(g, 0.1, weight_decay=1e-4)}, lw.InputError, "twice"),
    "schedule": ({"schedule": lambda o: 3}, lw.InputTypeError, "lr_scheduler"),
    "patience": ({"patience": 3}, lw.InputError, "held-out"),
    "hessian": ({"fisher": "hessian"}, lw.InputError, "without bound"),
    "labels": ({"data": (task()[0], task()[1] + 5)}, lw.InputError, "labels in"),
    "empty": ({"data": []}, lw.InputError, "no batch"),
    "generator of batches": ({"data": (b for b in [task()])}, lw.InputTypeError, "one-shot"),
}


@pytest.mark.parametrize("case", BAD_LOOPS)
def test_bad_loops_are_refused_before_anything_moves(case: str):
    from untouched import untouched

    options, error, words = BAD_LOOPS[case]
    model = net()
    given = {"data": task(), "epochs": 2, **options}
    with untouched(model), pytest.raises(error, match=words):
        lw.train.variational_laplace(model, given.pop("data"), "classification", **given)


def test_adamw_is_taken_with_the_decay_it_comes_with():
    x, y = task()
    lw.train.map(net(), (x, y), "classification", epochs=1, optimizer=torch.optim.AdamW)


@quick
def test_a_loss_that_is_not_finite_keeps_the_last_good_step():
    (x, y), model = task(64), net()
    seen: list[dict[str, Tensor]] = []

    class Explodes(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            super().step(*args, **kwargs)
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
            if len(seen) == 3:
                for group in self.param_groups:
                    group["lr"] = 1e30

    with pytest.raises(lw.NumericalError, match=r"epoch \d+, batch \d+: .*not finite"):
        lw.train.map(
            model, (x, y), "classification", epochs=9, lr=0.1, batch_size=16, optimizer=lambda g: Explodes(g, lr=0.1)
        )
    for name, p in model.named_parameters():
        assert torch.equal(p, seen[-1][name])


def test_marglik_refuses_what_it_cannot_use():
    x, y = task()
    for options, words in (
        ({"structure": "krom"}, "Did you mean"),
        ({"start": -1}, "from 0 on"),
        ({"rate": 0}, "positive"),
        ({"groups": "layers"}, "Did you mean"),
        ({"decay": "linear"}, "Known"),
    ):
        with pytest.raises(lw.InputError, match=words):
            lw.train.marglik(net(), (x, y), "classification", epochs=1, **options)
    with pytest.warns(lw.LapwingWarning, match="never looked at"):
        lw.train.marglik(net(), (x, y), "classification", epochs=1, start=3)
