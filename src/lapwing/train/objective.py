"""What the objectives share: the model's own parameters as means, log standard deviations beside them, one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Scalar, Tensor
from lapwing.api import words
from lapwing.data import Batches, Columns, ModelInput, as_batches, pair_of
from lapwing.data.targets import encode_batch
from lapwing.errors import InputError, InputTypeError, NumericalError, ShapeError, located
from lapwing.likelihoods import Likelihood
from lapwing.linear_model import Elbo
from lapwing.network.agreement import refuse_sharded
from lapwing.network.module import called, check_module, placed, unwrapped
from lapwing.network.parameters import ParamLayout
from lapwing.posterior import Posterior, Trained
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import counted, positive_scale, seeded
from lapwing.runtime.sandbox import borrowed, plain_tensors, random_state_kept
from lapwing.subnetwork import Subnetwork
from lapwing.train.divergence import divergence
from lapwing.train.first_look import FirstLook
from lapwing.train.fisher import Outputs
from lapwing.train.kernels import refuse_autocast, twice_differentiable
from lapwing.train.noise import at_noise, learned_noise, start_from, starting_noise
from lapwing.train.priors import training_prior
from lapwing.train.result import Result, posterior_of

_START = -3.0  # log σ − log s
_NEAR = 0.1  # of a logarithm
_FEW = 3  # data that are kept of the first batch, to linearise the network with


@dataclass(frozen=True, eq=False)
class Parts(Mapping[str, Tensor]):
    """The loss of a batch, −log_lik + penalty + β kl, by its terms: per datum, without a graph."""

    log_lik: Tensor
    penalty: Tensor
    kl: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in ("log_lik", "penalty", "kl"):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(("log_lik", "penalty", "kl"))

    def __len__(self) -> int:
        return 3


class Objective(nn.Module, ABC):
    """−ELBO of a batch per datum, for q(w) = Π N(μ_l, σ_l²): the means are the model's parameters, trained in place."""

    by: str
    predictive: str
    n_predicted: int
    twice: bool  # whether it differentiates gradients
    bound_draws: int = 1  # that the bound takes at least

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        *,
        beta: float,
        prior: Any,
        draws: int,
        params: Any,
        generator: torch.Generator | None,
        inputs: Any,
        targets: Any,
        example: Any,
    ) -> None:
        super().__init__()
        check_module(f"train.{type(self).__name__}", model)
        model = unwrapped(model)
        refuse_sharded(model)
        self.n_data, self.draws = counted("n_data", n_data, "datum"), counted("draws", draws)
        self.beta = float(positive_scale("beta", beta))
        self.generator, self.columns = seeded(generator), Columns.of(inputs, targets)
        if not isinstance(likelihood, Likelihood):
            words.choose("likelihood", likelihood, {word: word for word in words.WORDS["likelihood"]})
        self.likelihood = likelihood
        self.layout = _layout(model, params, example)
        self._check_tensors(model)
        self.prior: GaussianPrior = training_prior(prior, model, self.layout)
        self.model = model
        self._add_parameters()
        self.n_batches, self.parts = 0, None  # type: ignore[assignment]
        self._look: FirstLook | None = None
        self._few: ModelInput | None = None

    parts: Parts
    log_std: nn.Parameter
    prior_std: Tensor
    prior_mean: Tensor
    noise_started: Tensor

    def _add_parameters(self) -> None:
        first = self._means()[0]
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in self._means()) else torch.float32
        like = torch.empty(0, dtype=dtype, device=first.device)
        std = self.prior.P0.diagonal.detach().rsqrt().to(like)
        self.register_buffer("prior_std", std, persistent=False)
        self.register_buffer("prior_mean", self.prior.mean.to(like), persistent=False)
        self.log_std = nn.Parameter(std.log() + _START)
        self.log_noise = learned_noise(self.likelihood, like)
        self.register_buffer("noise_started", torch.tensor(not starting_noise(self.likelihood)))

    def _check_tensors(self, model: nn.Module) -> None:
        tensors = dict(model.named_parameters())
        half = [n for n in self.layout.names if tensors[n].dtype in (torch.float16, torch.bfloat16)]
        if half:
            raise InputError(
                f"Parameter '{half[0]}' has dtype {tensors[half[0]].dtype}: variances and gradients of gradients lose "
                "their digits in half precision. Train in float32: model.float()."
            )
        if len({tensors[name].device for name in self.layout.names}) > 1:
            raise InputError("The inferred parameters are on several devices; training needs them on one.")
        sparse = [p for p, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        if sparse:
            raise InputError(
                f"Module '{sparse[0]}' has sparse gradients, but every weight of a Gaussian has a gradient in every "
                "step, from the prior. Use sparse=False."
            )

    def _means(self) -> list[Tensor]:
        tensors = dict(self.model.named_parameters())
        return [tensors[name] for name in self.layout.names]

    # --- the loss of a batch ---------------------------------------------------------------------

    def forward(self, x: Any, y: Any = None) -> Scalar:
        """−ELBO of the batch per datum, with its graph: call `backward()` on it. `x` may be a mapping with targets."""
        refuse_autocast(f"train.{type(self).__name__}")
        where = f"batch {self.n_batches}"
        given, targets = pair_of(x if y is None else (x, y), where, self.columns)
        with located(where):
            self._first_look(given)
            parts = self._parts(given, targets, create_graph=torch.is_grad_enabled())
        loss = parts.penalty - parts.log_lik + self.beta * parts.kl
        self.parts = Parts(parts.log_lik.detach(), parts.penalty.detach(), parts.kl.detach())
        if not bool(torch.isfinite(loss.detach())):
            raise NumericalError(f"{where}: {self._infinite()}")
        self.n_batches += 1
        return loss if torch.is_grad_enabled() else loss.detach()

    def _parts(self, x: ModelInput, y: Any, *, create_graph: bool) -> Parts:
        if x.n > self.n_data:
            raise InputError(
                f"n_data is {self.n_data}, but this batch alone has {x.n} data. n_data is the number of training data, "
                "of all batches: the divergence from the prior is divided by it."
            )
        with torch.enable_grad() if create_graph or self.twice else torch.no_grad():
            log_lik, penalty = self._terms(x, y, draws=self.draws, create_graph=create_graph)
            kl = self.kl() / self.n_data
        dtype = self.log_std.dtype
        return Parts(log_lik.to(dtype) / x.n, penalty.to(dtype) / x.n, kl.to(dtype))

    @abstractmethod
    def _terms(self, x: ModelInput, y: Any, *, draws: int, create_graph: bool) -> tuple[Tensor, Tensor]:
        """Σ log p(y | ·) and the penalty, over the batch."""

    def kl(self) -> Scalar:
        """KL(q ‖ prior), float64."""
        mean = torch.cat([t.reshape(-1).to(self.log_std) for t in self._means()])
        return divergence(mean, self.log_std, self.prior_mean, self.prior_std)

    def observed(self, x: ModelInput, y: Any) -> Outputs:
        """One forward pass of the model in its own mode, and the targets as the likelihood sees them.

        Targets are checked first: a forward pass may move running statistics.
        """
        assert self._look is not None
        tensors, sites = self._means(), self._look.sites_of(y)
        x, encoded = encode_batch(x, y, self._look.family, sites)
        dtypes = {t.dtype for t in tensors}
        with twice_differentiable(self.model, attends=self._look.attends and self.twice):
            raw = called(self.model, placed(x, tensors[0].device, dtypes.pop() if len(dtypes) == 1 else None))
        if tuple(raw.shape) != (x.n, *sites.datum_shape):
            raise ShapeError(
                f"The model gave outputs of shape {tuple(raw.shape)} for {x.n} inputs; expected "
                f"{(x.n, *sites.datum_shape)}, as on the first batch and as the targets have it."
            )
        f, encoded = sites.split(raw), encoded.to(raw.device)
        if self.log_noise is not None and not bool(self.noise_started):
            start_from(self.log_noise, f.detach(), encoded)
            self.noise_started.fill_(True)
        return Outputs(raw, f, encoded, at_noise(self._look.family, self.log_noise), sites)

    def _first_look(self, x: ModelInput) -> None:
        if self._look is None:
            with random_state_kept():
                look = FirstLook.at(self.model, x, self.likelihood)
            self._check_look(look)
            self._few = x.rows(slice(0, min(_FEW, x.n)))
            self._look = look

    def _check_look(self, look: FirstLook) -> None:
        """Refuse what the objective cannot be trained with; on the first batch."""

    def _infinite(self) -> str:
        parts = ", ".join(f"{name} {float(value):.4g}" for name, value in self.parts.items())
        return (
            f"the loss is not finite ({parts}). The weights are those of the last good step. Lower the learning rate, "
            "clip gradients, or check the scale of the inputs and targets."
        )

    # --- what the user's loop asks for ------------------------------------------------------------

    def param_groups(self, lr: float, multiplier: float = 10) -> list[dict[str, Any]]:
        """Two groups for an optimizer: the means at `lr`, logarithms of standard deviations at `multiplier` times it.

        Neither has weight decay: the prior does its work. Parameters that are not inferred are trained as well, as
        numbers; a learned noise is a logarithm.
        """
        lr, multiplier = float(positive_scale("lr", lr)), float(positive_scale("multiplier", multiplier))
        means = [p for p in self.model.parameters() if p.requires_grad]
        logs = [self.log_std, *([] if self.log_noise is None else [self.log_noise])]
        return [
            {"params": means, "lr": lr, "weight_decay": 0.0},
            {"params": logs, "lr": lr * multiplier, "weight_decay": 0.0},
        ]

    @plain_tensors()
    def elbo(self, data: Any, *, beta: float | None = None) -> Float[Tensor, ""]:
        """E_q[Σ log p(y | w)] − β KL(q ‖ prior) over all data, float64; a bound on log p(D) at β = 1.

        In eval mode, leaving the model as it is. β is the objective's own unless given.
        """
        bound = self.bound(as_batches(data, columns=self.columns))
        beta = self.beta if beta is None else float(positive_scale("beta", beta))
        return torch.tensor(bound.expected_log_lik - beta * bound.kl, dtype=torch.float64)

    def bound(self, batches: Batches) -> Elbo:
        """Both terms of the bound; random draws are the same at every call."""
        state = self.generator.get_state()
        total = torch.zeros((), dtype=torch.float64)
        try:
            self.generator.manual_seed(0)
            for x, y in batches:
                self._first_look(x)
                with random_state_kept(), borrowed(self.model):
                    log_lik, penalty = self._terms(x, y, draws=max(self.draws, self.bound_draws), create_graph=False)
                total += log_lik.detach().double().cpu() - penalty.detach().double().cpu()
            with torch.no_grad():
                return Elbo(float(distributed.total(total)), float(self.kl()))
        finally:
            self.generator.set_state(state)

    def posterior(self, data: Any = None) -> Posterior:
        """N(μ, diag σ²) as an ordinary posterior of the network as it is now.

        With the training data it knows its bound on log p(D), and what was not seen yet: one pass.
        """
        batches = None if data is None else as_batches(data, columns=self.columns)
        if batches is not None:
            self._first_look(batches.first_of_all()[0])
        if self._look is None or self._few is None:
            raise InputError(
                "posterior() linearises the network at some inputs, and this objective has seen none yet. Call it on a "
                "batch first, or pass the training data: objective.posterior(data)."
            )
        family = at_noise(self._look.family, self.log_noise)
        bound = None if batches is None else self.bound(batches)
        trained = Trained(self.by, self.beta, self.predictive, self.n_predicted, *self.moved(), bound)
        log_std = self.log_std.detach()
        return posterior_of(
            Result(self.model, self._few, family, log_std, self.prior, self.n_data, self.columns, trained)
        )

    def moved(self) -> tuple[float, float]:
        """Fractions of the variances at the prior's, and where they started."""
        ratio = self.log_std.detach() - self.prior_std.log()
        return float((ratio.abs() < _NEAR).float().mean()), float(((ratio - _START).abs() < _NEAR).float().mean())

    # --- state ------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Where the random draws stand."""
        return self.generator.get_state()

    def set_extra_state(self, state: Any) -> None:
        self.generator.set_state(state.cpu())


def _layout(model: nn.Module, params: Any, example: Any) -> ParamLayout:
    if isinstance(params, Subnetwork):
        raise InputTypeError(
            "params: lw.Subnetwork(...) chooses single weights of a network that is trained already. Name whole "
            'tensors or layers: params=["head"].'
        )
    choice = words.layout_choice(params)
    if words.canonical("params", params) == "last_layer" and example is None:
        raise InputError(
            'params="last_layer": which layer is last shows on inputs only. Pass some, example=x, or name the layer: '
            'params=["head"].'
        )
    x = words.first_inputs(example) if example is not None else ModelInput((), {}, 1)
    with random_state_kept():
        return choice(model, x)
