"""Lapwing: error bars for the neural network you already trained."""

import warnings
from typing import Any

from lapwing import acquisition, imaging, train
from lapwing.api.compare import Comparison, compare
from lapwing.api.fit import fit, plan, prior
from lapwing.api.merge import merge
from lapwing.api.refine import refine
from lapwing.api.tune import tune
from lapwing.calibration import Alarm, Conformal, alarm, conformal
from lapwing.curvature import (
    GP,
    Block,
    Diag,
    Ekfac,
    Empirical,
    Exact,
    Full,
    Kron,
    Labels,
    LowRank,
    MatrixFree,
    Nystrom,
    Sampled,
    Signs,
)
from lapwing.errors import (
    InputError,
    InputTypeError,
    LapwingError,
    LapwingWarning,
    ModelError,
    NumericalError,
    RankError,
    ShapeError,
    StorageError,
    StructureError,
)
from lapwing.integrations.export import export
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    check_likelihood,
)
from lapwing.linalg import CG, Rademacher, UnitVectors
from lapwing.planning import Plan
from lapwing.posterior import Posterior
from lapwing.posterior.diagnosis import Diagnosis
from lapwing.posterior.hessian import ExactHessian, exact_hessian
from lapwing.predictive import Prediction
from lapwing.storage import load, save
from lapwing.subnetwork import Functional, Magnitude, MarginalVariance, RandomScore, Subnetwork, Swag
from lapwing.tuning.em import EM, SGD, Cholesky, from_samples

__version__ = "0.2.0"

__all__ = [
    "CG",
    "EM",
    "GP",
    "SGD",
    "Alarm",
    "Bernoulli",
    "Block",
    "Categorical",
    "Cholesky",
    "Comparison",
    "Conformal",
    "CustomLikelihood",
    "Diag",
    "Diagnosis",
    "Ekfac",
    "Empirical",
    "Exact",
    "ExactHessian",
    "Full",
    "Functional",
    "Gaussian",
    "HeteroscedasticGaussian",
    "InputError",
    "InputTypeError",
    "Kron",
    "Labels",
    "LapwingError",
    "LapwingWarning",
    "Likelihood",
    "LowRank",
    "Magnitude",
    "MarginalVariance",
    "MatrixFree",
    "ModelError",
    "NumericalError",
    "Nystrom",
    "Plan",
    "Poisson",
    "Posterior",
    "Prediction",
    "Rademacher",
    "RandomScore",
    "RankError",
    "Sampled",
    "ShapeError",
    "Signs",
    "StorageError",
    "StructureError",
    "Subnetwork",
    "Swag",
    "UnitVectors",
    "acquisition",
    "alarm",
    "check_likelihood",
    "compare",
    "conformal",
    "exact_hessian",
    "export",
    "fit",
    "from_samples",
    "imaging",
    "load",
    "merge",
    "plan",
    "prior",
    "refine",
    "save",
    "train",
    "tune",
]


_RENAMED = {"Dense": "Cholesky", "sampled": "from_samples"}  # kept for one release


def __getattr__(name: str) -> Any:
    """Public names of the release before, with a warning."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"lapwing.{name} is now lapwing.{_RENAMED[name]}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[_RENAMED[name]]


def __dir__() -> list[str]:
    """The public names only; sub-modules can be imported all the same."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
