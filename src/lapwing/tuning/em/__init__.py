"""Sampling-based EM: hyperparameters under the full GGN from posterior samples, when no matrix fits into memory."""

from lapwing.tuning.em.from_samples import Draws, from_samples
from lapwing.tuning.em.loop import tune_by_em
from lapwing.tuning.em.settings import EM, SGD, Cholesky
from lapwing.tuning.em.step import EMStep

__all__ = ["EM", "SGD", "Cholesky", "Draws", "EMStep", "from_samples", "tune_by_em"]
