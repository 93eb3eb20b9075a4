"""Kronecker and EKFAC curvature against factors by definition, in float64: every architecture of the zoo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from cases import CASES, Case, by_name
from lapwing.curvature import estimate
from lapwing.data import as_batches
from lapwing.data.targets import encoded_batches
from lapwing.network.jacobian import FactorBlock
from lapwing.network.layers import FactorRule, register_rule, rules
from lapwing.operators import (
    Arrangement,
    DenseCurvature,
    DiagonalCurvature,
    EigenCurvature,
    KroneckerCurvature,
)
from oracle import assert_close
from truth import NOISE, Truth

RTOL = 1e-10
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
VARIANTS = [
    lw.Kron(),
    lw.Kron(sharing="reduce"),
    lw.Kron(bias="separate"),
    lw.Kron(sharing="reduce", bias="separate"),
]
POSITIONS = [
    c for c in CASES if "conv" in c.name or len(c.datum_shape) > 1 or c.name in ("two-shapes", "reused-module")
]


@cache
def known(case: Case) -> Truth:
    """The oracle's view of a case, computed once for all tests that leave its model alone."""
    return Truth.of(case)


def words(structure: lw.Kron) -> dict[str, str]:
    return {"sharing": structure.sharing, "bias": structure.bias}


def named(structure: lw.Kron) -> str:
    return f"{structure.sharing}-{structure.bias}"


def precisions(truth: Truth) -> Tensor:
    return torch.full_like(oracle.theta(truth.model), truth.precision)


def batches(truth: Truth, size: int) -> list[tuple[object, Tensor]]:
    """The data in batches of `size`, last first; the last batch may be short."""
    order = list(reversed(range(truth.case.n)))
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    return [
        (joined([oracle.slice_x(truth.x, i) for i in g]), torch.cat([truth.y[i : i + 1] for i in g])) for g in groups
    ]


def joined(parts: list) -> object:
    first = parts[0]
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    return tuple(joined(list(part)) for part in zip(*parts)) if isinstance(first, tuple) else torch.cat(parts)


def blocks_of(posterior: lw.Posterior) -> list[tuple[slice, object]]:
    return list(zip(posterior.curvature.slices, posterior.curvature.blocks))


# --- (a) factors by definition --------------------------------------------------------------------------------


@each_case
def test_posterior_equals_the_factors_by_definition(case: Case) -> None:
    truth = known(case)
    posterior = truth.fit(structure="kron")
    H, d, theta = truth.kronecker(), precisions(truth), oracle.theta(truth.model)
    f, J = truth.jacobian
    Sigma = oracle.posterior(H, d)
    cov = oracle.functional_cov(J, Sigma)
    out, joint = posterior.outputs(truth.x), posterior.joint_outputs(truth.x)

    assert_close(posterior.curvature.to_dense(), H, RTOL)
    assert_close(posterior.curvature.diagonal(), H.diagonal(), RTOL)
    assert_close(posterior.covariance(), Sigma, RTOL)
    assert_close(posterior.marginal_variance(), Sigma.diagonal(), RTOL)
    R = posterior.precision.half_solve(torch.eye(len(d), dtype=torch.float64)).T
    assert_close(R @ R.T, Sigma, RTOL)
    assert_close(posterior.log_evidence(), oracle.log_evidence(truth.log_lik, H, d, theta), RTOL)
    gamma = oracle.effective_dimension(H, d, torch.zeros(len(d), dtype=torch.long))
    assert_close(posterior.effective_dimension(), gamma, 1e-8)
    assert_close(out.mean.reshape(f.shape), f, RTOL)
    assert_close(out.cov, cov, RTOL)
    assert_close(out.var.reshape(f.shape), cov.diagonal(dim1=-2, dim2=-1), RTOL)
    assert_close(joint.mean, f.flatten(), RTOL)
    assert_close(joint.cov, oracle.joint_cov(J, Sigma), RTOL)
    draws = posterior.functions(3, torch.Generator().manual_seed(7))(truth.x)
    thetas = posterior.sample(3, torch.Generator().manual_seed(7))
    expected = f + torch.einsum("nkp,sp->snk", J, thetas - posterior.mean)
    assert_close(draws.reshape(expected.shape), expected, 1e-9)


@each_case
def test_sharing_and_bias_as_defined(case: Case) -> None:
    truth = known(case)
    for structure in VARIANTS[1:]:
        posterior = truth.fit(structure=structure)
        H = truth.kronecker(**words(structure))
        assert_close(posterior.curvature.to_dense(), H, RTOL)
        Sigma = oracle.posterior(H, truth.precision)
        assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(truth.jacobian[1], Sigma), RTOL)


def test_the_variants_differ() -> None:
    """Or the tests above would say nothing."""
    truth = Truth.of(by_name("conv2d-stride"))
    dense = [truth.fit(structure=s).curvature.to_dense() for s in VARIANTS]
    for i, H in enumerate(dense):
        for K in dense[:i]:
            assert (H - K).norm() > 1e-3 * K.norm()


@each_case
def test_layers_with_a_rule_use_it(case: Case) -> None:
    truth = known(case)
    found = [block.name for _, block in blocks_of(truth.fit(structure="kron")) if isinstance(block, KroneckerCurvature)]
    assert sorted(found) == sorted(path or "weight" for path in truth.layers)


@pytest.mark.parametrize("name", ["mlp-tanh", "conv2d-groups", "conv-transpose2d-groups"])
@pytest.mark.parametrize("pattern", ["*weight", "*bias"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_weights_or_biases_alone(name: str, pattern: str, bias: str) -> None:
    truth = Truth.of(by_name(name))
    posterior = truth.fit(structure=lw.Kron(bias=bias), params=[pattern])
    names = list(posterior.layout)
    _, J = oracle.jacobian(truth.model, truth.x, names)
    sizes = [truth.model.get_parameter(n).numel() for n in names]
    layers = oracle.layers(truth.model, truth.x, names)
    H = oracle.kronecker(oracle.ggn(J, truth.Lambda), sizes, layers.values(), truth.Lambda, bias=bias)
    Sigma = oracle.posterior(H, truth.precision)
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(J, Sigma), RTOL)


@pytest.mark.parametrize("size", [1024, 1025])
def test_a_tensor_without_a_rule_has_its_exact_block_up_to_1024_entries_then_its_diagonal(size: int) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(size))
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            features = torch.stack([(x * self.scale).sum(1), (x * self.scale).tanh().sum(1)], 1)
            return self.head(features / 30)

    torch.manual_seed(0)
    model, x, y = Wide().double(), torch.randn(3, size).double(), torch.tensor([0, 1, 0])
    posterior = lw.fit(model, (x, y), "classification", structure="kron", prior=1.3)
    f, J = oracle.jacobian(model, x)
    Lambda = oracle.hessians("categorical", f[:, None], y[:, None])[:, 0]
    H = oracle.kronecker(oracle.ggn(J, Lambda), [size, 4, 2], oracle.layers(model, x).values(), Lambda)
    assert isinstance(posterior.curvature.blocks[0], DiagonalCurvature) == (size > 1024)
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    cov = oracle.functional_cov(J, oracle.posterior(H, 1.3))
    assert_close(posterior.outputs(x).cov, cov, RTOL)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_prior_groups(structure: str) -> None:
    """One precision per layer enters exactly; one per tensor needs the bias on its own; more is refused."""
    truth = Truth.of(by_name("mlp-tanh"))
    apart = {"kron": lw.Kron(bias="separate"), "ekfac": lw.Ekfac(bias="separate")}[structure]
    for groups, chosen in (("layer", structure), ("tensor", apart)):
        template = lw.prior(truth.model, groups=groups)
        values = 0.5 + torch.arange(len(template.group_names), dtype=torch.float64)
        prior = lw.prior(truth.model, precision=values, groups=groups)
        posterior = truth.fit(structure=chosen, prior=prior)
        H, d = posterior.curvature.to_dense(), values[prior.index]
        assert_close(posterior.covariance(), oracle.posterior(H, d), RTOL)
        assert_close(posterior.effective_dimension(), oracle.effective_dimension(H, d, prior.index), 1e-8)
    for groups in ("tensor", "element"):
        with pytest.raises(lw.StructureError, match="one prior precision"):
            truth.fit(structure=structure, prior=lw.prior(truth.model, groups=groups)).log_evidence()


# --- (b) where Kronecker is exact, and where not ------------------------------------------------------------------


def block_errors(truth: Truth, structure: object = "kron") -> dict[str, float]:
    """Relative distance of each layer's block from the GGN's own; what lies between blocks is not compared."""
    K = truth.fit(structure=structure).curvature.to_dense()
    at = {path: layer.position.flatten() for path, layer in truth.layers.items()}
    return {
        path: float((K - truth.H)[ps[:, None], ps].norm() / truth.H[ps[:, None], ps].norm()) for path, ps in at.items()
    }


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli", "poisson", "hetero"])
def test_a_linear_layer_and_one_datum_any_likelihood(kind: str) -> None:
    case = Case("one-linear", kind, (2,), lambda: nn.Linear(3, 2), by_name("mlp-tanh").inputs, n=1)
    assert max(block_errors(Truth.of(case)).values()) < 1e-14
    if kind != "gaussian":
        assert min(block_errors(Truth.of(case, n=5)).values()) > 1e-3


@pytest.mark.parametrize("n", [1, 2, 11])
def test_linear_networks_with_gaussian_noise_any_number_of_data(n: int) -> None:
    single = Case("one-linear", "gaussian", (2,), lambda: nn.Linear(3, 2), by_name("mlp-tanh").inputs)
    for case in (single, by_name("deep-linear")):
        truth = Truth.of(case, n=n)
        assert max(block_errors(truth).values()) < 1e-13
        K = n * truth.fit(structure="kron").curvature.to_dense()  # the factor N that a product of two sums would have
        assert n == 1 or (K.diagonal() - truth.H.diagonal()).norm() > 0.4 * truth.H.diagonal().norm()
    between = Truth.of(by_name("deep-linear")).H[:16, 16:]
    assert between.norm() > 1  # nonzero in truth, zero in the structure


@pytest.mark.parametrize("name", ["mlp-tanh", "mlp-relu", "conv2d-stride", "sequence-output", "deep-residual"])
def test_elsewhere_it_is_an_approximation(name: str) -> None:
    assert max(block_errors(Truth.of(by_name(name))).values()) > 1e-2


def shared_linear(*, averaged: bool) -> Case:
    """A deep linear network at four positions whose loss is a sum over positions, or that averages over them."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.f(x).mean(1) if averaged else self.f(x)

    shape = (2,) if averaged else (4, 2)
    return Case("shared-linear", "gaussian", shape, Averaged, by_name("sequence-output").inputs, n=5)


def convolutional(*, averaged: bool) -> Case:
    """The same by convolutions that keep positions apart: kernel and stride are one."""
    layers = [nn.Conv1d(2, 3, 1), nn.Conv1d(3, 2, 1)]
    tail = [nn.AdaptiveAvgPool1d(1), nn.Flatten()] if averaged else []
    shape = (2,) if averaged else (2, 3)
    axis = -1 if averaged else 1
    inputs = by_name("conv1d-same-even").inputs
    build = lambda: nn.Sequential(*copy.deepcopy(layers), *tail)  # noqa: E731
    return Case("shared-conv", "gaussian", shape if averaged else (2, 5), build, inputs, class_axis=axis, n=5)


@pytest.mark.parametrize("network", [shared_linear, convolutional], ids=["linear", "convolution"])
@pytest.mark.parametrize("averaged", [False, True], ids=["sum", "average"])
def test_expand_is_exact_for_sums_over_positions_and_reduce_for_averages(network, averaged: bool) -> None:
    truth = Truth.of(network(averaged=averaged))
    exact, other = ("reduce", "expand") if averaged else ("expand", "reduce")
    assert max(block_errors(truth, lw.Kron(sharing=exact)).values()) < 1e-12
    assert min(block_errors(truth, lw.Kron(sharing=other)).values()) > 1e-2


@pytest.mark.parametrize("structure", [*VARIANTS, lw.Ekfac()], ids=lambda s: f"{type(s).__name__}-{named(s)}")
def test_a_1x1_convolution_of_a_1x1_image_is_a_linear_layer(structure: lw.Kron) -> None:
    torch.manual_seed(0)
    linear, conv = nn.Linear(3, 4).double(), nn.Conv2d(3, 4, 1).double()
    with torch.no_grad():
        conv.weight.copy_(linear.weight[..., None, None])
        conv.bias.copy_(linear.bias)
    head = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 3).double(), torch.tensor([0, 1, 2, 2, 1, 0])
    one = lw.fit(nn.Sequential(linear, nn.Tanh(), head), (x, y), "classification", structure=structure)
    two = lw.fit(
        nn.Sequential(nn.Unflatten(1, (3, 1, 1)), conv, nn.Tanh(), nn.Flatten(), head), (x, y), "classification",
        structure=structure,
    )  # fmt: skip
    assert_close(two.curvature.to_dense(), one.curvature.to_dense(), 1e-12)
    assert_close(two.outputs(x).cov, one.outputs(x).cov, 1e-12)


def test_a_single_weight() -> None:
    """diag = EKFAC = full; Kronecker equals them for one datum or a constant output Hessian, and only then."""
    inputs = by_name("step-function").inputs
    build = lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1, bias=False))  # noqa: E731

    def curvatures(kind: str, n: int) -> dict[str, float]:
        truth = Truth.of(Case("one-weight", kind, (1,), build, inputs, n=n))
        found = {s: float(truth.fit(structure=s).curvature.to_dense()) for s in ("full", "diag", "ekfac", "kron")}
        assert_close(found["full"], float(truth.H))
        assert_close(found["diag"], found["full"])
        assert_close(found["ekfac"], found["full"])
        return found

    for kind, n in (("bernoulli", 1), ("poisson", 1), ("gaussian", 6)):
        found = curvatures(kind, n)
        assert_close(found["kron"], found["full"])
    found = curvatures("bernoulli", 6)
    assert abs(found["kron"] - found["full"]) > 1e-3 * found["full"]


# --- (c) EKFAC ----------------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("structure", [lw.Ekfac(), lw.Ekfac(sharing="reduce", bias="separate")], ids=named)
def test_ekfac_is_the_best_diagonal_in_the_kronecker_eigenbasis(case: Case, structure: lw.Ekfac) -> None:
    """Same trace as the GGN's block, and never farther from it than Kronecker is."""
    truth = known(case)
    posterior, kron = truth.fit(structure=structure), truth.kronecker(**words(structure))
    E = posterior.curvature.to_dense()
    assert_close(posterior.curvature.diagonal(), E.diagonal(), RTOL)
    for s, block in blocks_of(posterior):
        if not isinstance(block, EigenCurvature):
            assert_close(E[s, s], kron[s, s], RTOL)
            continue
        place = block.arrangement.matrices(torch.arange(block.p).double()).long()
        for U_A, U_B, at in zip(block.basis.U_A, block.basis.U_B, place):
            at = at.flatten()
            U = torch.kron(U_B, U_A)
            part, kron_part, found = (M[s, s][at[:, None], at] for M in (truth.H, kron, E))
            rounding = 1e-20 * truth.H.norm()  # some blocks are zero by cancellation
            if kron_part.norm() > rounding:
                rotated = U.T @ kron_part @ U
                assert_close(rotated, rotated.diagonal().diag(), 1e-9)  # the basis is the factors'
            if part.norm() < rounding:
                continue
            assert_close(found, U @ (U.T @ part @ U).diagonal().diag() @ U.T, RTOL)
            assert_close(found.trace(), part.trace(), RTOL)
            assert (found - part).norm() <= (kron_part - part).norm() * (1 + 1e-9) + 1e-12
    Sigma = oracle.posterior(E, precisions(truth))
    cov = oracle.functional_cov(truth.jacobian[1], Sigma)
    assert_close(posterior.outputs(truth.x).cov, cov, RTOL)
    assert_close(posterior.outputs(truth.x).var.reshape(cov.shape[:2]), cov.diagonal(dim1=-2, dim2=-1), RTOL)
    assert_close(posterior.marginal_variance(), Sigma.diagonal(), RTOL)
    theta = oracle.theta(truth.model)
    assert_close(posterior.log_evidence(), oracle.log_evidence(truth.log_lik, E, precisions(truth), theta), RTOL)


def test_ekfac_equals_the_oracles_where_the_basis_is_unique() -> None:
    truth = Truth.of(by_name("mlp-relu"))
    H = truth.fit(structure="ekfac").curvature.to_dense()
    expected = torch.zeros_like(H)
    for layer in truth.layers.values():
        expected += oracle.eigen_corrected(truth.H, *oracle.kronecker_factors(layer, truth.Lambda), layer.position)
    assert_close(H, expected, 1e-8)


# --- noise per output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp-tanh", "sequence-regression", "image-regression"])
def test_one_noise_level_per_output(name: str) -> None:
    """Σ_g c_g B_g ⊗ A for any noise without a new pass; EKFAC parts share the basis of equal noise."""
    truth = Truth.of(by_name(name))
    axis, c = truth.case.class_axis, truth.case.index.shape[1]
    for noise in ([0.3 + 0.4 * i for i in range(c)], [1.1 - 0.2 * i for i in range(c)]):
        fitted = {
            s: lw.fit(
                truth.model, [(truth.x, truth.y)], lw.Gaussian([1.0] * c, per_output=True, class_axis=axis), structure=s
            ).with_likelihood(lw.Gaussian(noise, per_output=True, class_axis=axis))
            for s in ("kron", "ekfac")
        }
        weights = torch.tensor(noise, dtype=torch.float64) ** -2
        Lambda = oracle.spread(weights.diag().expand(truth.case.n, len(truth.case.index), c, c), truth.case.index)
        H = oracle.ggn(truth.jacobian[1], Lambda)
        assert_close(fitted["kron"].curvature.to_dense(), truth.kronecker(Lambda), RTOL)
        E = fitted["ekfac"].curvature.to_dense()
        for s in fitted["ekfac"].layout.module_slices.values():
            assert_close(E[s, s].trace(), H[s, s].trace(), RTOL)
        for posterior in fitted.values():
            Sigma = oracle.posterior(posterior.curvature.to_dense(), 1.0)
            cov = oracle.functional_cov(truth.jacobian[1], Sigma)
            assert_close(posterior.outputs(truth.x).cov, cov, RTOL)


# --- (d) batches, memory, more data -------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_batches_and_their_order_do_not_matter(case: Case, structure: object) -> None:
    truth = known(case)
    whole = truth.fit(structure=structure)
    for size in (1, 2):
        data = batches(truth, size)
        pieces = lw.fit(truth.model, data, truth.likelihood(), structure=structure, prior=truth.precision)
        assert pieces.n_data == whole.n_data
        assert_close(pieces.log_evidence(), whole.log_evidence(), RTOL)
        assert_close(pieces.outputs(truth.x).cov, whole.outputs(truth.x).cov, 1e-9)
        if structure != "ekfac":  # there, axes of equal curvature may turn
            assert_close(pieces.curvature.to_dense(), whole.curvature.to_dense(), RTOL)


@pytest.mark.parametrize("structure", [*VARIANTS, lw.Ekfac()], ids=lambda s: f"{type(s).__name__}-{named(s)}")
@pytest.mark.parametrize("name", ["mlp-tanh", "sequence-output", "conv2d-groups", "batch-norm1d"])
def test_tiny_memory_gives_the_same(name: str, structure: lw.Kron) -> None:
    truth = Truth.of(by_name(name))
    whole = truth.fit(structure=structure)
    for chunk_floats in (1, 2000):  # one row at a time, then a few
        small = in_chunks(whole, truth, chunk_floats)
        assert_close(small.curvature.to_dense(), whole.curvature.to_dense(), 1e-9)
        assert_close(small.outputs(truth.x).cov, whole.outputs(truth.x).cov, 1e-9)
        assert_close(small.outputs(truth.x).var, whole.outputs(truth.x).var, 1e-9)
        assert_close(small.joint_outputs(truth.x).cov, whole.joint_outputs(truth.x).cov, 1e-9)


def in_chunks(posterior: lw.Posterior, truth: Truth, chunk_floats: int) -> lw.Posterior:
    """The same fit and the same predictions with that many numbers in memory at a time."""
    batches = as_batches([(truth.x, truth.y)])
    again = estimate(
        posterior.linearised,
        posterior.likelihood,
        lambda: encoded_batches(batches, posterior.likelihood, posterior.sites, progress=False),
        sites=posterior.sites,
        structure=posterior.structure,
        fisher=posterior.fisher,
        chunk_floats=chunk_floats,
    )
    return replace(posterior, estimate=again, chunk_floats=chunk_floats)


@each_case
def test_updated_equals_a_fit_on_all_data(case: Case) -> None:
    truth = Truth.of(case, n=5)
    data = [(oracle.slice_x(truth.x, i), truth.y[i : i + 1]) for i in range(5)]
    whole = truth.fit(structure="kron")
    first = lw.fit(truth.model, data[:2], truth.likelihood(), structure="kron", prior=truth.precision)
    both = first.updated(data[2:])
    assert both.n_data == 5
    assert_close(both.curvature.to_dense(), whole.curvature.to_dense(), RTOL)
    assert_close(both.log_evidence(), whole.log_evidence(), RTOL)
    assert_close(both.outputs(truth.x).cov, whole.outputs(truth.x).cov, RTOL)


def test_ekfac_cannot_be_updated() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    posterior = truth.fit(structure="ekfac")

    def visited() -> Iterator[tuple[object, Tensor]]:
        pytest.fail("refused before the data are looked at")
        yield truth.x, truth.y

    with pytest.raises(lw.StructureError, match="EKFAC"):
        posterior.updated(visited())


# --- kinds of curvature -------------------------------------------------------------------------------------------


def empirical(truth: Truth) -> Tensor:
    """r rᵀ of every likelihood term, as if it were Λ."""
    f, index = truth.jacobian[0], truth.case.index
    r = oracle.residuals(truth.case.kind, f[:, index], truth.targets, **truth.options)
    return oracle.spread(r[..., :, None] * r[..., None, :], index)


@pytest.mark.parametrize("case", [*POSITIONS, by_name("mlp-tanh"), by_name("heteroscedastic")], ids=lambda c: c.name)
def test_empirical_factors(case: Case) -> None:
    truth = known(case)
    for structure in VARIANTS:
        H = truth.fit(structure=structure, fisher="empirical").curvature.to_dense()
        assert_close(H, truth.kronecker(empirical(truth), **words(structure)), RTOL)
    E = truth.fit(structure="ekfac", fisher="empirical").curvature
    assert_close(E.diagonal().sum(), oracle.ggn(truth.jacobian[1], empirical(truth)).trace(), RTOL)


def sampled(truth: Truth, structure: object, n_draws: int) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the curvature over independent draws of the labels."""
    generator = torch.Generator().manual_seed(3)
    each = [truth.fit(structure=structure, fisher="mc", generator=generator).curvature for _ in range(n_draws)]
    H = torch.stack([curvature.to_dense() for curvature in each])
    return H.mean(0), H.std(0) / n_draws**0.5


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["mlp-relu", "count", "sequence-output", "conv2d-groups", "heteroscedastic"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_sampled_factors_are_unbiased(name: str, sharing: str) -> None:
    """B is linear in r rᵀ and A does not depend on the labels, so the product is unbiased too."""
    truth = Truth.of(by_name(name))
    expected = truth.kronecker(sharing=sharing)
    mean, error = sampled(truth, lw.Kron(sharing=sharing), 200)

    def agrees(mean: Tensor, error: Tensor) -> bool:
        return bool(((mean - expected).abs() <= 5 * error + 1e-12).all())

    assert agrees(mean, error)
    assert not agrees(1.5 * mean, 1.5 * error)  # a mis-scaled estimator must be caught by the same check


def test_more_sampled_labels_are_averaged() -> None:
    truth = Truth.of(by_name("mlp-relu"))
    fisher = lw.Sampled(torch.Generator().manual_seed(0), n_draws=4000)
    assert_close(truth.fit(structure="kron", fisher=fisher).curvature.to_dense(), truth.kronecker(), 0.1)


# --- damping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp-tanh", "conv2d-groups", "conv-transpose1d", "batch-norm1d", "reused-module"])
def test_split_damping(name: str) -> None:
    """(B + √δ I) ⊗ (A + √δ I) for layers with a rule, H + δ I elsewhere: more concentrated than the exact prior."""
    truth = Truth.of(by_name(name))
    posterior = truth.fit(structure=lw.Kron(damping="split"))
    d = torch.tensor(truth.precision, dtype=torch.float64)
    P = truth.kronecker() + d * torch.eye(posterior.layout.p, dtype=torch.float64)
    exact = P.clone()
    for layer in truth.layers.values():
        A, B = oracle.kronecker_factors(layer, truth.Lambda)
        damped = [M + d.sqrt() * torch.eye(M.shape[-1], dtype=M.dtype) for M in (A, B)]
        P[layer.position.flatten()] = 0
        P += oracle.kron_block(*damped, layer.position, len(P))
    Sigma = torch.linalg.inv(P)
    assert_close(posterior.precision.to_dense(), P, RTOL)
    assert_close(posterior.curvature.to_dense(), truth.kronecker(), RTOL)
    assert_close(posterior.covariance(), Sigma, RTOL)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(truth.jacobian[1], Sigma), RTOL)
    log_det_ratio = torch.linalg.slogdet(P).logabsdet - len(P) * d.log()
    theta = oracle.theta(truth.model)
    assert_close(posterior.log_evidence(), truth.log_lik - 0.5 * log_det_ratio - 0.5 * d * theta @ theta, RTOL)
    assert torch.linalg.eigvalsh(P - exact).min() > -1e-9
    tuned = lw.tune(posterior)
    assert tuned.log_evidence() >= posterior.log_evidence()


def test_split_damping_equals_the_exact_prior_where_nothing_is_curved() -> None:
    """B = 0 for an idle layer: √δ (A + √δ I) is not δ I, unless A = 0 too."""
    truth = Truth.of(by_name("unused-parameters"))
    exact, split = (truth.fit(structure=lw.Kron(damping=word)).precision.to_dense() for word in ("exact", "split"))
    idle = slice(3, 9)  # a linear layer that is never called has no factors at all
    assert_close(split[idle, idle], exact[idle, idle])


# --- (e) other precisions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "ekfac", lw.Kron(sharing="reduce", bias="separate")], ids=str)
@pytest.mark.parametrize("name", ["mlp-relu", "conv2d-groups", "sequence-output", "batch-norm1d", "conv-transpose3d"])
def test_float32_agrees_to_single_precision(name: str, structure: object) -> None:
    truth = Truth.of(by_name(name))
    reference = truth.fit(structure=structure)
    covs, evidence = reference.outputs(truth.x).cov, reference.log_evidence()
    truth.model.float()
    posterior = truth.fit(structure=structure)
    out = posterior.outputs(truth.x)
    assert out.cov.dtype == torch.float32 and posterior.curvature.to_dense().dtype == torch.float64
    assert_close(out.cov, covs, 1e-4)
    assert_close(out.var, reference.outputs(truth.x).var, 1e-4)
    assert_close(posterior.log_evidence(), evidence, 1e-4)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("name", ["mlp-relu", "conv2d-groups", "sequence-output"])
def test_bfloat16_runs(name: str, structure: str) -> None:
    truth = Truth.of(by_name(name))
    reference = truth.fit(structure=structure).outputs(truth.x).var
    truth.model.bfloat16()
    var = truth.fit(structure=structure).outputs(truth.x).var
    assert var.dtype == torch.float32 and bool(torch.isfinite(var).all())
    assert_close(var, reference, 0.2)


# --- (g) a rule of the user's own ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    """s = gain · W x + b, kept (in, out)."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.gain = 1.7
        self.weight = nn.Parameter(torch.randn(i, o))
        self.bias = nn.Parameter(torch.randn(o))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x @ self.weight + self.bias


class ScaledRule(FactorRule):
    def __init__(self, forgotten: float = 1.0) -> None:
        self.forgotten = forgotten

    def applies(self, module: nn.Module) -> bool:
        return isinstance(module, Scaled)

    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        i, o = module.weight.shape
        return Arrangement(1, o, weight, bias, (1, i, o), (0, 2, 1))

    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        return module.gain / self.forgotten * x.reshape(n, -1, 1, x.shape[-1])

    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        return g.reshape(n, -1, 1, g.shape[-1])


@pytest.fixture
def registered() -> Iterator[None]:
    """Rules registered in a test are forgotten after it."""
    before = list(rules._rules)
    yield
    rules._rules[:] = before


def scaled_case() -> Truth:
    build = lambda: nn.Sequential(Scaled(3, 2), nn.Tanh(), nn.Linear(2, 2))  # noqa: E731
    return Truth.of(Case("scaled", "categorical", (2,), build, by_name("mlp-tanh").inputs, n=5))


def test_a_registered_rule_is_used(registered: None) -> None:
    truth = scaled_case()
    assert not isinstance(truth.fit(structure="kron").curvature.blocks[0], KroneckerCurvature)
    register_rule(ScaledRule())
    posterior = truth.fit(structure="kron")
    first = posterior.curvature.blocks[0]
    assert isinstance(first, KroneckerCurvature) and first.name == "0" and posterior.linearised.rest.names == ()

    a = torch.cat([1.7 * truth.x, torch.ones(5, 1)], 1).double()
    position = torch.tensor([[[0, 2, 4, 6], [1, 3, 5, 7]]])  # W (out, in) in a weight kept (in, out), then the bias
    D = truth.jacobian[1][..., 6:8]  # the bias sees the output's gradient
    layer = oracle.Layer([row[None, None] for row in a], [g[:, None, None] for g in D], position, has_bias=True)
    assert_close(layer.rows(), truth.jacobian[1][..., position], 1e-12)
    H = oracle.kron_block(*oracle.kronecker_factors(layer, truth.Lambda), position, 14)
    assert_close(posterior.curvature.to_dense()[:8, :8], H[:8, :8], RTOL)
    cov = oracle.functional_cov(truth.jacobian[1], oracle.posterior(posterior.curvature.to_dense(), truth.precision))
    assert_close(posterior.outputs(truth.x).cov, cov, RTOL)


def test_a_wrong_rule_is_noticed_and_left_unused(registered: None) -> None:
    truth = scaled_case()
    without = truth.fit(structure="kron")
    register_rule(ScaledRule(forgotten=1.7))
    posterior = truth.fit(structure="kron")
    assert posterior.linearised.rest.names == ("0.weight", "0.bias")
    assert_close(posterior.curvature.to_dense(), without.curvature.to_dense(), RTOL)
    assert_close(truth.fit(structure="full").curvature.to_dense(), truth.H, RTOL)


class Distorted(ScaledRule):
    """Factors that are right but for their order."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def blocks(self, *args: Any) -> list[FactorBlock]:
        (block,) = super().blocks(*args)
        return [replace(block, g=self.change(block.g))]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.flip(0),
        lambda g: torch.cat([g[:-1], -g[-1:]]),
        lambda g: g.flip(1),
        lambda g: g.flip(4),
        lambda g: torch.cat([g[..., :-2], g[..., -2:].flip(-1)], -1),
    ],
    ids=["data", "last datum", "columns", "outputs", "two outputs"],
)
def test_every_mistake_is_noticed_in_a_large_layer_too(
    seed: int, registered: None, change: Callable[[Tensor], Tensor]
) -> None:
    model = nn.Sequential(Scaled(300, 250), nn.Tanh(), nn.Linear(250, 3))  # more weights than are drawn at random
    with torch.no_grad():
        model[0].weight.mul_(0.05)  # or every tanh is flat, and a swap of two zero gradients is no mistake
    X, y = torch.randn(6, 300), torch.arange(6) % 3
    register_rule(ScaledRule())
    assert lw.fit(model, [(X, y)], "classification", structure="diag").linearised.rest.names == ()
    register_rule(Distorted(change))
    wrong = lw.fit(model, [(X, y)], "classification", structure="diag")
    assert wrong.linearised.rest.names == ("0.weight", "0.bias")


def test_only_rules_can_be_registered(registered: None) -> None:
    with pytest.raises(lw.InputTypeError, match="register_rule"):
        register_rule(ScaledRule)  # type: ignore[arg-type]


# --- (h) what was done where -----------------------------------------------------------------------------------------


def test_diagnose_lists_the_tensors_without_a_rule_and_how_they_were_treated() -> None:
    posterior = Truth.of(by_name("batch-norm1d")).fit(structure="kron")
    text = str(posterior.diagnose())
    assert "1.weight" in text and "1.bias" in text and "dense" in text
    assert "0.weight" not in text and "3.weight" not in text


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"sharing": "both"}, {"bias": "none"}, {"damping": "pi"}], ids=str)
def test_unknown_options_are_refused_in_words(option: dict[str, str]) -> None:
    for structure in (lw.Kron, lw.Ekfac):
        with pytest.raises(lw.InputError, match=next(iter(option))):
            structure(**option)


def test_noise_is_tuned_on_the_same_factors() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    posterior = lw.fit(truth.model, [(truth.x, truth.y)], lw.Gaussian(), structure="kron")
    tuned = lw.tune(posterior)
    s = float(tuned.likelihood.noise_std)
    assert_close(tuned.curvature.to_dense(), truth.kronecker() * (NOISE / s) ** 2, RTOL)
    assert tuned.log_evidence() > posterior.log_evidence()


def test_dense_blocks_are_dense() -> None:
    blocks = [type(block) for _, block in blocks_of(Truth.of(by_name("batch-norm1d")).fit(structure="kron"))]
    assert blocks == [KroneckerCurvature, DenseCurvature, DenseCurvature, KroneckerCurvature]


def test_another_noise_level_needs_no_new_decomposition_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    y = torch.randn(len(truth.y), truth.case.datum_shape[0], dtype=torch.float64)
    posterior = lw.fit(truth.model, [(truth.x, y)], lw.Gaussian(noise_std=None, per_output=True), structure="kron")
    before = posterior.log_evidence()
    sides: list[int] = []
    decompose = torch.linalg.eigh

    def counting(M: Tensor) -> object:
        sides.append(M.shape[-1])
        return decompose(M)

    monkeypatch.setattr(torch.linalg, "eigh", counting)
    noise = [2.0 + k for k in range(truth.case.datum_shape[0])]
    moved = posterior.with_likelihood(lw.Gaussian(noise_std=noise, per_output=True))
    assert moved.log_evidence() != before
    assert len(sides) == len(moved.curvature.blocks)  # B of every layer, and no A
