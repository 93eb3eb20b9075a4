"""A likelihood defined by a user function log p(y | f)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from lapwing.errors import InputError, NumericalError, ShapeError
from lapwing.likelihoods.base import Likelihood, Sites
from lapwing.likelihoods.targets import as_tensor, check_class_axis, first_index, require_finite


@dataclass(frozen=True, init=False)
class CustomLikelihood(Likelihood):
    """log p(y | f) as a differentiable function of one term: f (C,), y one entry of the targets → scalar.

    The function is called by keyword if its parameters are named `f` and `y`, otherwise as `log_prob(f, y)`.
    r is its gradient and Λ minus its Hessian, by double backward at O(C²) cost per term. Λ is always computed in
    float64, so `log_prob` must accept f in float64.
    `psd` decides about negative eigenvalues of Λ: "raise" an error; "clip" them to zero; "fisher" replaces the Hessian
    in all cases by the mean of r rᵀ over `n_fisher` targets drawn by `sample`.
    `mean(f)` (the expected target) and `sample(f, generator)` take the outputs (..., C) of all terms at once.
    """

    term: Callable[..., Tensor]
    mean_function: Callable[[Tensor], Tensor] | None
    sampler: Callable[[Tensor, torch.Generator], Tensor] | None
    psd: Literal["raise", "clip", "fisher"]
    n_fisher: int
    class_axis: int
    canonical: bool
    by_name: bool

    def __init__(
        self,
        log_prob: Callable[..., Tensor],
        *,
        mean: Callable[[Tensor], Tensor] | None = None,
        sample: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        psd: Literal["raise", "clip", "fisher"] = "raise",
        n_fisher: int = 100,
        class_axis: int = -1,
    ) -> None:
        check_class_axis(class_axis)
        _check_options(log_prob, sample, psd, n_fisher)
        values = {"term": log_prob, "mean_function": mean, "sampler": sample, "psd": psd, "n_fisher": n_fisher}
        values |= {"class_axis": class_axis, "canonical": psd == "raise", "by_name": _takes_f_and_y(log_prob)}
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor

    # --- targets -------------------------------------------------------------------------------

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Targets (n, *site_shape, ...) → (n, T, ...): one entry, of any shape, per term."""
        targets = as_tensor(y, likelihood="CustomLikelihood")
        leading = (n, *sites.site_shape)
        if tuple(targets.shape[: len(leading)]) != leading:
            raise ShapeError(
                f"CustomLikelihood needs one entry per term, targets of shape {leading} or {leading} followed by the "
                f"entry's own axes, but {tuple(targets.shape)} came. Targets are never broadcast; reshape them, "
                "or set class_axis if the outputs of a term are on another axis."
            )
        require_finite(targets, likelihood="CustomLikelihood")
        return targets.reshape(n, sites.t, *targets.shape[len(leading) :])

    # --- density -------------------------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._each_term(self._one, f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self._each_term(grad(self._one), f, y)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        if self.psd == "clip":
            S = self._root(f, y)
            return (S @ S.mT).to(f.dtype)
        # Without eigenvectors, whose derivatives do not exist where eigenvalues are equal.
        output_hessian = self._raw_hessian(f.double(), y.double() if y.is_floating_point() else y)
        if self.psd == "raise":
            _refuse_negative(torch.linalg.eigvalsh(output_hessian.detach()))
        return output_hessian.to(f.dtype)

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        return self._root(f, y).to(f.dtype)

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        if self.sampler is None:
            raise InputError(
                "CustomLikelihood was asked for targets drawn from the model, but no sampler was given. "
                "Pass CustomLikelihood(log_prob, sample=function) with function(f, generator) -> targets."
            )
        return self.sampler(f, generator)

    def mean(self, f: Tensor) -> Tensor:
        """Expected target: (..., C) → (..., *)."""
        if self.mean_function is None:
            raise InputError(
                "CustomLikelihood was asked for the expected target, but no mean was given. "
                "Pass CustomLikelihood(log_prob, mean=function) with function(f) -> expected target."
            )
        return self.mean_function(f)

    def _one(self, f: Tensor, y: Tensor) -> Tensor:
        value = self.term(f=f, y=y) if self.by_name else self.term(f, y)
        if not isinstance(value, Tensor) or value.ndim != 0:
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(
                f"CustomLikelihood needs log_prob to return a scalar tensor for one term (f of shape {tuple(f.shape)}, "
                f"y of shape {tuple(y.shape)}), but {came} came. Sum over the term's outputs, and index f[0], not f, "
                "when there is one output."
            )
        return value

    def _each_term(self, function: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
        """Apply a function of one term to all terms by vmap; y has the leading axes of f."""
        leading, c = f.shape[:-1], f.shape[-1]
        with torch.inference_mode(False):  # in inference mode torch.func returns zero derivatives (seen in torch 2.4)
            terms = vmap(function)(f.reshape(-1, c), y.reshape(-1, *y.shape[len(leading) :]))
        return terms.reshape(*leading, *terms.shape[1:])

    def _root(self, f: Tensor, y: Tensor) -> Tensor:
        """S = U √max(λ, 0), in float64: in float32, rounding makes Λ of a confident term indefinite."""
        eigenvalues, U = torch.linalg.eigh(self._raw_hessian(f.double(), y.double() if y.is_floating_point() else y))
        if self.psd == "raise":
            _refuse_negative(eigenvalues)
        return U * eigenvalues.clamp_min(0).sqrt()[..., None, :]

    def _raw_hessian(self, f: Tensor, y: Tensor) -> Tensor:
        if self.psd == "fisher":
            return self._fisher(f)
        # Reverse over reverse: forward-mode AD lacks derivatives of some functions that users may call.
        output_hessian = -self._each_term(jacrev(grad(self._one)), f, y)
        return (output_hessian + output_hessian.mT) / 2

    def _fisher(self, f: Tensor) -> Tensor:
        """Monte Carlo Fisher information, the mean of r rᵀ over drawn targets.

        Deterministic given f, so that separate calls for Λ and its root agree.
        """
        generator = torch.Generator(device=f.device).manual_seed(_seed_from(f))
        total = torch.zeros(*f.shape, f.shape[-1], dtype=f.dtype, device=f.device)
        for _ in range(self.n_fisher):
            r = self.residual(f, self.sample(f, generator=generator))
            total = total + r[..., :, None] * r[..., None, :]
        return total / self.n_fisher


def _refuse_negative(eigenvalues: Tensor) -> None:
    """Raise for an eigenvalue below −1e-8 λ_max, unless it is within the rounding error of a confident term."""
    smallest, largest = eigenvalues[..., 0], eigenvalues.abs().amax(-1)
    rounding = 16 * (eigenvalues.shape[-1] + 3) * torch.finfo(eigenvalues.dtype).eps
    bad = ~(smallest >= -(1e-8 * largest + rounding))
    if bool(bad.any()):
        index = first_index(bad)
        raise NumericalError(
            f"CustomLikelihood: minus the Hessian of log_prob at term {index} has eigenvalue "
            f"{smallest[index].item():.6g} (largest magnitude {largest[index].item():.6g}), so it is not positive "
            "semi-definite. log_prob is not concave in f there: use psd='clip', or psd='fisher' with a sampler."
        )


def _seed_from(f: Tensor) -> int:
    """A seed that depends on f: with a fixed seed all batches would share the same noise, and its errors add up."""
    # The bits of the sum as an integer; manual_seed accepts non-negative numbers.
    return int(f.detach().double().sum().cpu().view(torch.int64)) & (2**62 - 1)


def _takes_f_and_y(function: Callable[..., Tensor]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in callables have no signature
        return False
    kinds = {parameters[name].kind for name in ("f", "y") if name in parameters}
    return {"f", "y"} <= set(parameters) and inspect.Parameter.POSITIONAL_ONLY not in kinds


def _check_options(log_prob: object, sample: object, psd: str, n_fisher: int) -> None:
    if not callable(log_prob):
        raise InputError(f"CustomLikelihood needs a function log_prob(f, y), but {type(log_prob).__name__} came.")
    if psd not in ("raise", "clip", "fisher"):
        raise InputError(f"CustomLikelihood knows psd='raise', 'clip' and 'fisher', but {psd!r} came.")
    if psd == "fisher" and sample is None:
        raise InputError(
            "CustomLikelihood with psd='fisher' averages over drawn targets, but no sampler was given. "
            "Pass sample=function with function(f, generator) -> targets, or use psd='clip'."
        )
    if n_fisher < 1:
        raise InputError(f"CustomLikelihood needs n_fisher to be 1 or more, but {n_fisher} came.")
