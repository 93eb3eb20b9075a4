"""Bayesian optimisation of a 6-dimensional function: a network's posterior, a Gaussian process, and random search.

python examples/long/botorch_hartmann.py [--seeds 3] [--steps 30]      needs lapwing[botorch]; minutes
"""

import argparse
import warnings

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import nn

import lapwing as lw
from lapwing.botorch import LapwingModel

FUNCTION = Hartmann(dim=6, negate=True)
BOUNDS = torch.stack([torch.zeros(6), torch.ones(6)]).double()
START = 20


def network_model(X, Y):
    """Train a small network on standardised targets, fit and tune its posterior."""
    standardise = Standardize(1)
    scaled = standardise(Y)[0]
    standardise.eval()
    net = nn.Sequential(nn.Linear(6, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1)).double()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(150):
        optimiser.zero_grad()
        (net(X) - scaled).square().mean().backward()
        optimiser.step()
    posterior = lw.tune(lw.fit(net, (X, scaled), "regression", progress=False), progress=False)
    return LapwingModel(posterior, outcome_transform=standardise)


def gaussian_process(X, Y):
    model = SingleTaskGP(X, Y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def best_found(make_model, seed, steps):
    """The largest value after START random points and `steps` chosen ones."""
    torch.manual_seed(seed)
    X = torch.rand(START, 6).double()
    Y = FUNCTION(X)[:, None]
    for _ in range(steps):
        if make_model is None:
            x = torch.rand(1, 6).double()
        else:
            acquisition = LogExpectedImprovement(make_model(X, Y), best_f=Y.max())
            x, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=4, raw_samples=64, options={"maxiter": 50})
        X, Y = torch.cat([X, x]), torch.cat([Y, FUNCTION(x)[:, None]])
    return float(Y.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"Hartmann-6, largest value {FUNCTION.optimal_value:.3f}; best found, mean over {chosen.seeds} seeds")
    for name, make in (("network", network_model), ("SingleTaskGP", gaussian_process), ("random", None)):
        found = torch.tensor([best_found(make, seed, chosen.steps) for seed in range(chosen.seeds)])
        print(f"{name:14s}{found.mean():.3f}   {' '.join(f'{v:.3f}' for v in found.tolist())}", flush=True)


if __name__ == "__main__":
    main()
