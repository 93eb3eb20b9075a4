"""Reference rows of the Jacobian for the rule check: reverse-mode AD of each datum alone, at perturbed weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError, ModelError
from lapwing.network.linearised import Linearised, pull_back

_PERIOD = 65_537  # of repeated random numbers: a prime, so that it divides no axis of a tensor

T = TypeVar("T", int, Tensor)


@dataclass(frozen=True, eq=False)
class Projections:
    """Reference values: rows of J by reverse-mode AD for a random combination of outputs of each datum.

    Rows are compared through their inner product with one random direction per tensor. Different rows agree there with
    probability zero, and full rows are not stored. Rules are evaluated for two combinations (columns) at once, as a fit
    uses several; datum i is compared in column i mod 2.
    """

    directions: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    cotangents: Float[Tensor, "n k 2"]
    values: Mapping[str, Float[Tensor, " n"]]
    norms: Mapping[str, Float[Tensor, " n"]]

    def agree(self, name: str, found: Float[Tensor, "n 2"], beside: Sequence[str] = ()) -> bool:
        """Whether rows agree, relative to the tensor's gradient and the rounding of other tensors of the module.

        The gradient of a bias may be exactly zero (the key bias of attention): what is computed is rounding error, of
        the size of the gradients of the module's other tensors (`beside`).
        """
        dtype = self.dtypes[name]
        rounding = sum((self.norms[other] for other in beside), torch.full_like(self.norms[name], 1e-30))
        slack = min(100 * torch.finfo(dtype).eps, tolerance(dtype) / 10)  # in half precision eps is large
        allowed = tolerance(dtype) * self.norms[name] + slack * rounding
        data = torch.arange(len(found))
        return bool(((found[data, _column(data)].double() - self.values[name]).abs() <= allowed).all())


def _column(datum: T) -> T:
    return datum % 2


def perturbed(linearised: Linearised) -> tuple[Linearised, Directions]:
    """The network at weights perturbed by 10 % of their size, and the random directions of the perturbation."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(linearised.network.tensors)
    directions = Directions({}, linearised.network.tensors)
    for name in linearised.layout.names:
        old = tensors[name]
        # The constant 0.1 moves zero tensors too: at zero weights a wrong rule may give correct zeros.
        directions.drawn[name] = _random(old.numel(), generator)
        size = float(old.norm(dtype=torch.promote_types(old.dtype, torch.float32))) / old.numel() ** 0.5
        tensors[name] = torch.add(old, directions[name], alpha=0.1 * (size + 0.1))
    return replace(linearised, network=replace(linearised.network, tensors=tensors)), directions


@dataclass(frozen=True, eq=False)
class Directions(Mapping[str, Tensor]):
    """A random direction per tensor, expanded on access: all of them together would take the memory of the network."""

    drawn: dict[str, Tensor]
    like: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        drawn, like = self.drawn[name], self.like[name]
        size = like.numel()
        whole = drawn.to(like).repeat(-(-size // _PERIOD))[:size] if size > _PERIOD else drawn.to(like)
        return whole.reshape(like.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn)


def _random(size: int, generator: torch.Generator) -> Float[Tensor, " _"]:
    """Random numbers of unit variance, at most `_PERIOD` of them: drawing all takes longer than a forward pass."""
    return torch.empty(min(size, _PERIOD), dtype=torch.float32).uniform_(-1.7, 1.7, generator=generator)


def true_projections(linearised: Linearised, few: ModelInput, directions: Mapping[str, Tensor]) -> Projections:
    names = linearised.layout.names
    with torch.no_grad():
        together = linearised.flat(linearised.network(few, {}), few.n)
    generator = torch.Generator().manual_seed(1)
    cotangents = torch.randn(few.n, linearised.k, 2, generator=generator, dtype=torch.float64).to(together)
    leaves = {name: linearised.network.tensors[name].detach().requires_grad_() for name in names}
    values, norms = (torch.zeros(len(names), few.n, dtype=torch.float64) for _ in range(2))
    alone = torch.empty_like(together)
    for i in range(few.n):
        f = _output_alone(linearised, few, i, leaves)
        alone[i] = f.detach()
        for k, row in enumerate(pull_back(f, list(leaves.values()), cotangents[i, :, _column(i)])):
            values[k, i] = _product(row, directions[names[k]])
            norms[k, i] = float(row.norm())
    _check_rows_independent(together, alone)
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    return Projections(
        directions, dtypes, cotangents, dict(zip(names, values, strict=True)), dict(zip(names, norms, strict=True))
    )


def _output_alone(linearised: Linearised, few: ModelInput, i: int, leaves: Mapping[str, Tensor]) -> Float[Tensor, " k"]:
    try:
        return linearised.flat(linearised.network(few.rows(slice(i, i + 1)), leaves), 1)[0]
    except ModelError as error:
        raise InputError(
            f"The model takes {few.n} rows but not one alone, so rows depend on the other rows in the batch: {error} "
            "Usual cause: BatchNorm with track_running_stats=False."
        ) from error.__cause__


def _check_rows_independent(together: Float[Tensor, "n k"], alone: Float[Tensor, "n k"]) -> None:
    """Raise if the output of a datum depends on other data in the batch: then there is no Jacobian per datum."""
    worst = float((together - alone).abs().max())
    scale = float(alone.abs().max()) + 1e-6
    if worst > 50 * tolerance(together.dtype) * scale:
        raise InputError(
            f"The model's output for a datum changes by {worst:.3g} (of {scale:.3g}) when other rows are in the batch, "
            "even in eval mode, so error bars per datum are not defined. Usual causes: BatchNorm with "
            "track_running_stats=False, or a batch axis that is not the first."
        )


def _product(row: Tensor, direction: Tensor) -> float:
    if row.dtype in (torch.float16, torch.bfloat16):  # torch.dot would accumulate in half precision
        return float((row * direction).sum())
    return float(torch.dot(row.reshape(-1), direction.reshape(-1)))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 5e-2)
