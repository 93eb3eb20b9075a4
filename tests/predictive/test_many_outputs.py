"""Many outputs per datum: predictions by draws of functions, held-out search on some of them, pieces put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data import as_batches
from lapwing.likelihoods import Categorical, Sites
from lapwing.network.products import choose_jvp
from lapwing.network.products.jvp import jvp_by_rows
from lapwing.predictive import antithetic_draws
from lapwing.predictive.link_rules import DEFAULT
from lapwing.predictive.links import gaussian_draws
from lapwing.predictive.pushforward import SiteGaussian
from lapwing.runtime.arguments import seeded
from lapwing.tuning.validation.held_out import HeldOut
from lapwing.tuning.validation.scoring import Targets, _Labels
from lapwing.tuning.validation.some_outputs import MOST_CLASSES, chosen
from oracle import assert_close

C = 80


def many_classes(n: int = 40, c: int = C) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, c)).double()
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    return model, x, torch.randint(c, (n,), generator=g)


def pixels(n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1)).double()
    x = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64)
    return model, x, (x[:, 0] > 0).long()


def test_draws_of_functions_have_the_posteriors_mean_and_covariance():
    """Whatever the draws: their mean is f, and deviations that are a root of the covariance give J P⁻¹ Jᵀ exactly."""
    model, x, y = many_classes()
    posterior = lw.fit(model, (x, y), "classification", structure="full")
    root = posterior.precision.half_solve(torch.eye(posterior.layout.p, dtype=torch.float64))
    f = antithetic_draws(posterior.weights, posterior.given(x[:3]), root)
    assert_close(f.mean(0), model(x[:3]).detach())
    deviations = f[: len(root)] - f.mean(0)
    assert_close(torch.einsum("snc,snd->ncd", deviations, deviations), posterior.outputs(x[:3]).cov)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "matrixfree"])
def test_predictions_of_many_outputs_are_close_to_the_exact_ones(structure: str):
    model, x, y = pixels()
    posterior = lw.fit(model, (x, y), lw.Categorical(class_axis=1), structure=structure, fisher="exact")
    assert posterior.averages_functions
    quick, exact = posterior.predict(x), posterior.predict(x, link="mc")
    moved = (exact.probs - torch.softmax(model(x), 1)).abs().mean()
    assert (quick.probs - exact.probs).abs().mean() < 0.5 * moved
    assert_close(quick.entropy, quick.epistemic + quick.aleatoric)
    assert (quick.epistemic.mean() / exact.epistemic.mean() - 1).abs() < 0.4


def test_they_are_the_same_at_every_call_and_in_every_batch():
    model, x, y = pixels()
    posterior = lw.fit(model, (x, y), lw.Categorical(class_axis=1), structure="kron")
    whole = posterior.predict(x).probs
    assert torch.equal(whole, posterior.predict(x).probs)
    assert_close(posterior.predict(x[3:5]).probs, whole[3:5])
    other = posterior.predict(x, generator=torch.Generator().manual_seed(5)).probs
    assert not torch.equal(whole, other)


def test_few_outputs_and_output_layers_alone_keep_exact_covariances():
    model, x, y = many_classes()
    few = nn.Sequential(*model[:2], nn.Linear(6, 3).double())
    assert not lw.fit(few, (x, y % 3), "classification").averages_functions
    assert not lw.fit(model, (x, y), "classification", params="last_layer").averages_functions
    assert not lw.fit(model, (x, model(x).detach() + 1), "regression", structure="diag").averages_functions


def test_products_for_many_outputs_are_those_of_the_rows():
    model, x, y = many_classes()
    linearised = lw.fit(model, (x, y), "classification", structure="diag").linearised
    given = lw.fit(model, (x, y), "classification", structure="diag").given(x[:4])
    jvp = choose_jvp(linearised, given)
    assert jvp is not jvp_by_rows and linearised.chosen_jvp == [jvp]
    v = torch.randn(3, linearised.layout.p, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with linearised.trace(given) as trace:
        assert_close(jvp(trace, v), jvp_by_rows(trace, v))


def test_a_wrong_product_is_noticed_where_outputs_are_many(monkeypatch):
    from lapwing.network.products import jvp as module

    model, x, y = many_classes()
    linearised = lw.fit(model, (x, y), "classification", structure="diag").linearised
    right = module.together
    monkeypatch.setattr(module, "together", lambda trace, v: 1.01 * right(trace, v))
    assert choose_jvp(linearised, lw.fit(model, (x, y), "classification").given(x[:4])) is module.forward_mode


def test_the_label_and_the_most_probable_classes_are_taken():
    g = torch.Generator().manual_seed(0)
    f = torch.randn(4, 5 * C, generator=g, dtype=torch.float64)
    y = torch.randint(C, (4, 5), generator=g)
    y[0, :4], y[1] = -100, -100
    taken = chosen(Categorical(), f, y, Sites((5, C)), n_terms=2)
    logits, rest = taken.of(f)
    assert logits.shape == (4, 2, MOST_CLASSES) and rest.shape == (4, 2, C - MOST_CLASSES)
    assert_close(torch.cat([logits, rest], -1).exp().sum(-1), f[torch.arange(4)[:, None], :].reshape(4, 5, C)[
        torch.arange(4)[:, None], taken.index[..., 0] // C].exp().sum(-1))  # fmt: skip
    for n in range(4):
        for t in range(2):
            site, label = int(taken.index[n, t, 0]) // C, int(taken.index[n, t, 0]) % C
            best = f[n].reshape(5, C)[site].topk(MOST_CLASSES).indices.tolist()
            assert set((taken.index[n, t] % C).tolist()) >= set(best[:-1])
            if taken.y[n, t] == 0:
                assert label == int(y[n, site])
    assert taken.y[0].tolist() == [0, -100] and taken.y[1].tolist() == [-100, -100]  # labelled terms come first


def test_classes_without_a_covariance_vary_like_the_others():
    """E[softmax] with one class for the rest, against draws of all classes with exchangeable deviations."""
    g = torch.Generator().manual_seed(3)
    n, some, c = 5, 8, 400
    m = torch.randn(n, 1, c, generator=g, dtype=torch.float64)
    common, own = 0.7, 0.9
    V = own * torch.eye(some, dtype=torch.float64) + common
    y = torch.randint(some, (n, 1), generator=g)
    gaussian = SiteGaussian(m[..., :some], V.expand(n, 1, some, some).clone())
    labels = _Labels.of(Categorical(), gaussian, Targets(y, Sites((1, some)), n, m[..., some:]))
    T = torch.tensor([0.8, 1.0, 3.0], dtype=torch.float64)
    drawn = labels.by_draws(gaussian_draws(gaussian.mean, gaussian.cov, 2048, generator=seeded(None)))(T)
    eps, shared = (torch.randn(4000, k, generator=g, dtype=torch.float64) for k in (c, 1))
    f = m[None] + (own**0.5 * eps + common**0.5 * shared)[:, None, None, :]
    for k, t in enumerate(T):
        p = torch.softmax(f / t, -1).mean(0).gather(-1, y[..., None])
        # The common part is known from eight classes, whose own parts do not average out.
        assert drawn[k] == pytest.approx(-float(p.log().mean()), abs=0.15)
    nothing = SiteGaussian(gaussian.mean, torch.zeros_like(gaussian.cov))
    alone = _Labels.of(Categorical(), nothing, Targets(y, Sites((1, some)), n, m[..., some:]))
    exact = nn.functional.cross_entropy(m[:, 0] / 0.8, y[:, 0])
    assert_close(alone.by_draws(nothing.mean[None])(T)[0], exact)


def test_rows_of_some_outputs_are_those_of_the_jacobian():
    model, x, y = many_classes()
    posterior = lw.fit(model, (x, y), "classification", structure="full", fisher="exact")
    data = HeldOut.of(posterior, as_batches((x, y)), [posterior.precision], [], 1_000, None)
    cov, f = posterior.outputs(x).cov, model(x).detach()
    order = f.scatter(1, y[:, None], torch.inf).argsort(dim=1, descending=True)[:, :MOST_CLASSES]
    assert_close(data.f[:, 0], f.gather(1, order))
    expected = torch.stack([V[i][:, i] for V, i in zip(cov, order, strict=True)])
    assert_close(data.covs[0, :, 0], expected)


def test_held_out_labels_of_many_classes_choose_a_scale():
    model, x, y = many_classes(200)
    posterior = lw.fit(model, (x[:100], y[:100]), "classification")
    tuned = lw.tune(posterior, validation=(x[100:], y[100:]))
    assert tuned.readout.shift is None and tuned.readout.link == DEFAULT
    f = model(x[100:]).detach()
    network = nn.functional.cross_entropy(f, y[100:])
    assert -tuned.predict(x[100:]).log_prob(y[100:]).mean() <= network + 1e-9


@pytest.mark.parametrize("likelihood", ["classification", "regression", "count", "multilabel"])
@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_pieces_put_together_are_the_whole(likelihood: str, predictive: str):
    """Predictions some inputs at a time, as little memory makes them."""
    g = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(11, 3, generator=g, dtype=torch.float64)
    y = {
        "classification": torch.randint(2, (11,), generator=g),
        "regression": torch.randn(11, 2, generator=g, dtype=torch.float64),
        "count": torch.randint(4, (11, 2), generator=g),
        "multilabel": torch.randint(2, (11, 2), generator=g),
    }[likelihood]
    posterior = lw.fit(model, (x, y), likelihood)
    pieces = replace(posterior, chunk_floats=4 * 10 * 2 * 4).predict(x, n_samples=10, predictive=predictive)
    whole = posterior.predict(x, n_samples=10, predictive=predictive)
    assert_close(pieces.log_prob(y), whole.log_prob(y))
    names = ("probs", "entropy", "epistemic", "aleatoric") if hasattr(whole, "probs") else ("mean", "variance")
    for name in names:
        assert_close(getattr(pieces, name), getattr(whole, name))
    if likelihood in ("regression", "count"):
        assert_close(torch.stack(pieces.interval(0.9)), torch.stack(whole.interval(0.9)))
        assert pieces.distribution.batch_shape == whole.distribution.batch_shape
    with pytest.raises(lw.LapwingError):
        pieces.log_prob(y[:5])


def test_a_plan_says_what_tuning_takes():
    model, x, y = many_classes(300, 3)
    plan = lw.plan(model, (x, y), "classification")
    assert "Tuning takes about" in str(plan) and plan.tuning is not None
    assert plan.record()["tuning"]["bytes"] == plan.tuning.bytes > 0
    exact = lw.plan(model, (x, model(x).detach() + 1), "regression").tuning
    assert exact is not None and exact.gradient_epochs == 0 == exact.with_validation


@pytest.mark.parametrize("kind", ["multilabel", "tokens"])
def test_labels_of_many_kinds_are_tuned_with_held_out_data(kind: str):
    """Never worse there than the network: of 80 labels a datum, and of tokens some of which are not labelled."""
    model, x, y = many_classes(120)
    likelihood: object = "multilabel"
    if kind == "multilabel":
        y = (model(x).detach() > 0.5).long()
    else:
        model = nn.Sequential(model, nn.Unflatten(1, (8, 10)))
        likelihood, y = lw.Categorical(), model(x).detach().argmax(-1)
        y[:, 5:] = -100
    posterior = lw.fit(model, (x[:80], y[:80]), likelihood)
    assert posterior.averages_functions
    held_out = (x[80:], y[80:])
    tuned = lw.tune(posterior, validation=held_out)
    f = model(held_out[0]).detach()
    if kind == "multilabel":
        network = (
            nn.functional.binary_cross_entropy_with_logits(f, held_out[1].double(), reduction="none").sum(-1).mean()
        )
    else:
        network = nn.functional.cross_entropy(f.movedim(-1, 1), held_out[1], reduction="sum") / held_out[1].numel()
    assert -tuned.predict(held_out[0]).log_prob(held_out[1]).mean() <= network + 1e-6
