"""Models nobody here wrote: Hugging Face architectures with tiny random configurations, in float64.

Needs the extra `hf`; `make test-transformers` installs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.network.jacobian import EmbeddingBlock
from lapwing.operators import KroneckerCurvature
from oracle import assert_close
from untouched import untouched

pytestmark = pytest.mark.transformers

N, T, C, VOCABULARY = 4, 5, 3, 30
DENSE = 5_000  # parameters up to which the oracle writes the whole precision down
PRECISION = 1.5


def hf() -> Any:
    """Imported here, so that collecting the other tests needs no extra."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise RuntimeError("tests marked `transformers` need the extra: run `make test-transformers`") from error
    transformers.logging.set_verbosity_error()
    return transformers


@dataclass(frozen=True)
class Architecture:
    name: str
    config: str
    model: str
    options: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    rtol: float = 1e-10

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = getattr(hf(), self.config)(**{"num_labels": C, **self.options})
            model = getattr(hf(), self.model)(config).double().eval()
            with torch.no_grad():  # freshly built heads are close to zero
                for p in model.parameters():
                    p.add_(0.1 * torch.randn_like(p))
        return model

    def data(self, model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
        g = torch.Generator().manual_seed(1)
        x = self.inputs(g)
        with torch.no_grad():
            logits = model(**x).logits
        return x, torch.randint(logits.shape[-1], logits.shape[:-1], generator=g)


def words(g: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (N, T), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones(N, T, dtype=torch.long)}


def padded_words(g: torch.Generator) -> dict[str, Tensor]:
    x = words(g)
    x["attention_mask"][1, -2:] = 0
    return x


def pictures(size: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda g: {"pixel_values": torch.randn(N, 3, size, size, generator=g, dtype=torch.float64)}


def sounds(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(N, 200, generator=g, dtype=torch.float64)}


WIDTHS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
TEXT = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VIT = {**WIDTHS, "image_size": 8, "patch_size": 4}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, **TOKENS}

ARCHITECTURES = [
    Architecture("bert", "BertConfig", "BertForSequenceClassification", TEXT, padded_words),
    Architecture("bert-tokens", "BertConfig", "BertForTokenClassification", TEXT, words),
    Architecture("roberta", "RobertaConfig", "RobertaForSequenceClassification", TEXT, words),
    Architecture("distilbert", "DistilBertConfig", "DistilBertForSequenceClassification",
                 {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "vocab_size": VOCABULARY,
                  "max_position_embeddings": 16}, words),
    Architecture("albert", "AlbertConfig", "AlbertForSequenceClassification", {**TEXT, "embedding_size": 6}, words),
    Architecture("electra", "ElectraConfig", "ElectraForSequenceClassification", {**TEXT, "embedding_size": 6}, words),
    Architecture("gpt2", "GPT2Config", "GPT2ForSequenceClassification", GPT2, words),
    Architecture("gpt2-tied", "GPT2Config", "GPT2LMHeadModel", GPT2, words),
    Architecture("llama", "LlamaConfig", "LlamaForSequenceClassification",
                 {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}, words,
                 rtol=1e-5),  # its normalisation computes in float32 whatever the model's dtype
    Architecture("t5-encoder", "T5Config", "T5ForTokenClassification",
                 {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY,
                  "relative_attention_num_buckets": 4}, words, rtol=1e-5),  # the same
    Architecture("vit", "ViTConfig", "ViTForImageClassification", VIT, pictures(8)),
    Architecture("deit", "DeiTConfig", "DeiTForImageClassification", VIT, pictures(8)),
    Architecture("swin", "SwinConfig", "SwinForImageClassification",
                 {"embed_dim": 6, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 8,
                  "patch_size": 2}, pictures(8)),
    Architecture("convnext", "ConvNextConfig", "ConvNextForImageClassification",
                 {"hidden_sizes": [4, 6, 6, 6], "depths": [1, 1, 1, 1]}, pictures(32)),
    Architecture("resnet", "ResNetConfig", "ResNetForImageClassification",
                 {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}, pictures(16)),
    Architecture("mobilenet", "MobileNetV2Config", "MobileNetV2ForImageClassification",
                 {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}, pictures(32)),
    Architecture("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification",
                 {**WIDTHS, "num_hidden_layers": 1, "conv_dim": (6, 6), "conv_stride": (5, 2), "conv_kernel": (10, 3),
                  "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
                  "classifier_proj_size": 6}, sounds),
]  # fmt: skip
TIED = [a for a in ARCHITECTURES if a.name == "gpt2-tied"]
each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)


def fitted(architecture: Architecture, structure: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, lw.Posterior]:
    model = architecture.build()
    x, y = architecture.data(model)
    with untouched(model):
        posterior = lw.fit(
            model, [{**x, "labels": y}], "classification", structure=structure, prior=PRECISION, progress=False
        )
    return model, x, y, posterior


def ggn_diagonal(J: Tensor, f: Tensor, classes: int) -> Tensor:
    """Σ over data and sites of J_tᵀ Λ_t J_t, its diagonal; J (n, K, P), f (n, K)."""
    p = f.unflatten(1, (-1, classes)).softmax(-1)
    J = J.unflatten(1, (-1, classes))
    mean = torch.einsum("ntcp,ntc->ntp", J, p)
    return torch.einsum("ntcp,ntc->p", J**2, p) - (mean**2).sum((0, 1))


@each
@pytest.mark.parametrize("structure", ["auto", "kron"])
def test_variances_are_the_oracles_and_the_model_is_untouched(architecture: Architecture, structure: str) -> None:
    model, x, y, posterior = fitted(architecture, structure)
    with untouched(model):
        prediction, out = posterior.predict(x), posterior.outputs(x)
    assert prediction.probs.shape == out.mean.shape == (*y.shape, out.mean.shape[-1])
    assert_close(prediction.probs.sum(-1), torch.ones(y.shape))
    if posterior.layout.p > DENSE:
        return  # its diagonal is compared below
    f, J = oracle.jacobian(model, oracle.slice_x(x, 0))
    P = posterior.precision.to_dense()
    variance = (J[0] * torch.linalg.solve(P, J[0].T).T).sum(-1)
    assert_close(out.mean[0].flatten(), f[0], architecture.rtol)
    assert_close(out.var[0].flatten(), variance, architecture.rtol)


@each
def test_the_diagonal_is_the_oracles(architecture: Architecture) -> None:
    model, x, _, posterior = fitted(architecture, "diag")
    f, J = oracle.jacobian(model, x)
    H = ggn_diagonal(J, f, posterior.outputs(x).mean.shape[-1])
    assert_close(posterior.curvature.diagonal(), H, architecture.rtol)
    assert_close(posterior.outputs(x).var.flatten(1), J**2 @ (1 / (H + PRECISION)), architecture.rtol)


@each
def test_kronecker_blocks_are_products_of_their_factors(architecture: Architecture) -> None:
    """Each block B ⊗ A from the layers' inputs and gradients, as the oracle's hooks see them."""
    model, x, _, posterior = fitted(architecture, "kron")
    if posterior.layout.p > DENSE:
        return  # too large to write down
    f = oracle.outputs(model, x).detach()
    classes = posterior.outputs(x).mean.shape[-1]
    p = f.unflatten(1, (-1, classes)).softmax(-1)
    Lambda = torch.stack([torch.block_diag(*(torch.diag(q) - q[:, None] * q for q in datum)) for datum in p])
    layers = oracle.layers(model, x)
    names = [H.name for H in posterior.curvature.blocks if isinstance(H, KroneckerCurvature)]
    assert set(layers) <= set(names)
    H = posterior.curvature.to_dense()
    for layer in layers.values():
        at = layer.position.flatten()
        expected = oracle.kron_block(*oracle.kronecker_factors(layer, Lambda), layer.position, len(H))
        assert_close(H[at[:, None], at], expected[at[:, None], at], max(1e-9, architecture.rtol))


def test_the_transposed_layers_of_gpt2_have_a_rule() -> None:
    architecture = next(a for a in ARCHITECTURES if a.name == "gpt2")
    _, x, _, posterior = fitted(architecture, "kron")
    names = {H.name for H in posterior.curvature.blocks if isinstance(H, KroneckerCurvature)}
    layers = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert {f"transformer.h.{i}.{layer}" for i in range(2) for layer in layers} <= names
    with posterior.linearised.trace(lw.data.as_input(x)) as trace:
        assert isinstance(trace.jacobian().blocks[0], EmbeddingBlock)  # its tokens


@pytest.mark.parametrize("architecture", TIED, ids=lambda a: a.name)
def test_a_tied_embedding_has_its_exact_block(architecture: Architecture) -> None:
    model, x, _, posterior = fitted(architecture, "kron")
    name = "transformer.wte.weight"
    assert name in posterior.linearised.rest.names and "lm_head.weight" not in posterior.layout
    f, J = oracle.jacobian(model, x)
    J = J[..., posterior.layout[name]].unflatten(1, (T, VOCABULARY))
    p = f.unflatten(1, (T, VOCABULARY)).softmax(-1)
    rows = (J - torch.einsum("ntcp,ntc->ntp", J, p)[:, :, None]) * p.sqrt()[..., None]
    rows = rows.flatten(0, 2)
    place = posterior.layout[name]
    assert_close(posterior.curvature.to_dense()[place, place], rows.T @ rows)
