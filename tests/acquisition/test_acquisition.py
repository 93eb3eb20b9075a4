"""Which inputs to label: against dense determinants, and entropies counted out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from oracle import assert_close

NOISE = 0.3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression(outputs: int = 1, structure: str = "full") -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    return lw.fit(model, (draw(12, 2), draw(12, outputs, seed=1)), lw.Gaussian(noise_std=NOISE), structure=structure)


def classifier(classes: int = 3) -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, classes)).double()
    return lw.fit(model, (draw(12, 2), torch.arange(12) % classes), "classification", structure="full")


def draws(posterior: lw.Posterior, x: Tensor, n: int) -> Tensor:
    return torch.softmax(posterior.functions(n, torch.Generator().manual_seed(3))(x), -1)


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum()


@pytest.mark.parametrize("outputs", [1, 2])
def test_bald_of_gaussian_targets(outputs: int):
    posterior, x = regression(outputs), draw(5, 2, seed=2)
    noise = NOISE**2 * torch.eye(outputs).double()
    truth = [0.5 * torch.logdet(torch.eye(outputs).double() + V @ noise.inverse()) for V in posterior.outputs(x).cov]
    assert_close(lw.acquisition.bald(posterior, x), torch.stack(truth))


def test_bald_of_classes_is_the_epistemic_part():
    posterior, x = classifier(), draw(5, 2, seed=2)
    assert_close(lw.acquisition.bald(posterior, x), posterior.predict(x).epistemic)


@pytest.mark.parametrize("outputs", [1, 2])
def test_batch_bald_of_gaussian_targets_is_greedy_on_the_determinant(outputs: int):
    posterior, x = regression(outputs), draw(7, 2, seed=2)
    K = posterior.joint_outputs(x).cov / NOISE**2

    def information(rows: list[int]) -> float:
        at = (outputs * torch.tensor(rows)[:, None] + torch.arange(outputs)).flatten()
        return float(torch.logdet(torch.eye(len(at)).double() + K[at[:, None], at]))

    chosen: list[int] = []
    for _ in range(4):
        chosen.append(max((i for i in range(7) if i not in chosen), key=lambda i: information([*chosen, i])))
    assert lw.acquisition.batch_bald(posterior, x, 4).tolist() == chosen


def test_batch_bald_of_classes_counts_all_labels():
    posterior, x = classifier(), draw(6, 2, seed=2)
    p = draws(posterior, x, 50)

    def information(rows: list[int]) -> float:
        joint = torch.stack([
            torch.stack([p[:, i, y] for i, y in zip(rows, labels, strict=True)]).prod(0).mean()
            for labels in itertools.product(range(3), repeat=len(rows))
        ])  # fmt: skip
        alone = sum(-torch.xlogy(p[:, i], p[:, i]).sum(-1).mean() for i in rows)
        return float(entropy(joint) - alone)

    chosen: list[int] = []
    for _ in range(3):
        chosen.append(max((i for i in range(6) if i not in chosen), key=lambda i: information([*chosen, i])))
    found = lw.acquisition.batch_bald(posterior, x, 3, n_samples=50, generator=torch.Generator().manual_seed(3))
    assert found.tolist() == chosen


def test_batch_bald_avoids_the_same_input_twice_over():
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    posterior = lw.fit(model, (draw(12, 2), draw(12, 1, seed=1)), lw.Gaussian(noise_std=1e-3))
    x = draw(4, 2, seed=2)
    found = lw.acquisition.batch_bald(posterior, torch.cat([x, x]), 4)
    assert {int(i) % 4 for i in found} == {0, 1, 2, 3}


def test_many_combinations_are_drawn():
    posterior, x = classifier(), draw(12, 2, seed=2)
    found = lw.acquisition.batch_bald(posterior, x, 10, n_samples=20)  # 3¹⁰ combinations
    assert len(set(found.tolist())) == 10


@pytest.mark.parametrize("outputs", [1, 2])
def test_epig_of_gaussian_targets(outputs: int):
    posterior, x, at = regression(outputs), draw(4, 2, seed=2), draw(3, 2, seed=4)
    K = posterior.joint_outputs(torch.cat([x, at])).cov + NOISE**2 * torch.eye(7 * outputs).double()

    def det(rows: list[int]) -> Tensor:
        places = (outputs * torch.tensor(rows)[:, None] + torch.arange(outputs)).flatten()
        return torch.logdet(K[places[:, None], places])

    truth = [torch.stack([0.5 * (det([i]) + det([j]) - det([i, j])) for j in range(4, 7)]).mean() for i in range(4)]
    assert_close(lw.acquisition.epig(posterior, x, at), torch.stack(truth), 1e-8)


def test_epig_of_classes():
    posterior, x, at = classifier(), draw(4, 2, seed=2), draw(3, 2, seed=4)
    p, q = draws(posterior, x, 50), draws(posterior, at, 50)
    truth = []
    for i in range(4):
        each = []
        for j in range(3):
            joint = torch.einsum("sc,sd->cd", p[:, i], q[:, j]) / 50
            each.append(entropy(p[:, i].mean(0)) + entropy(q[:, j].mean(0)) - entropy(joint))
        truth.append(torch.stack(each).mean())
    found = lw.acquisition.epig(posterior, x, at, n_samples=50, generator=torch.Generator().manual_seed(3))
    assert_close(found, torch.stack(truth), 1e-8)


def test_one_logit_is_two_classes():
    model = nn.Linear(2, 1).double()
    posterior = lw.fit(model, (draw(12, 2), (torch.arange(12) % 2)[:, None].double()), "binary")
    x = draw(5, 2, seed=2)
    assert lw.acquisition.batch_bald(posterior, x, 2).shape == (2,)
    assert bool((lw.acquisition.epig(posterior, x, x) > 0).all())


def test_bad_input():
    posterior, x = classifier(), draw(3, 2)
    with pytest.raises(lw.InputError, match="there are 3"):
        lw.acquisition.batch_bald(posterior, x, 4)
    with pytest.raises(lw.InputError, match="there are 3"):
        lw.acquisition.batch_bald(regression(), x, 4)
    with pytest.raises(lw.InputError, match="at least 1 input, got 0"):
        lw.acquisition.batch_bald(posterior, x, 0)
    with pytest.raises(lw.InputTypeError, match="expected a Posterior"):
        lw.acquisition.bald(nn.Linear(2, 1), x)
    counts = lw.fit(nn.Linear(2, 1).double(), (draw(6, 2), torch.ones(6, 1).double()), "count")
    with pytest.raises(lw.StructureError, match="Poisson"):
        lw.acquisition.bald(counts, x)
