"""Sampling-based EM: hyperparameters of the full GGN from posterior samples, where no matrix fits into memory."""

from lapwing.tuning.em.loop import tune_by_em
from lapwing.tuning.em.sampled import Draws, sampled
from lapwing.tuning.em.settings import EM, SGD, Dense
from lapwing.tuning.em.step import EMStep

__all__ = ["EM", "SGD", "Dense", "Draws", "EMStep", "sampled", "tune_by_em"]
