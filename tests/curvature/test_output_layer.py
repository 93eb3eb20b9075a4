"""The layer whose output is the network's: closed forms against the dense oracle, and when they must not be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from cases import Case, Net, floats, mlp, tokens
from lapwing.likelihoods import Sites
from lapwing.network.jacobian import FactorBlock, OutputBlock
from makers import randn
from oracle import assert_close
from truth import Truth

RTOL = 1e-10
KINDS = ["categorical", "gaussian", "bernoulli", "poisson", "hetero"]
STRUCTURES: list[Any] = [
    "kron",
    lw.Kron(sharing="reduce"),
    lw.Kron(bias="separate"),
    "ekfac",
    lw.Ekfac(sharing="reduce", bias="separate"),
    "diag",
    "full",
    "block",
]


def head_of(truth: Truth) -> tuple[nn.Module, list[str]]:
    """The last linear layer, and the names of its parameters."""
    names = [name for name, _ in truth.model.named_parameters() if name.startswith("head.")]
    return truth.model, names


def body_and_head(c: int, *, bias: bool = True) -> nn.Module:
    return Net(lambda m, x: m.head(m.body(x)), body=mlp(3, 4, 5), head=nn.Linear(5, c, bias=bias))


def sequence(c: int) -> nn.Module:
    return body_and_head(c)  # (n, t, 3) → (n, t, c)


def one_logit() -> nn.Module:
    return Net(lambda m, x: m.head(m.body(x)).squeeze(-1), body=mlp(3, 4, 5), head=nn.Linear(5, 1))


def segmentation() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.body(x)), body=nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()), head=nn.Conv2d(3, 4, 1)
    )


def wide_head() -> nn.Module:
    """A head with a 2 × 2 kernel: its inputs are patches."""
    return Net(lambda m, x: m.head(torch.tanh(m.body(x))), body=nn.Conv2d(2, 3, 2), head=nn.Conv2d(3, 4, 2))


def folded() -> nn.Module:
    """The head sees (n · t, 3), as many models do."""
    return Net(
        lambda m, x: m.head(m.body(x).flatten(0, 1)).unflatten(0, x.shape[:2]), body=mlp(3, 4, 5), head=nn.Linear(5, 3)
    )


def case(name: str, kind: str, shape: tuple[int, ...], build: Callable[[], nn.Module], x: Any, **rest: Any) -> Case:
    return Case(name, kind, shape, build, x, **rest)


IDENTITIES = [
    *(case(f"dense-{kind}", kind, (2,), lambda: body_and_head(2), floats(3)) for kind in KINDS),
    case("no-bias", "categorical", (4,), lambda: body_and_head(4, bias=False), floats(3)),
    *(case(f"sequence-{kind}", kind, (6, 2), lambda: sequence(2), floats(6, 3)) for kind in KINDS),
    case("folded", "categorical", (4, 3), folded, floats(4, 3)),
    case("one-logit", "bernoulli", (), one_logit, floats(3)),
    case("segmentation", "categorical", (4, 2, 3), segmentation, floats(2, 4, 5), class_axis=1),
    case("wide-head", "categorical", (4, 2, 3), wide_head, floats(2, 4, 5), class_axis=1),
]


def kronecker(truth: Truth, names: list[str], structure: lw.Kron) -> Tensor:
    """Kronecker curvature of the head by definition."""
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = oracle.ggn(J, truth.Lambda)
    layers = oracle.layers(truth.model, truth.x, names)
    sizes = [p.numel() for p in oracle.parameters(truth.model, names).values()]
    words = {"sharing": structure.sharing, "bias": structure.bias}
    return oracle.kronecker(H, sizes, [layers["head"]], truth.Lambda, **words)


def expected_curvature(truth: Truth, names: list[str], structure: Any, fitted: Tensor) -> Tensor:
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = oracle.ggn(J, truth.Lambda)
    if structure == "diag":
        return H.diagonal().diag()
    if structure in ("full", "block"):
        return H
    if structure == "ekfac" or isinstance(structure, lw.Ekfac):
        return fitted  # see test_ekfac_has_the_diagonal_of_the_ggn_in_its_basis
    return kronecker(truth, names, lw.Kron() if structure == "kron" else structure)


@pytest.mark.parametrize("case", IDENTITIES, ids=lambda c: c.name)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_last_layer_posterior_equals_the_oracle(case: Case, structure: Any) -> None:
    truth = Truth.of(case)
    _, names = head_of(truth)
    posterior = truth.fit(structure=structure, params="last_layer")
    assert list(posterior.layout) == names
    assert posterior.linearised.last == "head" and posterior.linearised.only_last
    H = expected_curvature(truth, names, structure, posterior.curvature.to_dense())
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    f, J = oracle.jacobian(truth.model, truth.x, names)
    Sigma = oracle.posterior(H, truth.precision)
    cov = oracle.functional_cov(J, Sigma)
    out = posterior.outputs(truth.x)
    assert_close(out.mean.reshape(f.shape), f, RTOL)
    assert_close(out.cov, cov, RTOL)
    assert_close(out.var.reshape(f.shape), cov.diagonal(dim1=-2, dim2=-1), RTOL)
    joint = posterior.joint_outputs(truth.x)
    assert_close(joint.cov, oracle.joint_cov(J, Sigma), RTOL)
    draws = posterior.functions(3, torch.Generator().manual_seed(7))(truth.x)
    thetas = posterior.sample(3, torch.Generator().manual_seed(7))
    moved = f + torch.einsum("nkp,sp->snk", J, thetas - posterior.mean)
    assert_close(draws.reshape(moved.shape), moved, 1e-9)


@pytest.mark.parametrize("case", IDENTITIES, ids=lambda c: c.name)
def test_gradient_statistics_and_site_covariances(case: Case) -> None:
    truth = Truth.of(case)
    _, names = head_of(truth)
    posterior = truth.fit(structure="kron", params="last_layer")
    f, J = oracle.jacobian(truth.model, truth.x, names)
    r = torch.zeros_like(f)
    sites = oracle.residuals(truth.case.kind, f[:, truth.case.index], truth.targets, **truth.options)
    r[:, truth.case.index.flatten()] = sites.flatten(1)
    gradients = posterior.part_scales @ posterior.estimate.statistics.gradients
    assert_close(gradients, torch.einsum("nkp,nk->p", J, r), RTOL)
    from lapwing.data import as_input
    from lapwing.predictive import pushforward_sites

    cov = posterior.outputs(truth.x).cov
    blocks = torch.stack([cov[:, rows][:, :, rows] for rows in truth.case.index], dim=1)
    found = pushforward_sites(posterior.weights, as_input(truth.x), posterior.sites)
    assert_close(found.cov, blocks, RTOL)


@pytest.mark.parametrize("case", IDENTITIES, ids=lambda c: c.name)
@pytest.mark.parametrize("structure", [lw.Ekfac(), lw.Ekfac(sharing="reduce")], ids=str)
def test_ekfac_has_the_diagonal_of_the_ggn_in_its_basis(case: Case, structure: lw.Ekfac) -> None:
    truth = Truth.of(case)
    _, names = head_of(truth)
    (H,) = truth.fit(structure=structure, params="last_layer").curvature.blocks
    _, J = oracle.jacobian(truth.model, truth.x, names)
    # Rows of J in the basis, by the arrangement of the weights alone.
    W = H.arrangement.matrices(J)
    rotated = H.basis.rotate(W).flatten(2)
    s = torch.einsum("ncp,ncd,ndp->p", rotated, truth.Lambda, rotated)
    assert_close(H.s.flatten(), s, RTOL)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("structure", ["kron", lw.Kron(sharing="reduce"), "ekfac", "diag"], ids=str)
@pytest.mark.parametrize("case", [IDENTITIES[0], IDENTITIES[6]], ids=lambda c: c.name)
def test_other_kinds_of_curvature_agree_with_rows_by_reverse_mode(case: Case, fisher: str, structure: Any) -> None:
    truth = Truth.of(case)
    with_body = replaced_forward(truth.model, lambda m, x: m.head(m.body(x)) * 1.0)  # no identity any more
    closed = truth.fit(structure=structure, params="last_layer", fisher=fisher)
    pulled = lw.fit(
        with_body,
        [(truth.x, truth.y)],
        truth.likelihood(),
        structure=structure,
        params="last_layer",
        fisher=fisher,
        prior=truth.precision,
    )
    assert closed.linearised.last == "head"
    pulled_back = pulled.curvature.to_dense()
    assert_close(closed.curvature.to_dense(), pulled_back, RTOL)
    assert_close(closed.outputs(truth.x).cov, pulled.outputs(truth.x).cov, RTOL)


def replaced_forward(model: nn.Module, run: Callable[..., Any]) -> nn.Module:
    other = Net(run, **dict(model.named_children()))
    return other.double()


def test_custom_likelihoods_and_noise_per_output() -> None:
    truth = Truth.of(IDENTITIES[0])
    custom = lw.CustomLikelihood(lambda f, y: torch.log_softmax(f, -1).gather(-1, y[None].long())[0])
    a = truth.fit(structure="kron", params="last_layer")
    b = lw.fit(truth.model, [(truth.x, truth.y)], custom, structure="kron", params="last_layer", prior=truth.precision)
    assert_close(b.curvature.to_dense(), a.curvature.to_dense(), 1e-9)
    y = torch.randn(len(truth.y), 2, dtype=torch.float64)
    apart = lw.Gaussian(noise_std=[0.5, 2.0], per_output=True)
    c = lw.fit(truth.model, [(truth.x, y)], apart, structure="kron", params="last_layer")
    assert len(c.estimate.parts) == 2
    B = c.curvature.blocks[0].factors.eigen_B.total[0]
    assert_close(B, len(y) * torch.tensor([4.0, 0.25], dtype=torch.float64).diag(), RTOL)


def scaled(m: Any, x: Tensor) -> Tensor:
    return 2 * m.head(m.body(x))


def twice(m: Any, x: Tensor) -> Tensor:
    return m.head(m.head(m.body(x)))


def summed(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(x)) + m.head(m.body(-x))


def permuted(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(x))[:, [2, 0, 1, 4, 3]]


def hooked(m: Any, x: Tensor) -> Tensor:
    f = m.head(m.body(x))
    if f.requires_grad:
        f.register_hook(lambda g: 3 * g)
    return f


@pytest.mark.parametrize("run", [scaled, twice, summed, permuted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_outputs_that_are_not_the_layers_own(run: Callable[..., Any], structure: str) -> None:
    x = floats(3)
    build = lambda: Net(run, body=mlp(3, 4, 5), head=nn.Linear(5, 5))  # noqa: E731
    truth = Truth.of(case(run.__name__, "categorical", (5,), build, x))
    _, names = head_of(truth)
    posterior = truth.fit(structure=structure, params=["head"])
    assert posterior.linearised.last is None
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = kronecker(truth, names, lw.Kron()) if structure == "kron" else oracle.ggn(J, truth.Lambda)
    H = H.diagonal().diag() if structure == "diag" else H
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    cov = oracle.functional_cov(J, oracle.posterior(H, truth.precision))
    assert_close(posterior.outputs(truth.x).cov, cov, RTOL)


def test_a_gradient_that_is_changed_on_the_way_is_noticed() -> None:
    truth = Truth.of(
        case("hooked", "categorical", (5,), lambda: Net(hooked, body=mlp(3, 4, 5), head=nn.Linear(5, 5)), floats(3))
    )
    assert truth.fit(structure="diag", params=["head"]).linearised.last is None


def kinked(m: Any, x: Tensor) -> Tensor:
    """The layer's own output for most data, another function of it for some."""
    s = m.head(m.body(x))
    return torch.where(x[:, :1] > 0.5, s**3, s)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full"])
def test_data_that_leave_another_way_are_followed(structure: str) -> None:
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:3, 0] = -1.0  # the probe sees these
    x[6, 0] = 1.0
    build = lambda: Net(kinked, body=mlp(3, 4, 5), head=nn.Linear(5, 3))  # noqa: E731
    truth = Truth.of(Case("kinked", "categorical", (3,), build, lambda n, g: x[:n]), 12)
    _, names = head_of(truth)
    batches = [(truth.x[i : i + 3], truth.y[i : i + 3]) for i in range(0, 12, 3)]
    posterior = lw.fit(
        truth.model, batches, truth.likelihood(), structure=structure, params=["head"], prior=truth.precision
    )
    assert posterior.linearised.last == "head"
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = oracle.ggn(J, truth.Lambda)
    H = H.diagonal().diag() if structure == "diag" else H
    H = kronecker(truth, names, lw.Kron()) if structure == "kron" else H
    if structure == "ekfac":
        assert_close(posterior.curvature.to_dense().trace(), H.trace(), RTOL)
        H = posterior.curvature.to_dense()
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    Sigma = oracle.posterior(H, truth.precision)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(J, Sigma), RTOL)
    assert_close(posterior.joint_outputs(truth.x).cov, oracle.joint_cov(J, Sigma), RTOL)


def test_a_head_tied_to_an_embedding_is_not_treated_as_one() -> None:
    def build() -> nn.Module:
        net = Net(
            lambda m, ids: m.head(torch.tanh(m.table(ids).mean(1))),
            table=nn.Embedding(6, 4),
            head=nn.Linear(4, 6, bias=False),
        )
        net.head.weight = net.table.weight
        return net

    truth = Truth.of(case("tied", "categorical", (6,), build, tokens(6, 3)))
    posterior = truth.fit(structure="diag")
    assert posterior.linearised.last is None
    assert_close(posterior.curvature.diagonal(), truth.H.diagonal(), RTOL)


def test_a_zero_head_of_a_segmentation_network_keeps_its_order() -> None:
    """All outputs are equal, so values say nothing of the order of classes and pixels."""

    truth = Truth.of(case("zeros", "categorical", (4, 2, 3), segmentation, floats(2, 4, 5), class_axis=1))
    nn.init.zeros_(truth.model.head.weight)
    nn.init.zeros_(truth.model.head.bias)
    _, names = head_of(truth)
    posterior = truth.fit(structure="kron", params="last_layer")
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = kronecker(truth, names, lw.Kron())
    assert_close(posterior.curvature.to_dense(), H, RTOL)
    cov = oracle.functional_cov(J, oracle.posterior(H, truth.precision))
    assert_close(posterior.outputs(truth.x).cov, cov, RTOL)


def test_no_backward_pass_and_no_column_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("not needed for the output layer")

    truth = Truth.of(IDENTITIES[0])
    truth.fit(structure="kron", params="last_layer")
    monkeypatch.setattr(lw.Categorical, "hessian_root", refuse)
    monkeypatch.setattr("lapwing.network.linearised.pull_back", refuse)
    monkeypatch.setattr("lapwing.network.linearised.captured_blocks", refuse)
    for structure in ("kron", "ekfac", "diag"):
        truth.fit(structure=structure, params="last_layer").outputs(truth.x).cov  # noqa: B018


# --- the block -------------------------------------------------------------------------------------------------


def block(n: int, r: int, o: int, i: int, *, turned: bool) -> OutputBlock:
    from lapwing.operators import Arrangement

    g = torch.Generator().manual_seed(n * r + o)
    a = torch.randn(n, r, i, dtype=torch.float64, generator=g)
    a[..., -1] = 1  # the bias
    U = torch.randn(o, o, dtype=torch.float64, generator=g) if turned else None
    weight, bias = slice(0, o * (i - 1)), slice(o * (i - 1), o * i)
    return OutputBlock.given(Arrangement(1, o, weight, bias, (1, o, i - 1), (0, 1, 2)), a, U)


@pytest.mark.parametrize("turned", [False, True])
def test_a_rotation_of_an_output_block(turned: bool) -> None:
    """U_Bᵀ W U_A of every row, also of one that has been turned before."""
    n, r, o, i = 4, 2, 3, 5
    plain = block(n, r, o, i, turned=turned)
    U_B, U_A = (torch.linalg.qr(randn(d, d, g=torch.Generator().manual_seed(d))).Q[None] for d in (o, i))
    W = torch.eye(o, dtype=torch.float64) if plain.U is None else plain.U
    rows = torch.einsum("nri,co,op,ij->nrcpj", plain.a, W, U_B[0], U_A[0])
    assert_close(torch.cat(plain.rotated(U_B, U_A).parts(), dim=-1), rows.reshape(n, r * o, o * i))


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_every_contraction_of_an_output_block(r: int, turned: bool) -> None:
    from lapwing.operators import GroupedDiagonal

    n, o, i = 4, 3, 5
    first, second = block(n, r, o, i, turned=turned), block(n + 1, r, o, i, turned=False)
    second = OutputBlock(second.arrangement, second.inputs, first.U)
    J, K = (torch.cat(b.parts(), dim=-1) for b in (first, second))
    assert J.shape == (n, r * o, o * i)
    w = torch.rand(o * i, dtype=torch.float64) + 0.1
    v = torch.randn(2, o * i, dtype=torch.float64)
    D = GroupedDiagonal(w, torch.arange(o * i))
    cov = torch.einsum("ncp,p,ndp->ncd", J, w, J)
    assert_close(first.mv(v), torch.einsum("ncp,sp->snc", J, v), 1e-12)
    assert_close(first.quad(w), cov, 1e-12)
    assert_close(first.quad_diagonal(w), cov.diagonal(dim1=-2, dim2=-1), 1e-12)
    across = torch.einsum("ncp,p,mdp->ncmd", J, w, K).reshape(n * r * o, -1)
    assert_close(first.cross(second, D), across, 1e-12)
    assert_close(first.cross(second.plain(), D), across, 1e-12)
    assert_close(first.plain().cross(second, D), across, 1e-12)
    assert_close(torch.cat(first.sum_squares()), (J**2).sum((0, 1)), 1e-12)
    both = first.concatenated([second])
    assert isinstance(both, OutputBlock)
    assert_close(torch.cat(both.parts(), -1), torch.cat([J, K]), 1e-12)
    for mixed in (first.concatenated([second.plain()]), first.plain().concatenated([second])):
        assert isinstance(mixed, FactorBlock)
        assert_close(torch.cat(mixed.parts(), -1), torch.cat([J, K]), 1e-12)
    assert_close(torch.cat(first.single_rows().parts(), -1), J.reshape(-1, 1, o * i), 1e-12)
    assert_close(torch.cat(first.data_at(slice(1, 3)).parts(), -1), J[1:3], 1e-12)
    for rows in (torch.arange(o, 2 * o) % (r * o), torch.tensor([r * o - 1, 0])):
        assert_close(torch.cat(first.outputs_at(rows).parts(), -1), J[:, rows], 1e-12)
    for where in first.slices:
        (part,) = first.within(where).shifted(-where.start).parts()
        assert_close(part, J[..., where], 1e-12)


def test_likelihoods_say_the_same_in_closed_form() -> None:
    g = torch.Generator().manual_seed(0)
    f = 8 * torch.randn(5, 3, 2, dtype=torch.float64, generator=g)
    U = torch.randn(2, 4, dtype=torch.float64, generator=g)
    sites = Sites((3, 2))
    labels = torch.tensor([[0, 1, -100]] * 5)
    cases: list[tuple[Any, Any]] = [
        (lw.Categorical(), labels),
        (lw.Categorical(weight=[0.5, 3.0]), labels),
        (lw.Gaussian(noise_std=1.0), torch.randn(5, 3, 2)),
        (lw.Gaussian(noise_std=[1.0, 2.0], per_output=True), torch.randn(5, 3, 2)),
        (lw.Bernoulli(), (f > 0).long()),
        (lw.Poisson(), torch.ones(5, 3, 2)),
        (lw.HeteroscedasticGaussian(), torch.randn(5, 3)),
    ]
    for likelihood, y in cases:
        encoded = likelihood.encode(y, sites, 5)
        roots, curvatures = likelihood.part_roots(f, encoded), likelihood.part_curvatures(f, encoded)
        for S, closed in zip(roots, curvatures, strict=True):
            Lambda = S @ S.mT
            assert_close(closed.diagonals(), Lambda.diagonal(dim1=-2, dim2=-1), 1e-10)
            along = torch.einsum("ck,ntcd,dk->ntk", U, Lambda, U)
            assert_close(closed.along(U), along, 1e-10)
            total = closed.sign * closed.rows().T @ closed.rows()
            off = ~torch.eye(2, dtype=torch.bool)
            assert_close(total[off], Lambda.sum((0, 1))[off], 1e-10)


def test_a_thousand_classes_in_little_memory() -> None:
    from lapwing.planning.allocations import AllocationCounter

    head = nn.Sequential(nn.Identity(), nn.Linear(64, 1000))
    x, y = torch.randn(64, 64), torch.randint(1000, (64,))
    with AllocationCounter() as counter:
        posterior = lw.fit(head, (x, y), "classification", structure="kron", params="last_layer")
    assert counter.peak < 64 << 20  # the root alone would take 64 · 1000 · 999 · 4 bytes = 244 MiB
    posterior.outputs(x[:1]).var  # noqa: B018
    with AllocationCounter() as counter:
        posterior.outputs(x).var  # noqa: B018
    assert counter.peak < 16 << 20
