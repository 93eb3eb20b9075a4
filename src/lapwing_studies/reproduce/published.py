"""Published numbers, for comparison."""

from __future__ import annotations

from typing import TypedDict


class Published(TypedDict):
    evidence: str
    prior: str
    nll: dict[str, str]


# Antorán, Janz, Allingham, Daxberger, Barbano, Nalisnick, Hernández-Lobato (2022): NLL, mean ± standard error.
ANTORAN_2022 = (
    Published(
        evidence="linear mode",
        prior="single",
        nll={"T-former": ".162 ± .042", "CNN": ".025 ± .000", "ResNet": ".017 ± .000", "Pre-ResNet": ".017 ± .000",
             "Fixup": ".055 ± .006"},
    ),
    Published(
        evidence="linear mode",
        prior="multiple",
        nll={"T-former": ".162 ± .042", "CNN": ".025 ± .000", "ResNet": ".016 ± .001", "Pre-ResNet": ".016 ± .000",
             "Fixup": ".061 ± .005"},
    ),
    Published(
        evidence="trained weights",
        prior="single",
        nll={"T-former": ".310 ± .060", "CNN": ".253 ± .001", "ResNet": ".252 ± .006", "Pre-ResNet": ".220 ± .004",
             "Fixup": ".153 ± .021"},
    ),
    Published(
        evidence="trained weights",
        prior="multiple",
        nll={"T-former": ".162 ± .042", "CNN": ".205 ± .002", "ResNet": ".236 ± .005", "Pre-ResNet": ".239 ± .004",
             "Fixup": ".200 ± .018"},
    ),
)  # fmt: skip


# Immer, Korzepa, Bauer (2021), Table 1: test NLL, mean and standard error over ten splits, two layers of 50 tanh units.
IMMER_2021: dict[str, dict[str, tuple[float, float]]] = {
    "australian": {"MAP": (0.31, 0.01), "MFVI": (0.34, 0.01), "BNN": (0.42, 0.0), "GLM": (0.32, 0.02),
                   "GLM diag": (0.33, 0.01), "GLM refine": (0.32, 0.02), "GLM refine d": (0.31, 0.01)},
    "breast_cancer": {"MAP": (0.11, 0.02), "MFVI": (0.11, 0.01), "BNN": (0.19, 0.0), "GLM": (0.10, 0.01),
                      "GLM diag": (0.11, 0.01), "GLM refine": (0.11, 0.01), "GLM refine d": (0.12, 0.02)},
    "ionosphere": {"MAP": (0.35, 0.02), "MFVI": (0.41, 0.01), "BNN": (0.50, 0.0), "GLM": (0.29, 0.01),
                   "GLM diag": (0.35, 0.01), "GLM refine": (0.35, 0.05), "GLM refine d": (0.32, 0.03)},
    "glass": {"MAP": (0.95, 0.03), "MFVI": (1.06, 0.01), "BNN": (1.41, 0.0), "GLM": (0.86, 0.01),
              "GLM diag": (0.99, 0.01), "GLM refine": (0.98, 0.07), "GLM refine d": (0.83, 0.02)},
    "vehicle": {"MAP": (0.420, 0.007), "MFVI": (0.504, 0.006), "BNN": (0.885, 0.002), "GLM": (0.428, 0.005),
                "GLM diag": (0.618, 0.003), "GLM refine": (0.402, 0.007), "GLM refine d": (0.432, 0.005)},
    "waveform": {"MAP": (0.335, 0.004), "MFVI": (0.393, 0.003), "BNN": (0.516, 0.002), "GLM": (0.339, 0.004),
                 "GLM diag": (0.388, 0.003), "GLM refine": (0.335, 0.004), "GLM refine d": (0.364, 0.008)},
    "digits": {"MAP": (0.094, 0.003), "MFVI": (0.219, 0.004), "BNN": (0.875, 0.002), "GLM": (0.250, 0.002),
               "GLM diag": (0.409, 0.002), "GLM refine": (0.150, 0.002), "GLM refine d": (0.149, 0.008)},
    "satellite": {"MAP": (0.230, 0.002), "MFVI": (0.307, 0.002), "BNN": (0.482, 0.001), "GLM": (0.241, 0.001),
                  "GLM diag": (0.327, 0.002), "GLM refine": (0.227, 0.002), "GLM refine d": (0.248, 0.002)},
}  # fmt: skip

# Gal and Ghahramani (2016), Monte Carlo dropout on the standard splits: RMSE, log likelihood, and the latter after ten
# times the epochs; mean and spread as published.
MC_DROPOUT: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "boston": ((2.97, 0.85), (-2.46, 0.25), (-2.39, 0.20)),
    "concrete": ((5.23, 0.53), (-3.04, 0.09), (-2.94, 0.10)),
    "energy": ((1.66, 0.19), (-1.99, 0.09), (-1.72, 0.07)),
    "kin8nm": ((0.10, 0.0), (0.95, 0.03), (0.97, 0.02)),
    "naval": ((0.01, 0.0), (3.80, 0.05), (3.92, 0.03)),
    "power": ((4.02, 0.18), (-2.80, 0.05), (-2.79, 0.04)),
    "wine": ((0.62, 0.04), (-0.93, 0.06), (-0.92, 0.06)),
    "yacht": ((1.11, 0.38), (-1.55, 0.12), (-1.38, 0.06)),
}

# Unlu and Aitchison, "Variational Laplace for Bayesian neural networks", table 1: NLL, accuracy in per cent, ECE; each
# the best over β by itself. PreactResNet-18 with softplus.
VARIATIONAL_LAPLACE: dict[str, dict[str, tuple[float, float, float]]] = {
    "cifar10": {"VL": (0.23, 92.4, 0.017), "VI mean": (0.37, 91.1, 0.053), "VI 10 draws": (0.35, 90.2, 0.044),
                "MAP": (0.43, 90.8, 0.058)},
    "cifar100": {"VL": (1.00, 71.4, 0.024), "VI mean": (1.29, 68.8, 0.100), "VI 10 draws": (1.49, 67.3, 0.026),
                 "MAP": (1.61, 67.5, 0.159)},
    "svhn": {"VL": (0.14, 97.1, 0.009), "VI mean": (0.16, 96.3, 0.012), "VI 10 draws": (0.22, 95.5, 0.022),
             "MAP": (0.24, 95.7, 0.028)},
    "fashion_mnist": {"VL": (0.16, 94.6, 0.010), "VI mean": (0.23, 94.0, 0.034), "VI 10 draws": (0.29, 93.6, 0.016),
                      "MAP": (0.29, 93.6, 0.096)},
}  # fmt: skip
VARIATIONAL_SECONDS = {"VL": 114.9, "VI": 43.2, "MAP": 41.8}  # per epoch of CIFAR-10, table 2

# Immer, Bauer, Fortuin, Rätsch and Khan (2021): accuracy in per cent and test log likelihood, by cross-validation and
# by the marginal likelihood with Kronecker factors.
MARGLIK_2021: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("mnist", "MLP"): {"grid": (98.22, -0.061), "evidence": (98.38, -0.053)},
    ("mnist", "CNN"): {"grid": (99.40, -0.017), "evidence": (99.46, -0.016)},
    ("fashion_mnist", "MLP"): {"grid": (88.09, -0.347), "evidence": (89.83, -0.305)},
    ("fashion_mnist", "CNN"): {"grid": (91.39, -0.258), "evidence": (92.06, -0.233)},
    ("cifar10", "CNN"): {"grid": (77.41, -0.680), "evidence": (80.46, -0.644)},
    ("cifar10", "ResNet"): {"grid": (83.73, -1.060), "evidence": (86.11, -0.595)},
}
