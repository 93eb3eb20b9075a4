"""Options of sampling-based EM."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.errors import InputError, InputTypeError
from lapwing.linalg import CG


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with Nesterov momentum, preconditioned by the posterior's own structure.

    Each epoch is a pass over the data in minibatches. `lr` multiplies the preconditioned step; None chooses the
    largest that is stable on every batch. It decreases linearly to a thirtieth, and the last half of the iterates is
    averaged.
    """

    epochs: int = 10
    lr: float | None = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_whole_number("SGD", "epochs", self.epochs, 1)
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise InputError(f"SGD: lr must be positive, got {self.lr}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"SGD: momentum must lie in [0, 1), got {self.momentum}.")


@dataclass(frozen=True)
class Cholesky:
    """Form the rows SᵀJ of all data, and factorise a matrix of size N·C or P, whichever is smaller.

    Stores N·C × P numbers, twice if the linear model's mode is needed, regardless of the `memory` of the fit.
    """


@dataclass(frozen=True)
class EM:
    """Sampling-based EM: `n_samples` posterior samples, at most `max_steps` steps.

    Stops when no log precision or log noise changes by more than `rtol`. `solver`: how the linear systems of the
    samples are solved. None solves them directly if a matrix over all weights or all outputs fits into memory;
    otherwise by conjugate gradients, with a Nyström preconditioner, until the error is a small part of the sampling
    error. `lw.CG(...)` solves to a tolerance, preconditioned by the posterior's own structure; `lw.SGD(...)` uses
    minibatches; `lw.Cholesky()` always factorises. `g_prior` makes each precision proportional to the curvature of its
    weight, δ_p = α_g H_pp.
    """

    n_samples: int = 16
    max_steps: int = 30
    rtol: float = 3e-3
    solver: CG | SGD | Cholesky | None = None
    g_prior: bool = False

    def __post_init__(self) -> None:
        _check_whole_number("EM", "n_samples", self.n_samples, 2)
        _check_whole_number("EM", "max_steps", self.max_steps, 1)
        if not 0 < self.rtol < 1:
            raise InputError(f"EM: rtol must lie between 0 and 1, got {self.rtol}.")
        if not isinstance(self.solver, CG | SGD | Cholesky | None):
            raise InputTypeError(f"EM: solver must be lw.CG(...), lw.SGD(...) or lw.Cholesky(), got {self.solver!r}.")
        if not isinstance(self.g_prior, bool):
            raise InputTypeError(f"EM: g_prior must be True or False, got {self.g_prior!r}.")


def _check_whole_number(owner: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{owner}: {name} must be a whole number, got {type(value).__name__} {value!r}.")
    if value < least:
        raise InputError(f"{owner}: {name} must be at least {least}, got {value}.")
