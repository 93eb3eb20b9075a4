"""GaussianPrior: θ ~ N(m₀, P₀⁻¹) with P₀ diagonal, one precision per group of parameters.

Isotropic, layerwise, per-tensor and elementwise priors differ only in their groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.errors import InputError, InputTypeError, ShapeError
from lapwing.network.parameters import ParamLayout
from lapwing.operators import GroupedDiagonal, one_group

_SHOWN = 5  # groups shown by `repr`


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPrior:
    """θ ~ N(m₀, P₀⁻¹), P₀ = diag(δ[index]), with precisions δ_g > 0 of named groups; `index` is the group of each
    parameter."""

    layout: ParamLayout
    precisions: Float[Tensor, " g"]
    group_names: tuple[str, ...]
    index: Int[Tensor, " p"]
    mean: Float[Tensor, " ..."]  # () or (P,)
    reasons: tuple[str, ...] = ()  # one sentence per group, if the groups were detected and not requested by name

    def __post_init__(self) -> None:
        if len(self.precisions) != len(self.group_names):
            raise ShapeError(
                f"The prior has {len(self.group_names)} groups but {len(self.precisions)} precisions were given. "
                f"Give one number, or one per group, in this order: {', '.join(self.group_names[:8])}."
            )
        values = self.precisions.detach()
        if not bool(torch.isfinite(values).all()) or bool((values <= 0).any()):
            bad = int(((values <= 0) | ~torch.isfinite(values)).nonzero()[0])
            raise InputError(
                f"Prior precisions must be positive and finite; group '{self.group_names[bad]}' has "
                f"{float(values[bad]):g}. A precision is 1/variance: 1.0 is a good start."
            )

    def __repr__(self) -> str:
        """The groups with their precisions; only the first `_SHOWN` of them."""
        named = zip(self.group_names, self.precisions.detach().tolist(), strict=True)
        groups = [f"{name}: {precision:.4g}" for name, precision in named]
        shown = ", ".join(groups[:_SHOWN]) + ", …" * (len(groups) > _SHOWN)
        return f"GaussianPrior over {self.layout.p:,} parameters, precision by group:\n  {shown}"

    @cached_property
    def P0(self) -> GroupedDiagonal:
        return GroupedDiagonal(self.precisions, self.index)

    def scatter(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " g"]:
        """‖θ_g − m₀‖² of each group: (G,)."""
        return self.P0.group_sums((theta - self.mean) ** 2)

    def with_precisions(self, precisions: Float[Tensor, " g"]) -> GaussianPrior:
        return replace(self, precisions=precisions)

    def restricted(self, layout: ParamLayout) -> GaussianPrior:
        """The prior on a subset of the parameters; groups without parameters in it are dropped."""
        unknown = [name for name in layout.names if name not in self.layout]
        if unknown:
            raise InputError(
                f"The prior does not cover parameter '{unknown[0]}'. Build it from the same model, with the same "
                "parameters unfrozen, as the posterior: lw.prior(model, ...)."
            )
        other = [name for name in layout.names if self.layout.shape(name) != layout.shape(name)]
        if other:
            raise ShapeError(
                f"The prior is of another model: its parameter '{other[0]}' has shape {self.layout.shape(other[0])}, "
                f"the posterior's {layout.shape(other[0])}. Build it from the same model: lw.prior(model, ...)."
            )
        if layout == self.layout:
            return self
        if not layout.p:
            return replace(
                self, layout=layout, index=self.index[:0], mean=self.mean[:0] if self.mean.ndim else self.mean
            )
        columns = layout.places_in(self.layout)
        if bool((columns < 0).any()):
            name = next(n for n in layout.names if bool((columns[layout[n]] < 0).any()))
            raise InputError(
                f"The prior does not cover all inferred entries of '{name}'. Build it from the model, "
                "lw.prior(model, ...), not from another subnetwork."
            )
        present, index = self.index[columns.to(self.index.device)].unique(return_inverse=True)
        return GaussianPrior(
            layout,
            self.precisions[present],
            tuple(self.group_names[int(g)] for g in present),
            index,
            self.mean[columns] if self.mean.ndim else self.mean,
            tuple(self.reasons[int(g)] for g in present) if self.reasons else (),
        )

    def on(self, device: torch.device) -> GaussianPrior:
        return replace(
            self, precisions=self.precisions.to(device), index=self.index.to(device), mean=self.mean.to(device)
        )


def as_prior(prior: Any, layout: ParamLayout) -> GaussianPrior:
    """The prior over a layout, from a single precision or a `GaussianPrior` of the same model."""
    if isinstance(prior, GaussianPrior):
        return prior.restricted(layout)
    if isinstance(prior, torch.Tensor) and prior.ndim == 0:
        return isotropic(layout, prior)
    if isinstance(prior, bool) or not isinstance(prior, int | float):
        raise InputTypeError(
            f"prior: expected a precision (one number) or lw.prior(model, ...), got {type(prior).__name__}."
        )
    return isotropic(layout, float(prior))


def isotropic(layout: ParamLayout, precision: Any = 1.0, mean: Any = 0.0) -> GaussianPrior:
    """One precision for all parameters."""
    return _grouped(layout, ("all",), one_group(layout.p), precision, mean)


def layerwise(layout: ParamLayout, precision: Any = 1.0, mean: Any = 0.0) -> GaussianPrior:
    """One precision per module that holds parameters directly: weight and bias share it."""
    names = tuple(path or "(model)" for path in layout.modules)
    sizes = [s.stop - s.start for s in layout.module_slices.values()]
    return _grouped(layout, names, _runs(sizes), precision, mean)


def tensorwise(layout: ParamLayout, precision: Any = 1.0, mean: Any = 0.0) -> GaussianPrior:
    """One precision per parameter tensor."""
    sizes = [layout[name].stop - layout[name].start for name in layout.names]
    return _grouped(layout, layout.names, _runs(sizes), precision, mean)


def elementwise(layout: ParamLayout, precision: Any = 1.0, mean: Any = 0.0) -> GaussianPrior:
    """One precision per single parameter (automatic relevance determination)."""
    names = tuple(f"{name}[{i}]" for name in layout.names for i in layout.entries(name).tolist())
    return _grouped(layout, names, torch.arange(layout.p), precision, mean)


def tensors_together(
    layout: ParamLayout,
    groups: Mapping[str, Sequence[str]],
    precision: Any = 1.0,
    mean: Any = 0.0,
    *,
    reasons: tuple[str, ...] = (),
) -> GaussianPrior:
    """One precision per named set of tensors. The sets partition the tensors of the layout."""
    # Group per tensor, repeated for each of its entries: no loop over parameters.
    group_of = {tensor: g for g, tensors in enumerate(groups.values()) for tensor in tensors}
    sizes = torch.tensor([layout[name].stop - layout[name].start for name in layout.names])
    index = torch.repeat_interleave(torch.tensor([group_of[name] for name in layout.names]), sizes)
    return replace(_grouped(layout, tuple(groups), index, precision, mean), reasons=reasons)


def regrouped(prior: GaussianPrior, fresh: GaussianPrior) -> GaussianPrior:
    """`prior` with the groups of `fresh`; a new group gets the geometric mean of its parameters' precisions."""
    # Precisions act on a log scale: the geometric mean keeps log det P₀.
    logs = fresh.P0.group_sums(prior.P0.diagonal.detach().log()) / fresh.P0.sizes
    return replace(fresh, precisions=logs.exp(), mean=prior.mean)


def _grouped(layout: ParamLayout, names: tuple[str, ...], index: Tensor, precision: Any, mean: Any) -> GaussianPrior:
    return GaussianPrior(layout, _precisions(precision, names), names, index, _mean(mean, layout))


def _runs(sizes: list[int]) -> Int[Tensor, " p"]:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _precisions(precision: Any, names: tuple[str, ...]) -> Float[Tensor, " g"]:
    """Precisions from one number, one number per group, or a mapping from group name; differentiable."""
    if isinstance(precision, Mapping):
        missing = [n for n in names if n not in precision] + [n for n in precision if n not in names]
        if missing:
            raise InputError(
                f"precision: group '{missing[0]}' is missing or unknown; the groups are {', '.join(names[:8])}."
            )
        precision = [precision[name] for name in names]
    values = _numbers("precision", precision)
    if values.ndim > 1:
        raise ShapeError(f"precision: expected one number, or one per group, got shape {tuple(values.shape)}.")
    return values.expand(len(names)) if values.ndim == 0 else values


def _mean(mean: Any, layout: ParamLayout) -> Float[Tensor, ...]:
    """The prior mean from a number, a flat vector, or named tensors such as a state dict."""
    if isinstance(mean, Mapping):
        absent = [name for name in layout.names if name not in mean]
        if absent:
            raise InputError(f"mean: no entry for parameter '{absent[0]}'.")
        for name in layout.names:
            if tuple(mean[name].shape) != layout.shape(name):
                raise ShapeError(f"mean: '{name}' has shape {tuple(mean[name].shape)}, expected {layout.shape(name)}.")
        mean = layout.ravel({name: mean[name].detach().to(torch.float64) for name in layout.names})
    value = _numbers("mean", mean).detach()
    if value.ndim and tuple(value.shape) != (layout.p,):
        raise ShapeError(f"mean: expected a number or {layout.p} values, got shape {tuple(value.shape)}.")
    if not bool(torch.isfinite(value).all()):
        raise InputError("mean: the prior mean must be finite.")
    return value


def _numbers(argument: str, value: Any) -> Tensor:
    """Convert to float64; keeps the graph of a tensor that requires grad."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(f"{argument}: expected a number, or a list or tensor of numbers, got {value!r}.") from None
