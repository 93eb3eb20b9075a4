"""The loss of a batch: the model in its own mode on one side, what is asked of its weights on the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lapwing._types import Scalar, Tensor
from lapwing.api import words
from lapwing.data import Columns, ModelInput, pair_of
from lapwing.data.targets import encode_batch
from lapwing.errors import InputError, InputTypeError, NumericalError, ShapeError, located
from lapwing.likelihoods import Likelihood
from lapwing.network.agreement import refuse_sharded
from lapwing.network.module import called, check_module, placed, unwrapped
from lapwing.network.parameters import ParamLayout
from lapwing.priors import GaussianPrior
from lapwing.runtime.arguments import counted, positive_scale, seeded
from lapwing.runtime.sandbox import random_state_kept
from lapwing.subnetwork import Subnetwork
from lapwing.train.first_look import FirstLook
from lapwing.train.fisher import Outputs
from lapwing.train.kernels import refuse_autocast, twice_differentiable
from lapwing.train.noise import at_noise, learned_noise, start_from, starting_noise
from lapwing.train.priors import training_prior

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


class BatchLoss(nn.Module, ABC):
    """A loss per datum that sums over batches: called with one, it returns a scalar to go back from.

    It holds the model, whose parameters are trained in place, and a Gaussian prior over those in `layout`.
    """

    twice: bool = False  # whether it differentiates gradients
    parts: Parts  # of the last batch

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        *,
        beta: float,
        prior: Any,
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
        self.n_data, self.beta = counted("n_data", n_data, "datum"), float(positive_scale("beta", beta))
        self.generator, self.columns = seeded(generator), Columns.of(inputs, targets)
        if not isinstance(likelihood, Likelihood):
            words.choose("likelihood", likelihood, {word: word for word in words.WORDS["likelihood"]})
        self.likelihood = likelihood
        self.layout = _layout(model, params, example)
        _check_tensors(model, self.layout)
        self.prior: GaussianPrior = training_prior(prior, model, self.layout)
        self.model = model
        self.log_noise = learned_noise(likelihood, self.number)
        self.register_buffer("noise_started", torch.tensor(not starting_noise(likelihood)))
        self.n_batches = 0
        self.look: FirstLook | None = None
        self.few: ModelInput | None = None

    noise_started: Tensor

    @property
    def number(self) -> Tensor:
        """An empty tensor of the dtype and on the device that vectors over the parameters have."""
        tensors = self.means()
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        return torch.empty(0, dtype=dtype, device=tensors[0].device)

    def means(self) -> list[Tensor]:
        """The inferred tensors, in the order of the layout."""
        tensors = dict(self.model.named_parameters())
        return [tensors[name] for name in self.layout.names]

    # --- the loss of a batch ---------------------------------------------------------------------

    def forward(self, x: Any, y: Any = None) -> Scalar:
        """The loss of the batch per datum, with its graph: call `backward()` on it.

        `x` and `y` as in the batches that `lw.fit` takes; or one mapping that holds the targets.
        """
        refuse_autocast(f"train.{type(self).__name__}")
        where = f"batch {self.n_batches}"
        given, targets = pair_of(x if y is None else (x, y), where, self.columns)
        with located(where):
            loss = self.of_batch(given, targets)
        self.n_batches += 1
        return loss

    def of_batch(self, x: ModelInput, y: Any) -> Scalar:
        """The same of a batch that was taken apart already."""
        self.look_at(x)
        create_graph = torch.is_grad_enabled()
        if x.n > self.n_data:
            raise InputError(
                f"n_data is {self.n_data}, but this batch alone has {x.n} data. n_data is the number of training data, "
                "of all batches: the divergence from the prior is divided by it."
            )
        with torch.enable_grad() if create_graph or self.twice else torch.no_grad(), self.one_variance():
            log_lik, penalty = self.terms(x, y, create_graph=create_graph)
            kl = self.kl() / self.n_data
        dtype = self.number.dtype
        log_lik, penalty, kl = log_lik.to(dtype) / x.n, penalty.to(dtype) / x.n, kl.to(dtype)
        self.parts = Parts(log_lik.detach(), penalty.detach(), kl.detach())
        loss = penalty - log_lik + self.beta * kl
        if not bool(torch.isfinite(loss.detach())):
            raise NumericalError(
                f"the loss is not finite ({', '.join(f'{name} {float(v):.4g}' for name, v in self.parts.items())}). "
                "The weights are those of the last good step. Lower the learning rate, clip gradients, or check the "
                "scale of the inputs and targets."
            )
        return loss if create_graph else loss.detach()

    @abstractmethod
    def terms(self, x: ModelInput, y: Any, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        """Σ log p(y | ·) and the penalty, over the batch."""

    def one_variance(self) -> AbstractContextManager[None]:
        """Where there are variances, they are worked out once for a batch."""
        return nullcontext()

    @abstractmethod
    def kl(self) -> Scalar:
        """What is asked of the weights whatever the data: KL(q ‖ prior), or −log of the prior's density."""

    def observed(self, x: ModelInput, y: Any) -> Outputs:
        """One forward pass of the model in its own mode, and the targets as the likelihood sees them.

        Targets are checked first: a forward pass may move running statistics.
        """
        assert self.look is not None
        tensors, sites = self.means(), self.look.sites_of(y)
        x, encoded = encode_batch(x, y, self.look.family, sites)
        dtypes = {t.dtype for t in tensors}
        with twice_differentiable(self.model, attends=self.look.attends and self.twice):
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
        return Outputs(raw, f, encoded, self.family, sites)

    def check_targets(self, x: ModelInput, y: Any) -> None:
        """Refuse targets of the first batch before anything runs."""
        assert self.look is not None
        with located("batch 0"):
            encode_batch(x, y, self.look.family, self.look.sites_of(y))

    @property
    def family(self) -> Likelihood:
        """The likelihood that a word meant, at the noise there is."""
        assert self.look is not None
        return at_noise(self.look.family, self.log_noise)

    def look_at(self, x: ModelInput) -> None:
        """See what the first batch shows, on a copy of the model; later ones are not looked at."""
        if self.look is None:
            with random_state_kept():
                look = FirstLook.at(self.model, x, self.likelihood)
            self.check_look(look)
            self.few = x.rows(slice(0, min(_FEW, x.n)))
            self.look = look

    def check_look(self, look: FirstLook) -> None:
        """Refuse what cannot be trained with; on the first batch."""

    # --- what a loop asks for ---------------------------------------------------------------------

    def logarithms(self) -> list[nn.Parameter]:
        """The parameters that are logarithms of scales."""
        return [] if self.log_noise is None else [self.log_noise]

    def param_groups(self, lr: float, multiplier: float = 10) -> list[dict[str, Any]]:
        """Groups for an optimizer: the means at `lr`, logarithms of standard deviations at `multiplier` times it.

        None has weight decay: the prior does its work. Parameters that are not inferred are trained as well, as
        numbers; a learned noise is one of the logarithms.
        """
        lr, multiplier = float(positive_scale("lr", lr)), float(positive_scale("multiplier", multiplier))
        means = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": means, "lr": lr, "weight_decay": 0.0}]
        if self.logarithms():
            groups.append({"params": self.logarithms(), "lr": lr * multiplier, "weight_decay": 0.0})
        return groups

    def get_extra_state(self) -> Tensor:
        """Where the random draws stand."""
        return self.generator.get_state()

    def set_extra_state(self, state: Any) -> None:
        self.generator.set_state(state.cpu())


def _check_tensors(model: nn.Module, layout: ParamLayout) -> None:
    tensors = dict(model.named_parameters())
    half = [n for n in layout.names if tensors[n].dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise InputError(
            f"Parameter '{half[0]}' has dtype {tensors[half[0]].dtype}: variances and gradients of gradients lose "
            "their digits in half precision. Train in float32: model.float()."
        )
    if len({tensors[name].device for name in layout.names}) > 1:
        raise InputError("The inferred parameters are on several devices; training needs them on one.")
    sparse = [p for p, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if sparse:
        raise InputError(
            f"Module '{sparse[0]}' has sparse gradients, but every weight of a Gaussian has a gradient in every "
            "step, from the prior. Use sparse=False."
        )


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
    x = ModelInput((), {}, 1) if example is None else example
    x = x if isinstance(x, ModelInput) else words.first_inputs(x)
    with random_state_kept():
        return choice(model, x)
