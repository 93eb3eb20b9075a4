"""Threads share a posterior, its model and the process: each finds what it would find alone."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.runtime.sandbox import Template
from untouched import changes, model_facts, untouched

STRUCTURES = ["full", "block", "kron", "ekfac", "diag", "lowrank", "gp", "matrixfree"]
N_INPUTS = 4


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def transformer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tokens().eval(), torch.randn(24, 3, 2)


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.GroupNorm(1, 2), nn.Tanh(),
        nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    model.train()[1].eval()  # modes of their own
    model[2].register_forward_hook(lambda *_: None)
    return model, torch.randn(24, 1, 4, 4)


MODELS = [cnn, transformer]


def all_ran(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What they return, each in a thread of its own; the first error is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


@contextmanager
def used_meanwhile(model: nn.Module, x: Tensor) -> Iterator[None]:
    """The user's own thread runs forward and backward passes of the model, and looks at all of it."""
    stop, errors = threading.Event(), []

    def pass_over() -> list[Tensor]:
        with torch.no_grad():
            alone = model(x)  # the fused path, where there is one
        f = model(x)
        return [alone, f.detach(), *torch.autograd.grad(f.square().sum(), list(model.parameters()))]

    expected, facts, filters = pass_over(), model_facts(model), list(warnings.filters)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def use() -> None:
        while not stop.is_set():
            assert not changes(facts, model_facts(model))
            assert all(torch.equal(a, b) for a, b in zip(pass_over(), expected, strict=True))
            assert all(torch.equal(a, state[name]) for name, a in model.state_dict().items())
            assert torch.backends.mha.get_fastpath_enabled() and torch.backends.cuda.flash_sdp_enabled()
            assert warnings.filters == filters

    def watched() -> None:
        try:
            use()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watched)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def predicted(make: Callable[[], tuple[nn.Module, Tensor]], structures: list[str], n_predictions: int) -> None:
    """Eight threads ask posteriors of one model, and another one uses the model itself."""
    model, X = make()
    data = (X, torch.arange(len(X)) % 2)
    posteriors = [lw.fit(model, data, "classification", structure=s, progress=False) for s in structures]
    inputs = [X[i : i + 2] + 0.01 for i in range(N_INPUTS)]
    cases = [(i, j) for i in range(len(posteriors)) for j in range(N_INPUTS)]

    def asked(i: int, j: int) -> Tensor:
        return posteriors[i].predict(inputs[j]).probs

    expected = {case: asked(*case) for case in cases}

    def ask(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(n_predictions):
            case = drawn.choice(cases)
            assert torch.equal(asked(*case), expected[case]), case

    with untouched(model), used_meanwhile(model, X[:3]):
        all_ran([lambda seed=seed: ask(seed) for seed in range(8)])


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_eight_threads_predict_while_another_uses_the_model(make: Callable[[], Any]) -> None:
    predicted(make, ["full", "kron", "diag", "lowrank", "gp"], 25)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_products_with_the_jacobian_in_threads(make: Callable[[], Any]) -> None:
    predicted(make, ["matrixfree"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_eight_threads_predict_ten_thousand_times(make: Callable[[], Any]) -> None:
    predicted(make, STRUCTURES, 10_000)


# --- random states ------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws in eval mode, as models with layer drop do; an output that depends on it is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() + 0 * torch.rand(4))


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3), torch.arange(12) % 2


def test_a_model_that_draws_gives_the_same_numbers_in_threads() -> None:
    X, Y = rows()
    model = Drawing().eval()
    posterior = lw.fit(model, (X, Y), "classification", structure="diag", progress=False)
    expected = posterior.predict(X).probs

    def ask() -> None:
        assert all(torch.equal(posterior.predict(X).probs, expected) for _ in range(10))

    with untouched(model):
        all_ran([ask] * 8)


def test_fits_in_threads_give_the_random_states_back() -> None:
    X, Y = rows()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=5, shuffle=True)

    def fit() -> None:
        lw.tune(lw.fit(model, loader, "classification", structure="diag", progress=False), progress=False)

    with untouched(model):
        all_ran([fit] * 4)


def test_predictions_leave_the_random_numbers_of_other_threads_alone() -> None:
    X, Y = rows()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = lw.fit(model, (X, Y), "classification", structure="diag", progress=False)
    torch.manual_seed(5)
    expected = [torch.rand(2) for _ in range(2000)]
    done = threading.Event()

    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        drawn = [torch.rand(2) for _ in range(2000)]
        done.set()
        return drawn

    def ask() -> list[Tensor]:
        while not done.is_set():
            posterior.predict(X)
        return []

    drawn, *_ = all_ran([draw, ask, ask])
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_what_a_model_draws_for_some_inputs_only_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 10:
                torch.rand(1)
            return super().forward(x)

    X, Y = rows()
    model = Late(3, 2)
    posterior = lw.fit(model, [(X[:5], Y[:5])], "classification", structure="diag", progress=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a progress bar may have left one behind
    with untouched(model):
        posterior.predict(X)


# --- what a copy has to follow ------------------------------------------------------------------------------


def plain() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Around(nn.Module):
    """Plain layers, reached by something else than the tree of modules."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        body = self.body = plain()
        self.log: list[int] = []
        holder = Holder(body)
        cell = {"m": body}
        self.reach = {
            "list": [[body], self.log],
            "tuple": (body, {"m": body}),
            "closure": lambda x: body(x + 0),
            "method": body.forward,
            "object": holder,
            "closed dict": lambda x: cell["m"](x + 0),
        }[reach]

    def forward(self, x: Tensor) -> Tensor:
        reach = self.reach
        while isinstance(reach, list | tuple):
            reach = reach[0]
        self.log.append(len(x))
        return (reach.module if isinstance(reach, Holder) else reach)(x)


def fitted(model: nn.Module) -> lw.Posterior:
    X, Y = rows()
    with untouched(model):
        return lw.fit(model, (X, Y), "classification", structure="full", progress=False)


@pytest.mark.parametrize("reach", ["list", "tuple", "closure", "method", "object", "closed dict"])
def test_modules_are_followed_wherever_they_are(reach: str) -> None:
    """By the copy; or the model is lent, where it reaches its modules by other objects."""
    X, _ = rows()
    model = Around(reach)
    posterior = fitted(model)
    assert posterior.linearised.network.traits.lent == (reach in ("object", "closed dict"))
    with torch.no_grad():
        model.body[0].weight.add_(1.0)  # training on
    with untouched(model):
        found = posterior.outputs(X)
    expected = fitted(plain()).outputs(X)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.cov, expected.cov)


def test_a_hook_that_removes_itself_stays_with_the_user() -> None:
    model = plain()
    handle = model[0].register_forward_hook(lambda *_: handle.remove())
    fitted(model)
    assert len(model[0]._forward_hooks) == 1


def test_slots_and_cycles() -> None:
    class Slotted(nn.Module):
        __slots__ = ("inner",)

        def __init__(self) -> None:
            super().__init__()
            self.body = plain()
            object.__setattr__(self, "inner", [self.body])
            self.body.__dict__["parent"] = self

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0].parent.body(x)

    X, _ = rows()
    posterior = fitted(Slotted())
    assert not posterior.linearised.network.traits.lent
    torch.testing.assert_close(posterior.outputs(X).cov, fitted(plain()).outputs(X).cov)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("part", ["whole", "inner"])
def test_torchscript_keeps_its_tensors_and_modes(part: str) -> None:
    X, Y = rows()
    inner = torch.jit.script(plain()).train()
    model = inner if part == "whole" else nn.Sequential(inner, nn.Identity())
    parameters, values = list(inner.parameters()), [p.detach().clone() for p in inner.parameters()]
    posterior = lw.fit(model, (X, Y), "classification", structure="full", progress=False)
    found = all_ran([lambda: posterior.outputs(X).cov] * 4)
    assert all(torch.equal(f, found[0]) for f in found)
    torch.testing.assert_close(found[0], fitted(plain()).outputs(X).cov)
    assert all(m.training for m in inner.modules())
    for p, now, value in zip(parameters, inner.parameters(), values, strict=True):
        assert p.data_ptr() == now.data_ptr() and torch.equal(now, value) and now.requires_grad


def test_later_changes_of_the_modules_do_not_reach_a_posterior() -> None:
    X, _ = rows()
    model = plain()
    posterior = fitted(model)
    expected = posterior.outputs(X)
    model[1] = nn.ReLU()
    model[0].register_forward_hook(lambda *_: torch.zeros(12, 4))
    assert torch.equal(posterior.outputs(X).cov, expected.cov)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_template_can_be_copied(again: Callable[[Any], Any]) -> None:
    X, _ = rows()
    template = again(Template(plain()))
    assert torch.equal(template.copies()[0](X), plain()(X))


def test_a_subclass_of_attention_takes_the_plain_path() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    model, X = transformer()
    expected = lw.fit(model, (X, torch.arange(24) % 2), "classification", structure="full", progress=False).outputs(X)
    model.encoder.layers[0].self_attn.__class__ = Mine
    found = lw.fit(model, (X, torch.arange(24) % 2), "classification", structure="full", progress=False).outputs(X)
    torch.testing.assert_close(found.cov, expected.cov)
