"""Categorical likelihood: one label among C classes, softmax of C logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InputError, InputTypeError, ShapeError
from lapwing.likelihoods.base import Likelihood, Sites, random_signs
from lapwing.likelihoods.output_curvature import OutputCurvature, Softmax, complement
from lapwing.likelihoods.targets import as_tensor, check_class_axis, first_index, in_shape


@dataclass(frozen=True)
class Categorical(Likelihood):
    """log p(y | f) = w_y (f_y − logsumexp f),  r = w_y (e_y − p),  Λ = w_y (diag p − p pᵀ),  p = softmax f.

    `weight` holds a non-negative w per class that multiplies the terms with that label; unlike in
    `torch.nn.CrossEntropyLoss` there is no division by Σ w. For terms labelled `ignore_index` the log density, residual
    and curvature are zero.
    """

    weight: Sequence[float] | Tensor | None = None
    ignore_index: int = -100
    class_axis: int = -1
    averages_functions = True

    def __post_init__(self) -> None:
        check_class_axis(self.class_axis)
        if self.weight is not None:
            object.__setattr__(self, "weight", _checked_weight(self.weight))

    # --- targets -------------------------------------------------------------------------------

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Integer labels (n, *site_shape) → (n, T), long."""
        self._check_classes(sites.c)
        labels = as_tensor(y, likelihood="Categorical")
        self._check_kind(labels, sites, n)
        meaning = f"one integer label per term of {sites.c} logits"
        advice = self._axis_advice(labels, sites, n)
        labels = in_shape(labels, (n, *sites.site_shape), likelihood="Categorical", meaning=meaning, advice=advice)
        labels = labels.long()
        self._check_range(labels, sites.c)
        return labels.reshape(n, sites.t)

    def _check_classes(self, c: int) -> None:
        if c < 2:
            raise ShapeError(
                f"Categorical needs at least 2 logits per term, but the model gives {c}. "
                "For one logit and 0/1 labels use Bernoulli(); check class_axis if the classes are on another axis."
            )
        if self.weight is not None and len(self.weight) != c:
            raise ShapeError(
                f"Categorical needs one weight per class: {c} of them, but {len(self.weight)} came. "
                "Give a weight for every logit, or weight=None."
            )

    def _check_kind(self, labels: Tensor, sites: Sites, n: int) -> None:
        if tuple(labels.shape) == (n, *sites.datum_shape):
            raise ShapeError(
                f"Categorical needs integer labels of shape {(n, *sites.site_shape)}, but the targets have the shape "
                f"of the outputs, {tuple(labels.shape)}: one-hot labels or probabilities. "
                f"Use y.argmax({self.class_axis}) for one-hot labels, or Bernoulli() for several labels at once."
            )
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise InputTypeError(
                f"Categorical needs integer labels in [0, {sites.c}), but {labels.dtype} came. "
                "Use y.long() if these are class numbers, or Gaussian() if they are real values."
            )

    def _axis_advice(self, labels: Tensor, sites: Sites, n: int) -> str:
        """Suggest another class axis if the labels match the outputs with that one, as in segmentation."""
        for axis in (1, -1):
            other = Sites(sites.datum_shape, axis)
            if other.axis == sites.axis or tuple(labels.shape) != (n, *other.site_shape):
                continue
            outputs = f"the outputs (B, {', '.join(map(str, sites.datum_shape))}) fit them"
            if other.c == 1:
                return f"{outputs} as one logit per label: lw.Bernoulli() with targets y.unsqueeze({axis})"
            return f"{outputs} with the {other.c} classes on axis {axis}: lw.Categorical(class_axis={axis})"
        return ""

    def _check_range(self, labels: Tensor, c: int) -> None:
        outside = ((labels < 0) | (labels >= c)) & (labels != self.ignore_index)
        if bool(outside.any()):
            index = first_index(outside)
            raise InputError(
                f"Categorical needs labels in [0, {c}) or ignore_index={self.ignore_index}, "
                f"but label {index} is {int(labels[index])}. Classes are counted from 0; "
                "set ignore_index if this label means 'not labelled'."
            )

    # --- density -------------------------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        w = self.term_weight(f, y)
        label = torch.where(y == self.ignore_index, 0, y)[..., None]
        log_p = torch.log_softmax(f, -1).gather(-1, label)[..., 0]
        # `where` in addition to the product: 0 · (−inf) of a masked logit would be NaN.
        return torch.where(w > 0, w * log_p, 0.0)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.term_weight(f, y)[..., None] * _label_residual(f, y)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        eye = torch.eye(p.shape[-1], dtype=torch.bool, device=p.device)
        output_hessian = torch.where(eye, torch.diag_embed(p * complement(p)), -p[..., :, None] * p[..., None, :])
        return self.term_weight(f, y)[..., None, None] * output_hessian

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S = √w_y L with L Lᵀ = diag p − p pᵀ: (..., C, C − 1). Λ has rank C − 1, so S needs one column less than C.

        L is the Cholesky factor in closed form. With the tail sums q_j = Σ_{k>j} p_k,
        L_jj = √(p_j q_j / q_{j−1}) and L_ij = −(p_i / q_j) L_jj for i > j. The last column is zero and omitted.
        """
        p = torch.softmax(f, -1)
        tail = p.flip(-1).cumsum(-1).flip(-1)  # q_{j−1} as sums of positive terms; 1 − cumsum(p) would cancel
        before, after = tail[..., :-1], tail[..., 1:]
        diagonal = _ratio(p[..., :-1] * after, before).sqrt()
        below = -_ratio(p[..., :, None], after[..., None, :]) * diagonal[..., None, :]
        row, column = (
            torch.arange(p.shape[-1], device=p.device)[:, None],
            torch.arange(p.shape[-1] - 1, device=p.device),
        )
        L = torch.where(row > column, below, torch.where(row == column, diagonal[..., None, :], 0.0))
        return self.term_weight(f, y).sqrt()[..., None, None] * L

    def hessian_mv(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """w_y (p ∘ v − p (p · v)) in O(C), without the C × C matrix."""
        p = torch.softmax(f, -1)
        centred = v - (p * v).sum(-1, keepdim=True)
        return self.term_weight(f, y)[..., None] * p * centred

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        return [Softmax(f, self.term_weight(f, y))]

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        """Labels from the softmax. Class weights belong to the loss, not to the model, and do not enter."""
        p = torch.softmax(f, -1).reshape(-1, f.shape[-1]).to(generator.device)
        labels = torch.multinomial(p, 1, generator=generator)
        return labels.reshape(f.shape[:-1]).to(f.device)

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        # E[r rᵀ] = w_y (diag p − p pᵀ) has the weight of the *observed* label y, so it stays outside the expectation.
        drawn = _label_residual(f, self.sample(f.detach(), generator=generator))
        return [self.term_weight(f, y).sqrt()[..., None] * drawn]

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """√w_y R z with the root R = diag √p − p √pᵀ of diag p − p pᵀ, in O(C) instead of O(C²).

        (R z)_c = √p_c z_c (1 − p_c) − p_c Σ_{k≠c} √p_k z_k, a form without cancellation when p_c is close to one.
        """
        p = torch.softmax(f, -1)
        root = (torch.log_softmax(f, -1) / 2).exp()  # √p, with a derivative where p has underflown to 0
        u = root * random_signs(p, generator)
        return [self.term_weight(f, y).sqrt()[..., None] * (u * complement(p) - p * _sum_of_others(p, u))]

    def term_weight(self, f: Tensor, y: Tensor) -> Tensor:
        """w_y, zero for ignored terms: (...)."""
        counted = y != self.ignore_index
        if self.weight is None:
            return counted.to(f.dtype)
        weight = torch.as_tensor(self.weight, dtype=f.dtype, device=f.device)
        return torch.where(counted, weight[torch.where(counted, y, 0)], 0.0)


def _label_residual(f: Tensor, y: Tensor) -> Tensor:
    """e_y − p: (..., C). The entry of the label is Σ_{k≠y} p_k, as 1 − p_y cancels when p_y is close to one.

    Values at ignored labels are arbitrary; the caller multiplies them by zero.
    """
    label = torch.where((y >= 0) & (y < f.shape[-1]), y, 0)[..., None]
    others = torch.softmax(f, -1).scatter(-1, label, 0.0)
    return others.neg().scatter(-1, label, others.sum(-1, keepdim=True))


def _sum_of_others(p: Tensor, u: Tensor) -> Tensor:
    """Σ_{k≠c} u_k for every c."""
    # Total minus u_c cancels for the most probable class, whose u dominates: sum the others directly there.
    largest = p.argmax(-1, keepdim=True)
    small = u.scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    return (small + u.gather(-1, largest) - u).scatter(-1, largest, small)


def _checked_weight(weight: Sequence[float] | Tensor) -> tuple[float, ...]:
    values = torch.as_tensor(weight, dtype=torch.float64).detach()
    if values.ndim != 1:
        raise ShapeError(f"Categorical needs weights of shape (C,), one per class, but {tuple(values.shape)} came.")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise InputError(
            f"Categorical needs finite weights that are zero or more, but {values.tolist()} came. "
            "A negative weight would make the curvature indefinite; use 0 to leave a class out."
        )
    return tuple(values.tolist())


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b has underflowed to 0 (then a ≤ b has too)."""
    # The inner `where` keeps NaN out of the gradient of the branch that is not selected.
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
