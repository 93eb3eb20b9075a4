"""Embeddings and attention: rules that must give the rows, diagonals and Kronecker blocks of the dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lapwing as lw
import oracle
from cases import Case, Inputs, Net, by_name, floats, mask, several, tokens
from lapwing.data import as_input
from lapwing.network.jacobian import Block, DenseBlock, EmbeddingBlock, FactorBlock, Jacobian
from lapwing.operators import GroupedDiagonal, KroneckerCurvature
from oracle import assert_close
from truth import Truth

RTOL = 1e-10


def rows(posterior: Any, x: Any) -> Jacobian:
    with posterior.linearised.trace(as_input(x)) as trace:
        return trace.jacobian()


def check(truth: Truth, rest: tuple[str, ...] = ()) -> Any:
    """Rows, diagonal and the Kronecker structure against the oracle; which tensors reverse mode had to do."""
    kron, diag = truth.fit(structure="kron"), truth.fit(structure="diag")
    f, J = truth.jacobian
    assert kron.linearised.rest.names == rest
    assert_close(rows(kron, truth.x).dense(), J, RTOL)
    assert_close(diag.curvature.diagonal(), truth.H.diagonal(), RTOL)
    Sigma = torch.diag(1 / (truth.H.diagonal() + truth.precision))
    var = oracle.functional_cov(J, Sigma).diagonal(dim1=-2, dim2=-1)
    assert_close(diag.outputs(truth.x).var.reshape(f.shape), var, RTOL)
    Sigma = oracle.posterior(kron.curvature.to_dense(), truth.precision)
    out, joint = kron.outputs(truth.x), kron.joint_outputs(truth.x)
    assert_close(out.cov, oracle.functional_cov(J, Sigma), RTOL)
    assert_close(joint.cov, oracle.joint_cov(J, Sigma), RTOL)
    return kron


# --- embeddings -----------------------------------------------------------------------------------------------


def embedded(run: Callable[..., Any], table: nn.Embedding, features: int = 3) -> Callable[[], nn.Module]:
    return lambda: Net(run, embed=table, out=nn.Linear(features, 2))


def summed(m: Any, ids: Tensor) -> Tensor:
    return m.out(m.embed(ids).cumsum(1).tanh().sum(1))  # not linear in the table, and order matters


def twice(m: Any, ids: Tensor, more: Tensor) -> Tensor:
    return m.out(m.embed(ids).sum(1).tanh() + m.embed(more).sin())


EMBEDDINGS = [
    Case("plain", "categorical", (2,), embedded(summed, nn.Embedding(7, 3)), tokens(7, 5)),
    Case("repeats", "gaussian", (2,), embedded(summed, nn.Embedding(2, 3)), tokens(2, 6), note="every token repeats"),
    Case("padding", "gaussian", (2,), embedded(summed, nn.Embedding(5, 3, padding_idx=1)), tokens(5, 4)),
    Case("two-calls", "gaussian", (2,), embedded(twice, nn.Embedding(5, 3)), several(tokens(5, 4), tokens(5))),
    Case("grid", "categorical", (2,), embedded(lambda m, i: m.out(m.embed(i).tanh().mean((1, 2))), nn.Embedding(6, 3)),
         tokens(6, 2, 3)),
    Case("large", "gaussian", (2,), embedded(summed, nn.Embedding(400, 3)), tokens(400, 3), note="more than 1,024"),
]  # fmt: skip


@pytest.mark.parametrize("case", EMBEDDINGS, ids=lambda c: c.name)
def test_embedding_equals_the_oracle(case: Case) -> None:
    truth = Truth.of(case)
    kron = check(truth)
    assert isinstance(rows(kron, truth.x).blocks[0], EmbeddingBlock)
    place = kron.layout["embed.weight"]
    exact = truth.H[place, place]
    kept = exact if len(exact) <= 1024 else exact.diagonal().diag()
    assert_close(kron.curvature.to_dense()[place, place], kept, RTOL)
    full = truth.fit(structure="full")
    assert_close(full.curvature.to_dense(), truth.H, RTOL)
    assert_close(full.outputs(truth.x).cov, oracle.functional_cov(truth.jacobian[1], oracle.posterior(truth.H, 1.3)))


def test_tables_whose_gradient_is_not_the_gradient_are_left_to_reverse_mode() -> None:
    normed = embedded(summed, nn.Embedding(5, 3, max_norm=0.5))()
    x, y = torch.randint(5, (4, 3)), torch.tensor([0, 1, 1, 0])
    before = normed.embed.weight.detach().clone()
    posterior = lw.fit(normed, (x, y), "classification", structure="diag")
    assert posterior.linearised.rest.names == ("embed.weight",)
    assert torch.equal(normed.embed.weight, before)


def test_sparse_gradients_make_no_difference() -> None:
    model = embedded(summed, nn.Embedding(5, 3))()
    x, y = torch.randint(5, (4, 3)), torch.tensor([0, 1, 1, 0])
    dense = lw.fit(model, (x, y), "classification", structure="full")
    model.embed.sparse = True
    sparse = lw.fit(model, (x, y), "classification", structure="full")
    assert torch.equal(sparse.curvature.to_dense(), dense.curvature.to_dense())
    assert torch.equal(sparse.estimate.statistics.gradients, dense.estimate.statistics.gradients)


def test_layers_that_some_data_do_not_call() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        if x.shape[1] > 2:
            h = h + m.attn(x, x, x)[0] + m.embed((x[..., 0] > 0).long())
        return m.head(h.sin().mean(1))

    attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
    children = {"embed": nn.Embedding(2, 4), "attn": attention, "fc": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    model = Net(run, **children).double()
    long, short = (torch.randn(3, t, 4, dtype=torch.float64) for t in (3, 2))
    data = [(long, torch.tensor([0, 1, 1])), (short, torch.tensor([1, 0, 1]))]
    H = torch.zeros(())
    for x, _ in data:
        f, J = oracle.jacobian(model, x)
        p = f.softmax(-1)
        H = H + oracle.ggn(J, torch.diag_embed(p) - p[:, :, None] * p[:, None])
    for structure, expected in {"full": H, "diag": H.diagonal().diag()}.items():
        posterior = lw.fit(model, data, "classification", structure=structure)
        assert not posterior.linearised.rest.names
        assert_close(posterior.curvature.to_dense(), expected, RTOL)
    kron = lw.fit(model, data, "classification", structure="kron")
    J = oracle.jacobian(model, short)[1]
    assert_close(kron.outputs(short).cov, oracle.functional_cov(J, kron.covariance()), RTOL)


def embedding_blocks(n: int = 4, c: int = 3, t: int = 5, v: int = 6, d: int = 2) -> tuple[EmbeddingBlock, Tensor]:
    g = torch.Generator().manual_seed(n)
    ids = torch.randint(v, (n, t), generator=g)
    gradients = torch.randn(n, c, t, d, generator=g, dtype=torch.float64)
    J = torch.zeros(n, c, v, d, dtype=torch.float64)
    for i in range(n):
        for j in range(t):
            J[i, :, ids[i, j]] += gradients[i, :, j]
    return EmbeddingBlock.of(slice(0, v * d), ids, gradients), J.flatten(2)


def dense_blocks(n: int = 4, c: int = 3, t: int = 5) -> tuple[DenseBlock, Tensor]:
    J = torch.randn(n, c, 12, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return DenseBlock(slice(0, 12), J), J


@pytest.mark.parametrize("made", [embedding_blocks, dense_blocks])
def test_every_contraction_of_a_block(made: Callable[..., tuple[Block, Tensor]]) -> None:
    (block, J), (other, K) = made(4), made(3, t=2)
    p = J.shape[-1]
    weights = torch.rand(p, dtype=torch.float64) + 0.1
    v = torch.randn(2, p, dtype=torch.float64)
    D = GroupedDiagonal(torch.tensor([0.7, 1.9], dtype=torch.float64), (torch.arange(p) % 2))
    assert_close(block.parts()[0], J)
    assert_close(block.mv(v), torch.einsum("ncp,sp->snc", J, v))
    assert_close(block.quad(weights), (J * weights) @ J.mT)
    assert_close(
        block.quads(torch.stack([weights, weights**2])),
        ((J[None] * torch.stack([weights, weights**2])[:, None, None]) @ J.mT),
    )
    assert_close(block.quad_diagonal(weights), J**2 @ weights)
    assert_close(block.sum_squares()[0], (J**2).sum((0, 1)))
    assert_close(block.cross(other, D), (J.flatten(0, 1) * D.diagonal) @ K.flatten(0, 1).T)
    assert_close(block.concatenated([other]).parts()[0], torch.cat([J, K]))
    assert_close(block.single_rows().parts()[0], J.flatten(0, 1)[:, None])
    assert_close(block.outputs_at(torch.tensor([2, 0])).parts()[0], J[:, [2, 0]])
    assert_close(block.data_at(slice(1, 3)).parts()[0], J[1:3])
    assert block.shifted(5).slices == (slice(5, 5 + p),)
    assert block.within(slice(0, p)) is block and block.within(slice(0, p - 1)) is None


DIRECT = ("batch-norm1d", "batch-norm2d", "layer-norm", "rms-norm", "group-norm", "instance-norm", "prelu-channels")


@pytest.mark.parametrize("name", DIRECT)
def test_scales_and_slopes_keep_their_rules(name: str) -> None:
    """A rule that the probe finds wrong is given up for plain reverse mode: right, slower, and silent."""
    assert Truth.of(by_name(name)).fit(structure="diag").linearised.rest.names == ()


@pytest.mark.parametrize("layer", [lambda: nn.PReLU(4), lambda: nn.BatchNorm1d(4).eval()], ids=["prelu", "batch-norm"])
def test_several_rows_of_a_layer_belong_to_one_datum(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.out(m.layer(m.first(x.flatten(0, 1))).unflatten(0, (len(x), -1)).mean(1)),
        first=nn.Linear(3, 4),
        layer=layer(),
        out=nn.Linear(4, 2),
    ).double()
    x, y = torch.randn(5, 3, 3, dtype=torch.float64), torch.arange(5) % 2
    posterior = lw.fit(model, (x, y), "classification", structure="diag")
    f, J = oracle.jacobian(model, x)
    p = f.softmax(-1)
    assert posterior.linearised.rest.names == ()
    expected = oracle.ggn(J, torch.diag_embed(p) - p[:, :, None] * p[:, None]).diagonal()
    assert_close(posterior.curvature.diagonal(), expected, RTOL)


def test_a_large_vocabulary_costs_what_its_tokens_cost() -> None:
    vocabulary, d, n, t = 50_000, 32, 16, 8
    model = embedded(lambda m, ids: m.out(m.embed(ids).tanh().mean(1)), nn.Embedding(vocabulary, d), features=d)()
    x, y = torch.randint(vocabulary, (n, t)), torch.randint(2, (n,))
    posterior = lw.fit(model, (x, y), "classification", structure="diag")
    sizes = posterior.linearised.sizes
    assert sizes.factored <= 2 * t * d + 200  # against 1,600,000 for a dense row
    J = rows(posterior, x)
    held = sum(v.numel() for b in J.blocks for v in vars(b).values() if isinstance(v, Tensor))
    assert held < 2 * n * 2 * t * d < n * 2 * vocabulary * d / 1_000
    seen = torch.zeros(vocabulary, dtype=torch.bool)
    seen[x] = True
    found = posterior.curvature.diagonal()[posterior.layout["embed.weight"]].reshape(vocabulary, d)
    assert bool((found[seen] > 0).all()) and bool((found[~seen] == 0).all())
    assert posterior.outputs(x).var.shape == (n, 2)


# --- attention ------------------------------------------------------------------------------------------------


def attending(run: Callable[..., Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Net(run, attn=nn.MultiheadAttention(4, 2, **options), head=nn.Linear(4, 2))


def to_itself(**call: Any) -> Callable[..., Any]:
    """Self-attention; `call` holds arguments, functions of the input among them."""

    def run(m: Any, x: Tensor) -> Tensor:
        first = m.attn.batch_first
        h = x if first else x.transpose(0, 1)
        given = {key: value(x) if callable(value) else value for key, value in call.items()}
        s, weights = m.attn(h, h, h, **given)
        s = (s if first else s.transpose(0, 1)).sin()
        seen = 0.0 if weights is None else weights.flatten(1).pow(2).sum(1, keepdim=True)  # weights are an output too
        return m.head(s.mean(1)) + seen

    return run


def to_other(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    if not m.attn.batch_first:
        return m.head(m.attn(x.mT.permute(2, 0, 1), *[memory.transpose(0, 1)] * 2)[0].sin().mean(0))
    return m.head(m.attn(x, memory, memory, need_weights=False)[0].sin().mean(1))


def to_three(m: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return m.head(m.attn(x, keys, values)[0].sin().mean(1))


def mixed(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    h = m.attn(x, x, x)[0]
    return m.head(m.attn(h, memory, memory)[0].sin().mean(1))


def windows(m: Any, x: Tensor) -> Tensor:
    h = x.unflatten(1, (2, -1)).flatten(0, 1)  # (2 B, T/2, E)
    return m.head(m.attn(h, h, h, need_weights=False)[0].sin().unflatten(0, (-1, 2)).mean((1, 2)))


def padding(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) >= 1 + (x[:, 0, 0] > 0).long()[:, None]


def causal(x: Tensor) -> Tensor:
    return torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)


def additive(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[1] ** 2, dtype=x.dtype).reshape(x.shape[1], x.shape[1])


def per_head(x: Tensor) -> Tensor:
    return additive(x).repeat(2 * len(x), 1, 1) * torch.tensor([0.5, 2.0]).repeat(len(x))[:, None, None]


def self_case(name: str, call: dict[str, Any], **options: Any) -> Case:
    options.setdefault("batch_first", True)
    return Case(name, "gaussian", (2,), attending(to_itself(**call), **options), floats(3, 4))


def other_case(name: str, run: Callable[..., Any], x: Inputs, **options: Any) -> Case:
    return Case(name, "gaussian", (2,), attending(run, **{"batch_first": True, **options}), x)


SELF = [
    self_case("weights", {}),
    self_case("no-weights", {"need_weights": False}),
    self_case("weights-by-head", {"average_attn_weights": False}),
    self_case("no-bias", {}, bias=False),
    self_case("dropout-in-eval", {}, dropout=0.5),
    self_case("sequence-first", {}, batch_first=False),
    self_case("sequence-first-fused", {"need_weights": False, "key_padding_mask": padding}, batch_first=False),
    self_case("padding", {"key_padding_mask": padding}),
    self_case("padding-fused", {"key_padding_mask": padding, "need_weights": False}),
    self_case("causal-mask", {"attn_mask": causal}),
    self_case("causal-hint", {"attn_mask": causal, "is_causal": True, "need_weights": False}),
    self_case("causal-hint-and-padding",
              {"attn_mask": causal, "is_causal": True, "need_weights": False, "key_padding_mask": padding}),
    self_case("additive-mask", {"attn_mask": additive, "need_weights": False}),
    self_case("mask-per-head", {"attn_mask": per_head}),
    self_case("mask-per-head-fused", {"attn_mask": per_head, "need_weights": False}),
    self_case("zero-position", {"attn_mask": additive}, add_zero_attn=True),
    self_case("learnt-position", {"key_padding_mask": padding, "need_weights": False}, add_bias_kv=True),
    self_case("both-positions", {"attn_mask": causal, "key_padding_mask": padding}, add_bias_kv=True,
              add_zero_attn=True, batch_first=False),
    other_case("windows", windows, floats(4, 4)),
]  # fmt: skip
APART = [
    other_case("other", to_other, several(floats(3, 4), floats(2, 4))),
    other_case("other-no-bias", to_other, several(floats(3, 4), floats(2, 4)), bias=False),
    other_case("other-sequence-first", to_other, several(floats(3, 4), floats(2, 4)), batch_first=False),
    other_case("three", to_three, several(floats(2, 4), floats(3, 4), floats(3, 4))),
    other_case("widths", to_three, several(floats(2, 4), floats(3, 5), floats(3, 3)), kdim=5, vdim=3),
    other_case("widths-no-bias", to_three, several(floats(2, 4), floats(3, 5), floats(3, 3)), kdim=5, vdim=3,
               bias=False, add_bias_kv=True),
    other_case("both-ways", mixed, several(floats(3, 4), floats(2, 4))),
]  # fmt: skip


@pytest.mark.parametrize("case", SELF, ids=lambda c: c.name)
def test_self_attention_equals_the_oracle(case: Case) -> None:
    truth = Truth.of(case)
    kron = check(truth)
    names = [H.name for H in kron.curvature.blocks if isinstance(H, KroneckerCurvature)]
    assert sorted(names) == ["attn", "attn.out_proj", "head"]
    assert {"attn", "attn.out_proj"} <= set(truth.layers)
    assert_close(kron.curvature.to_dense(), truth.kronecker(), RTOL)
    reduced = truth.fit(structure=lw.Kron(sharing="reduce", bias="separate"))
    assert_close(reduced.curvature.to_dense(), truth.kronecker(sharing="reduce", bias="separate"), RTOL)


def factors_apart(J: Jacobian, place: slice) -> FactorBlock:
    (block,) = (b for b in J.blocks if b.slices == (place,))
    assert isinstance(block, FactorBlock)
    return block


@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_attention_to_others_has_a_block_per_projection(case: Case) -> None:
    truth = Truth.of(case)
    kron = check(truth)
    layout, H = kron.layout, kron.curvature.to_dense()
    J = rows(kron, truth.x)
    packed = "attn.in_proj_weight" in layout
    for j, letter in enumerate("qkv"):
        place = layout["attn.in_proj_weight"] if packed else layout[f"attn.{letter}_proj_weight"]
        place = slice(place.start + 16 * j, place.start + 16 * (j + 1)) if packed else place
        block = factors_apart(J, place)
        a, g = block.a[:, :, 0], block.g[:, :, :, 0]
        A = torch.einsum("nri,nrj->ij", a, a) / (a.shape[0] * a.shape[1])
        B = torch.einsum("ncro,ncd,ndrp->op", g, truth.Lambda, g)
        assert_close(H[place, place], torch.kron(B, A), RTOL)
        assert float(H[place].abs().sum()) == pytest.approx(float(H[place, place].abs().sum()))
    if "attn.in_proj_bias" in layout:
        place = layout["attn.in_proj_bias"]
        assert_close(H[place, place], truth.H[place, place], RTOL)


def test_transformer_layers_are_covered_by_their_submodules() -> None:
    def run(m: Any, source: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        memory = m.encoder(source, src_key_padding_mask=valid == 0)
        return m.head(m.decoder(target, memory, memory_key_padding_mask=valid == 0).mean(1))

    layers = {
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 3, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        ),
        "decoder": lambda: nn.TransformerDecoderLayer(4, 2, 3, batch_first=True),
        "head": lambda: nn.Linear(4, 2),
    }
    case = Case("transformer", "gaussian", (2,), lambda: Net(run, **{k: make() for k, make in layers.items()}),
                several(floats(3, 4), floats(2, 4), mask(3)), n=3)  # fmt: skip
    check(Truth.of(case))


def test_a_checkpointed_attention_block_repeats_what_it_computed() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(lambda h: m.attn(h, h, h)[0].sin(), x, use_reentrant=False).mean(1))

    check(Truth.of(other_case("checkpointed", run, floats(3, 4))))


def test_frozen_parts_of_attention() -> None:
    def build() -> nn.Module:
        model = attending(to_itself(), batch_first=True, add_bias_kv=True)()
        for name in ("attn.in_proj_weight", "attn.bias_k"):
            model.get_parameter(name).requires_grad_(False)
        return model

    check(Truth.of(Case("frozen", "gaussian", (2,), build, floats(3, 4))))


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        s, weights = super().forward(*args, **kwargs)
        return 2 * s, weights


def hooked() -> nn.Module:
    model = attending(to_itself(), batch_first=True)()
    model.attn.out_proj.register_forward_hook(lambda module, args, output: 3 * output)  # torch never runs it
    return model


def subclassed() -> nn.Module:
    model = attending(to_itself(), batch_first=True)()
    model.attn = Doubled(4, 2, batch_first=True)
    return model


def single(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.stack([m.attn(row, row, row)[0].sin().mean(0) for row in x]))


OWN = ("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias")


@pytest.mark.parametrize("build", [hooked, subclassed, attending(single)], ids=["hooked", "subclass", "no-batch-axis"])
def test_attention_that_differs_is_left_to_reverse_mode(build: Callable[[], nn.Module]) -> None:
    check(Truth.of(Case("differs", "gaussian", (2,), build, floats(3, 4))), rest=OWN)


def test_a_forward_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from lapwing.network.layers import attention

    monkeypatch.setattr(attention, "sqrt", lambda x: x)  # the scores would come out too small
    check(Truth.of(self_case("wrong", {})), rest=OWN)


def test_the_module_is_given_back_with_its_own_forward() -> None:
    truth = Truth.of(self_case("returned", {}))
    posterior = truth.fit(structure="kron")
    posterior.predict(truth.x)
    assert "forward" not in vars(truth.model.attn)
    assert not truth.model.attn.out_proj._forward_hooks
