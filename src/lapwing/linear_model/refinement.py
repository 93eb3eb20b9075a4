"""What a refinement reports of itself: where it started, how it went, what it cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elbo:
    """log p(D) ≥ E_q[κ Σ log p(y | h)] − KL(q ‖ prior), of the linear model."""

    expected_log_lik: float
    kl: float

    @property
    def total(self) -> float:
        return self.expected_log_lik - self.kl


@dataclass(frozen=True)
class Refinement:
    """How a posterior was refined. Gradients are those of the refined objective in θ, largest entry."""

    by: str  # the word of the front door: "laplace", "vi" or "vi_diag"
    path: tuple[float, ...]  # the objective: log joint density (Laplace) or ELBO (variational), from start to end
    gradient_before: float  # of the log joint at the trained weights: zero where they are a mode already
    gradient: float  # of the objective at the end
    converged: bool
    n_steps: int
    n_passes: int  # over the data, through the network
    bound: Elbo | None = None  # of a variational posterior

    @property
    def elbo(self) -> float | None:
        """The evidence lower bound of a variational posterior; None after a Laplace refinement."""
        return None if self.bound is None else self.bound.total
