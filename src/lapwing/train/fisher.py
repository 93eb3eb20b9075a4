"""diag F of a batch, the Fisher information of the model in its parameters, in the ways it can be had.

F = Σ_n J_nᵀ Λ_n J_n with Λ = E[r rᵀ] over labels that the model itself draws. Every way gives one tensor for each
parameter tensor, with its graph: the penalty is differentiated through J, by a backward pass of a backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lapwing._types import Float, Tensor
from lapwing.curvature import Drawing, Labels, Signs
from lapwing.errors import StructureError
from lapwing.likelihoods import Likelihood, Sites

_MOST_SECOND = 20_000  # parameters whose second derivatives are taken one by one


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a batch with their graph, and what was observed there."""

    raw: Tensor  # as the model gave them
    f: Float[Tensor, "n t c"]
    y: Tensor  # encoded
    family: Likelihood
    sites: Sites

    def log_lik(self) -> Tensor:
        """Σ log p(y | f) over the batch."""
        return self.family.log_prob(self.f, self.y).sum()

    def pulled_back(
        self, cotangent: Float[Tensor, "n t c"], tensors: Sequence[Tensor], *, create_graph: bool
    ) -> list[Tensor]:
        """Σ_n J_nᵀ u_n for each parameter tensor; zero where it has no part in these outputs."""
        u = self.sites.join(cotangent).reshape(self.raw.shape).to(self.raw.dtype)
        rows = torch.autograd.grad(
            self.raw, tensors, u, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return [torch.zeros_like(t) if row is None else row for t, row in zip(tensors, rows, strict=True)]


class FisherDiagonal(ABC):
    """A way to diag F."""

    trains: bool = True  # whether an ascent with it has an end

    @abstractmethod
    def of(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> list[Tensor]:
        """One tensor for each of the parameter tensors, summed over the data of the batch."""

    def weighted(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        variances: Sequence[Float[Tensor, " _"]],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> Tensor:
        """Σ_l σ_l² F_ll, σ² flat for each tensor."""
        F = self.of(outputs, tensors, draws=draws, generator=generator, create_graph=create_graph)
        return torch.stack([torch.dot(v, f.reshape(-1).to(v)) for v, f in zip(variances, F, strict=True)]).sum()


@dataclass(frozen=True)
class Drawn(FisherDiagonal):
    """(Σ_n J_nᵀ r_n)², r with mean zero and E[r rᵀ] = Λ: the data's cross terms vanish in expectation.

    With labels drawn from the model, one backward pass a draw: the paper's. They are held fixed in the gradient, which
    leaves out how the distribution of labels moves with the means. `Signs` stand for r = S z, which has the same
    expectation and is differentiated through S too.
    """

    drawing: Drawing

    def of(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> list[Tensor]:
        rows = [self._rows(outputs, tensors, generator, create_graph) for _ in range(draws)]
        return [torch.stack(of_tensor).square().mean(0) for of_tensor in zip(*rows, strict=True)]

    def weighted(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        variances: Sequence[Float[Tensor, " _"]],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=variances[0].dtype, device=variances[0].device)
        for _ in range(draws):
            rows = self._rows(outputs, tensors, generator, create_graph)
            for v, g in zip(variances, rows, strict=True):
                total = total + _weighted_square(v, g.reshape(-1).to(v))
        return total / draws

    def _rows(
        self, outputs: Outputs, tensors: Sequence[Tensor], generator: torch.Generator, create_graph: bool
    ) -> list[Tensor]:
        return outputs.pulled_back(self._drawn(outputs, generator), tensors, create_graph=create_graph)

    def _drawn(self, outputs: Outputs, generator: torch.Generator) -> Float[Tensor, "n t c"]:
        """r = Σ_g √c_g r_g over the levels of dispersion, whose draws are independent."""
        family, f = outputs.family, outputs.f
        parts = self.drawing.drawn(family, f, outputs.y, generator)
        roots = family.part_scales().to(f).sqrt()
        return sum((root * part for root, part in zip(roots, parts, strict=True)), torch.zeros_like(f))


@dataclass(frozen=True)
class ExactDiagonal(FisherDiagonal):
    """diag Σ_n J_nᵀ Λ_n J_n, through the probabilities in Λ too: one backward pass for every output of every datum."""

    def of(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> list[Tensor]:
        total = [torch.zeros_like(tensor) for tensor in tensors]
        output_hessian = outputs.family.hessian(outputs.f, outputs.y)
        for (n, t), rows in _rows_of_terms(outputs, tensors, create_graph=create_graph):
            Lambda = output_hessian[n, t].to(total[0].dtype)
            for i, J in enumerate(rows):
                total[i] = total[i] + torch.einsum("cd,c...,d...->...", Lambda, J, J)
        return total


@dataclass(frozen=True)
class SecondDerivatives(FisherDiagonal):
    """diag −∇² log p(y | f): the Hessian of section 4.1 of the paper, which no bound keeps positive.

    Where an entry is negative the objective falls for ever as the variance grows, so nothing can be trained with it.
    """

    trains = False

    def of(
        self,
        outputs: Outputs,
        tensors: Sequence[Tensor],
        *,
        draws: int,
        generator: torch.Generator,
        create_graph: bool,
    ) -> list[Tensor]:
        n = sum(tensor.numel() for tensor in tensors)
        if n > _MOST_SECOND:
            raise StructureError(
                f'fisher="hessian" takes a backward pass for each of {n:,} parameters; it is refused above '
                f"{_MOST_SECOND:,}. It is there to be looked at on a small network."
            )
        gradients = torch.autograd.grad(outputs.log_lik(), tensors, create_graph=True, allow_unused=True)
        return [_own_derivatives(g, tensor) for g, tensor in zip(gradients, tensors, strict=True)]


def _own_derivatives(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    """−∂g_i/∂w_i for every entry."""
    found = torch.zeros_like(tensor)
    if gradient is None or not gradient.requires_grad:
        return found
    for i, entry in enumerate(gradient.flatten()):
        (row,) = torch.autograd.grad(entry, tensor, retain_graph=True, allow_unused=True)
        if row is not None:
            found.view(-1)[i] = -row.flatten()[i]
    return found


def _rows_of_terms(
    outputs: Outputs, tensors: Sequence[Tensor], *, create_graph: bool
) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """((n, t), ∂f_ntc/∂w stacked over c for each tensor) for every likelihood term."""
    n_data, n_terms, n_outputs = outputs.f.shape
    for n in range(n_data):
        for t in range(n_terms):
            rows = []
            for c in range(n_outputs):
                unit = torch.zeros_like(outputs.f)
                unit[n, t, c] = 1
                rows.append(outputs.pulled_back(unit, tensors, create_graph=create_graph))
            yield (n, t), [torch.stack(of_tensor) for of_tensor in zip(*rows, strict=True)]


class _WeightedSquare(torch.autograd.Function):
    """Σ v g², with gradients 2 v g and g² in three passes; autograd takes six."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor) -> Tensor:
        product = v * g
        ctx.save_for_backward(product, g)
        return torch.dot(product, g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> tuple[Tensor, Tensor]:
        product, g = ctx.saved_tensors
        return (c * g).mul_(g), (2 * c) * product


def _weighted_square(v: Float[Tensor, " p"], g: Float[Tensor, " p"]) -> Tensor:
    return _WeightedSquare.apply(v, g)


FISHERS: dict[str, FisherDiagonal] = {
    "sampled": Drawn(Labels()),
    "pathwise": Drawn(Signs()),
    "exact": ExactDiagonal(),
    "hessian": SecondDerivatives(),
}
