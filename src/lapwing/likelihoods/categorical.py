"""One label among C classes, softmax of C logits."""

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

    `weight` holds one non-negative w per class, which multiplies the terms of that class's labels (sums, not
    weighted means). Terms labelled `ignore_index` count for nothing: log density, residual and curvature are zero.
    """

    weight: Sequence[float] | Tensor | None = None
    ignore_index: int = -100
    class_axis: int = -1

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
        """Labels that fit the outputs with the classes on another axis, as those of segmentation do."""
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
        # `where`, not a product alone: 0 · (−inf) of a masked logit would be NaN.
        return torch.where(w > 0, w * log_p, 0.0)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.term_weight(f, y)[..., None] * _label_residual(f, y)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        eye = torch.eye(p.shape[-1], dtype=torch.bool, device=p.device)
        output_hessian = torch.where(eye, torch.diag_embed(p * complement(p)), -p[..., :, None] * p[..., None, :])
        return self.term_weight(f, y)[..., None, None] * output_hessian

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S = √w_y L with L Lᵀ = diag p − p pᵀ: (..., C, C − 1), one column less than there are classes.

        L is the Cholesky factor in closed form. With q_j = Σ_{k>j} p_k the probability left after class j,
        L_jj = √(p_j q_j / q_{j−1}) and L_ij = −(p_i / q_j) L_jj below; the last column is zero and left out.
        """
        p = torch.softmax(f, -1)
        left = p.flip(-1).cumsum(-1).flip(-1)  # q_{j−1}, sums of positive terms: no cancellation
        before, after = left[..., :-1], left[..., 1:]
        diagonal = _ratio(p[..., :-1] * after, before).sqrt()
        below = -_ratio(p[..., :, None], after[..., None, :]) * diagonal[..., None, :]
        row, column = (
            torch.arange(p.shape[-1], device=p.device)[:, None],
            torch.arange(p.shape[-1] - 1, device=p.device),
        )
        L = torch.where(row > column, below, torch.where(row == column, diagonal[..., None, :], 0.0))
        return self.term_weight(f, y).sqrt()[..., None, None] * L

    def hessian_mv(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """w_y (p ∘ v − p (p · v)), without the C × C matrix."""
        p = torch.softmax(f, -1)
        centred = v - (p * v).sum(-1, keepdim=True)
        return self.term_weight(f, y)[..., None] * p * centred

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        return [Softmax(f, self.term_weight(f, y))]

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        """Labels from the softmax; class weights are the loss's, not the model's, and play no part."""
        p = torch.softmax(f, -1).reshape(-1, f.shape[-1]).to(generator.device)
        labels = torch.multinomial(p, 1, generator=generator)
        return labels.reshape(f.shape[:-1]).to(f.device)

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        # E[r rᵀ] = w_y (diag p − p pᵀ) takes the weight of the *observed* label, outside the expectation.
        drawn = _label_residual(f, self.sample(f.detach(), generator=generator))
        return [self.term_weight(f, y).sqrt()[..., None] * drawn]

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """√w_y R z with the root R = diag √p − p √pᵀ of diag p − p pᵀ, in C operations instead of C².

        (R z)_c = √p_c z_c (1 − p_c) − p_c Σ_{k≠c} √p_k z_k, in which nothing cancels where p_c is near one.
        """
        p = torch.softmax(f, -1)
        root = (torch.log_softmax(f, -1) / 2).exp()  # √p, with a derivative where p has underflown to 0
        u = root * random_signs(p, generator)
        return [self.term_weight(f, y).sqrt()[..., None] * (u * complement(p) - p * _sum_of_others(p, u))]

    def term_weight(self, f: Tensor, y: Tensor) -> Tensor:
        """w_y, and zero where ignored: (...)."""
        counted = y != self.ignore_index
        if self.weight is None:
            return counted.to(f.dtype)
        weight = torch.as_tensor(self.weight, dtype=f.dtype, device=f.device)
        return torch.where(counted, weight[torch.where(counted, y, 0)], 0.0)


def _label_residual(f: Tensor, y: Tensor) -> Tensor:
    """e_y − p, its label entry as the sum of the other probabilities: 1 − p_y would cancel to nothing near p_y = 1.

    What stands where the label is no class (ignored) has no weight.
    """
    label = torch.where((y >= 0) & (y < f.shape[-1]), y, 0)[..., None]
    others = torch.softmax(f, -1).scatter(-1, label, 0.0)
    return others.neg().scatter(-1, label, others.sum(-1, keepdim=True))


def _sum_of_others(p: Tensor, u: Tensor) -> Tensor:
    """Σ_{k≠c} u_k for every c; for the most probable class the others are added up without it."""
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
    """a / b, and 0 where b has underflown to 0: a is no larger."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
