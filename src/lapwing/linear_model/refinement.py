"""Record of a refinement: where it started, how it converged, what it cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elbo:
    """Evidence lower bound of the linear model: log p(D) ≥ E_q[κ Σ log p(y | h)] − KL(q ‖ prior)."""

    expected_log_lik: float
    kl: float

    @property
    def total(self) -> float:
        return self.expected_log_lik - self.kl


@dataclass(frozen=True)
class Refinement:
    """How a posterior was refined. Gradients are largest absolute entries, of the refined objective in θ."""

    by: str  # as in lw.refine(by=...): "laplace", "vi" or "vi_diag"
    path: tuple[float, ...]  # the objective: log joint density (Laplace) or ELBO (variational), from start to end
    gradient_before: float  # of the log joint at the trained weights: zero if they are a mode
    gradient: float  # of the objective at the end
    converged: bool
    n_steps: int
    n_passes: int  # passes over the data through the network
    bound: Elbo | None = None  # of a variational posterior

    @property
    def elbo(self) -> float | None:
        """The evidence lower bound of a variational posterior; None after a Laplace refinement."""
        return None if self.bound is None else self.bound.total
