"""Legitimate but awkward ways to pass the same data or model: the same posterior as the plain call."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import lapwing as lw
from oracle import assert_close

N, D, C = 11, 3, 2
RTOL = 1e-10
NOISE = lw.Gaussian(noise_std=0.5)


def network(n_outputs: int = C) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, n_outputs)).double()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, LABELS, REAL = numbers(N, D), torch.arange(N) % C, numbers(N, C, seed=1)
ELSEWHERE = numbers(4, D, seed=2)


def answers(posterior: lw.Posterior, x: Any = ELSEWHERE) -> list[Tensor]:
    return [posterior.outputs(x).cov, posterior.log_evidence(), posterior.mean, posterior.marginal_variance()]


def assert_same(found: lw.Posterior, expected: lw.Posterior, *, rtol: float = RTOL) -> None:
    assert found.n_data == expected.n_data
    for a, b in zip(answers(found), answers(expected), strict=True):
        assert_close(a, b, rtol=rtol)


@pytest.fixture(params=["full", "block", "diag"])
def structure(request: pytest.FixtureRequest) -> str:
    return request.param


def fitted(data: Any, structure: str = "full", model: nn.Module | None = None) -> lw.Posterior:
    return lw.fit(model or network(), data, "classification", structure=structure, progress=False)


# --- the same data, in other wrappings ----------------------------------------------------------------------


class Rows(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], LABELS[i]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return zip(X, LABELS, strict=True)


class Reiterable:
    def __iter__(self) -> Any:
        return ((X[i : i + 2], LABELS[i : i + 2]) for i in range(0, N, 2))


class Encoding(UserDict):
    """A mapping that is no dict, as tokenisers return."""


def strided(tensor: Tensor) -> Tensor:
    """The same values at every third place of a larger tensor."""
    host = torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)
    host[..., 1] = tensor
    view = host[..., 1]
    assert not view.is_contiguous()
    return view


def read_only(tensor: Tensor) -> np.ndarray:
    array = tensor.numpy().copy()
    array.setflags(write=False)
    return array


DATA: dict[str, Callable[[], Any]] = {
    "one datum per batch": lambda: [(X[i : i + 1], LABELS[i : i + 1]) for i in range(N)],
    "uneven last batch": lambda: [(X[:4], LABELS[:4]), (X[4:8], LABELS[4:8]), (X[8:], LABELS[8:])],
    "batches of growing size": lambda: [(X[:1], LABELS[:1]), (X[1:3], LABELS[1:3]), (X[3:], LABELS[3:])],
    "list of two batches": lambda: [(X[:6], LABELS[:6]), (X[6:], LABELS[6:])],
    "list of two lists": lambda: [[X[:6], LABELS[:6]], [X[6:], LABELS[6:]]],
    "tuple of three batches": lambda: ((X[:6], LABELS[:6]), (X[6:8], LABELS[6:8]), (X[8:], LABELS[8:])),
    "X and Y in a list": lambda: [X, LABELS],
    "any re-iterable": Reiterable,
    "shuffled loader": lambda: DataLoader(TensorDataset(X, LABELS), batch_size=3, shuffle=True),
    "loader with a generator": lambda: DataLoader(
        TensorDataset(X, LABELS), batch_size=4, shuffle=True, num_workers=0, generator=torch.Generator().manual_seed(5)
    ),
    "loader with a batch sampler": lambda: DataLoader(
        TensorDataset(X, LABELS), batch_sampler=BatchSampler(SubsetRandomSampler(range(N)), 5, drop_last=False)
    ),
    "loader without batching": lambda: DataLoader(
        [(X[i : i + 1], LABELS[i : i + 1]) for i in range(N)], batch_size=None
    ),
    "data set": Rows,
    "tensor data set": lambda: TensorDataset(X, LABELS),
    "stream": Stream,
    "loader over a stream": lambda: DataLoader(Stream(), batch_size=4),
    "non-contiguous tensors": lambda: (strided(X), strided(LABELS)),
    "reversed twice": lambda: (X.flip(0), LABELS.flip(0)),
    "tensors that require grad": lambda: (X.clone().requires_grad_(), LABELS),
    "arrays": lambda: (X.numpy(), LABELS.numpy()),
    "Fortran-ordered arrays": lambda: (np.asfortranarray(X.numpy()), LABELS.numpy()[::-1][::-1]),
    "read-only arrays": lambda: (read_only(X), read_only(LABELS)),
    "arrays in batches": lambda: [(X[:5].numpy(), LABELS[:5].numpy()), (X[5:].numpy(), LABELS[5:].numpy())],
    "labels in lists": lambda: [(X[:5], LABELS[:5].tolist()), (X[5:], LABELS[5:].tolist())],
    "X with a list of labels": lambda: (X, LABELS.tolist()),
    "small integer labels": lambda: (X, LABELS.to(torch.uint8)),
    "labels as (N, 1)": lambda: (X, LABELS[:, None]),
    "named input": lambda: [({"input": X[:5]}, LABELS[:5]), ({"input": X[5:]}, LABELS[5:])],
    "X as a mapping": lambda: ({"input": X}, LABELS),
    "mapping with labels": lambda: [{"input": X[:5], "labels": LABELS[:5]}, {"labels": LABELS[5:], "input": X[5:]}],
    "one mapping with labels": lambda: {"input": X, "labels": LABELS},
    "mapping that is no dict": lambda: [Encoding(input=X, labels=LABELS)],
    "read-only mapping": lambda: [MappingProxyType({"input": X, "labels": LABELS})],
    "collated mappings": lambda: DataLoader(
        [{"input": X[i], "labels": LABELS[i]} for i in range(N)], batch_size=4
    ),
    "X as a tuple of one": lambda: ((X,), LABELS),
    "X as a list of one": lambda: ([X], LABELS),
    "tuple of two lists": lambda: ([X[:6], LABELS[:6]], [X[6:], LABELS[6:]]),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_other_wrappings_of_the_data(name: str, structure: str) -> None:
    model = network()
    if any(word in name for word in ("named", "mapping")):
        model = Named()
    plain = fitted((X, LABELS), structure)
    found = fitted(DATA[name](), structure, model)
    assert found.n_data == N
    x = {"input": ELSEWHERE} if isinstance(model, Named) else ELSEWHERE
    for a, b in zip(answers(found, x), answers(plain), strict=True):
        assert_close(a, b, rtol=RTOL)


class Named(nn.Module):
    """The same network with its input as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, *, input: Tensor) -> Tensor:
        return self.body(input)


def test_mappings_are_left_as_they_were() -> None:
    batch = {"input": X, "labels": LABELS}
    fitted([batch], model=Named())
    assert list(batch) == ["input", "labels"] and batch["input"] is X and batch["labels"] is LABELS


def test_n_is_what_was_seen() -> None:
    seen = [0, 3, 4, 9]
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=3, sampler=SubsetRandomSampler(seen))
    assert_same(fitted(loader), fitted((X[seen], LABELS[seen])))


def test_a_loader_that_drops_the_last_batch_says_so() -> None:
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match=r"drop_last=True and left out 3 data.*the 8 it saw"):
        found = fitted(loader)
    assert_same(found, fitted((X[:8], LABELS[:8])))


def test_updates_equal_one_fit(structure: str) -> None:
    first = fitted((X[:4], LABELS[:4]), structure)
    updated = first.updated((X[4:], LABELS[4:]))
    assert_same(updated, fitted((X, LABELS), structure))
    assert first.n_data == 4


def test_updates_from_few_rows_to_many() -> None:
    """The first part has fewer rows than parameters, the second more: kept in different ways, added all the same."""
    many, labels = numbers(40, D, seed=4), torch.arange(40) % C
    for first, second in [((X, LABELS), (many, labels)), ((many, labels), (X, LABELS))]:
        updated = fitted(first).updated(second)
        assert_same(updated, fitted((torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))))


# --- targets ------------------------------------------------------------------------------------------------


class Squeezed(nn.Module):
    """One output as (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


def test_one_output_takes_targets_with_and_without_an_axis(structure: str) -> None:
    y = REAL[:, :1]
    expected = lw.fit(network(1), (X, y), NOISE, structure=structure)
    assert_same(lw.fit(network(1), (X, y[:, 0]), NOISE, structure=structure), expected)
    for targets in (y, y[:, 0]):
        found = lw.fit(Squeezed(), (X, targets), NOISE, structure=structure)
        assert found.outputs(ELSEWHERE).mean.shape == (4,)
        assert_same(found, expected)
        prediction, reference = found.predict(X), expected.predict(X)
        assert_close(prediction.log_prob(targets), reference.log_prob(y), rtol=RTOL)


@pytest.mark.parametrize("word", ["binary", "classification", "multilabel"])
def test_one_logit_is_bernoulli(word: str) -> None:
    expected = lw.fit(network(1), (X, LABELS[:, None].double()), lw.Bernoulli())
    for targets in (LABELS, LABELS.bool(), LABELS[:, None].float(), LABELS.numpy()):
        assert_same(lw.fit(network(1), (X, targets), word), expected)


def test_whole_numbers_are_real_targets() -> None:
    assert_same(
        lw.fit(network(), (X, REAL.round().long()), NOISE), lw.fit(network(), (X, REAL.round()), NOISE)
    )  # fmt: skip


def test_counts_with_exposures_survive_collation() -> None:
    counts, exposures = LABELS[:, None].double(), REAL[:, :1].abs() + 0.1
    rows = [(X[i], (counts[i], exposures[i])) for i in range(N)]
    expected = lw.fit(network(1), [(X, (counts, exposures))], "count")
    assert_same(lw.fit(network(1), DataLoader(rows, batch_size=4), "count"), expected)
    assert_same(lw.fit(network(1), (X, (counts, exposures)), "count"), expected)


def test_ignored_labels_are_as_good_as_absent() -> None:
    labels = LABELS.clone()
    labels[[2, 5]] = -100
    kept = [i for i in range(N) if i not in (2, 5)]
    found, expected = fitted((X, labels)), fitted((X[kept], LABELS[kept]))
    for a, b in zip(answers(found), answers(expected), strict=True):
        assert_close(a, b, rtol=RTOL)


# --- inputs -------------------------------------------------------------------------------------------------


def test_double_data_are_converted_for_a_single_precision_model(structure: str) -> None:
    model = network().float()
    found, expected = fitted((X, LABELS), structure, model), fitted((X.float(), LABELS), structure, model)
    assert found.outputs(X).mean.dtype == torch.float32
    for a, b in zip(answers(found, X), answers(expected, X.float()), strict=True):
        assert torch.equal(a, b)


def test_single_data_are_converted_for_a_double_precision_model() -> None:
    assert_same(fitted((X.float(), LABELS)), fitted((X.float().double(), LABELS)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, C)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        h = self.embed(tokens)
        h = h if mask is None else h * mask[..., None]
        return SimpleNamespace(logits=self.head(h.mean(1) * scale), loss=None, hidden=h, attentions=())


TOKENS = torch.arange(4 * N).reshape(N, 4) % 5
MASK = (torch.arange(4) < 3).expand(N, 4)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_integer_inputs_stay_integers(dtype: torch.dtype, structure: str) -> None:
    torch.manual_seed(2)
    model = Words().double()
    expected = lw.fit(model, (TOKENS, LABELS), "classification", structure=structure)
    found = lw.fit(model, [(TOKENS[i : i + 2].to(dtype), LABELS[i : i + 2]) for i in range(0, N, 2)], "classification",
                   structure=structure)  # fmt: skip
    assert_close(found.outputs(TOKENS).cov, expected.outputs(TOKENS.to(dtype)).cov, rtol=RTOL)


def test_several_inputs_by_position_and_by_name(structure: str) -> None:
    torch.manual_seed(2)
    model = Words().double()
    plain = lw.fit(model, [((TOKENS, MASK, 2.0), LABELS)], "classification", structure=structure)
    cov = plain.outputs((TOKENS, MASK, 2.0)).cov
    named = {"tokens": TOKENS, "mask": MASK, "scale": 2.0}
    half = (
        {"tokens": TOKENS[:5], "mask": MASK[:5], "scale": 2.0},
        {"tokens": TOKENS[5:], "mask": MASK[5:], "scale": 2.0},
    )
    ways: list[Any] = [
        ((TOKENS, MASK, 2.0), LABELS),
        (named, LABELS),
        [{**half[0], "labels": LABELS[:5]}, Encoding(**half[1], labels=LABELS[5:])],
        [[[TOKENS, MASK, 2.0], LABELS]],
    ]
    for data in ways:
        found = lw.fit(model, data, "classification", structure=structure)
        assert_close(found.outputs(named).cov, cov, rtol=RTOL)
        assert_close(found.outputs(Encoding(named)).cov, cov, rtol=RTOL)


# --- models -------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A wrapper that prefixes every name, as data-parallel ones do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_a_wrapper_changes_only_the_names(structure: str) -> None:
    expected = fitted((X, LABELS), structure)
    for wrapper in (Wrapped(network()), nn.DataParallel(network())):
        found = fitted((X, LABELS), structure, wrapper)
        assert list(found.layout) == [f"module.{name}" for name in expected.layout]
        assert_same(found, expected)
    last = lw.fit(Wrapped(network()), (X, LABELS), "classification", params="last_layer")
    assert list(last.layout) == ["module.2.weight", "module.2.bias"]


def test_a_compiled_model_is_its_module() -> None:
    expected = fitted((X, LABELS))
    found = fitted((X, LABELS), model=torch.compile(network()))  # compiled at its first call, which never comes
    assert list(found.layout) == list(expected.layout)
    assert_same(found, expected)


@dataclass
class Output:
    loss: Any
    logits: Tensor
    past: tuple[Any, ...] = ()


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Output:
        return Output(None, self.body(x))


def test_logits_are_taken_from_an_object(structure: str) -> None:
    assert_same(fitted((X, LABELS), structure, WithLogits()), fitted((X, LABELS), structure))


@pytest.mark.parametrize("memory", ["32KB", "1MB", 20_000])
def test_a_small_budget_changes_nothing(memory: Any, structure: str) -> None:
    many, labels = numbers(300, D, seed=3), torch.arange(300) % C
    plain = lw.fit(network(), [(many, labels)], "classification", structure=structure)
    small = lw.fit(network(), [(many, labels)], "classification", structure=structure, memory=memory)
    assert_same(small, plain)


def test_rows_in_pieces_equal_rows_at_once(structure: str) -> None:
    """Below the smallest chunk a budget gives: one row at a time."""
    plain = fitted((X, LABELS), structure)
    tiny = replace(plain, chunk_floats=1)
    assert_same(tiny, plain)
    assert_same(tiny.updated((X, LABELS)), plain.updated((X, LABELS)))
    assert_close(tiny.joint_outputs(X).cov, plain.joint_outputs(X).cov, rtol=RTOL)
    assert_close(tiny.functions(2)(X), plain.functions(2)(X), rtol=RTOL)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=str)
def test_half_precision_models_are_summed_in_more(dtype: torch.dtype, rtol: float, structure: str) -> None:
    half = network().to(dtype)
    many, labels = numbers(64, D, seed=3), torch.arange(64) % C
    found = fitted((many, labels), structure, half)
    expected = fitted((many.to(dtype).float(), labels), structure, network().to(dtype).float())
    assert found.outputs(X).cov.dtype == found.marginal_variance().dtype == torch.float32
    assert found.log_evidence().dtype == torch.float64
    assert_close(found.outputs(X).cov, expected.outputs(X.to(dtype).float()).cov, rtol=rtol)
    assert_close(found.marginal_variance(), expected.marginal_variance(), rtol=rtol)
    assert_close(found.predict(X).probs, expected.predict(X.to(dtype).float()).probs, rtol=rtol)


def test_mixed_precision_models_keep_their_dtypes() -> None:
    model = network()
    model[0].float()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return self.body[2](self.body[1](self.body[0](x.float())).double())

    found, expected = fitted((X, LABELS), model=Mixed()), fitted((X, LABELS))
    assert_close(found.outputs(X).cov, expected.outputs(X).cov, rtol=1e-4)
