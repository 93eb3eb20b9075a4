"""Processes under torch.distributed for the tests, and what each of them does.

A worker is a function of the number of ranks; every rank runs it. Files serve as the meeting place, so that no two
tests want the same port. A reference is computed by rank 0 alone, on all the data.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.runtime import distributed
from lapwing.runtime.distributed import heartbeat
from lapwing.storage import InStep
from lapwing.tuning.evidence import joint

STRUCTURES = ("full", "block", "kron", "ekfac", "diag", "lowrank", "gp")


def run(work: Callable[..., None], world: int, folder: Path, *args: Any, timeout: float = 300) -> list[str]:
    """What each rank said at its end: "" when all was well, else its error."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=_main, args=(work, r, world, str(folder), args)) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    said = [folder / f"rank{r}" for r in range(world)]
    return [path.read_text() if path.exists() else "it said nothing" for path in said]


def _main(work: Callable[..., None], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    error, started = "", monotonic()
    try:
        work(*args)
    except BaseException as problem:
        error = "".join(traceback.format_exception(problem)) + f"after {monotonic() - started:.0f} s"
    Path(folder, f"rank{rank}").write_text(error)
    os._exit(0)  # what an orderly end of torch does after a dead rank is not ours to test


# --- models and data ----------------------------------------------------------------------------------------------


class Attended(nn.Module):
    """A sequence model with raw parameters, an embedding and a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.query = nn.Parameter(torch.randn(4))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embedding(tokens))
        return self.head((torch.softmax(h @ self.query, 1)[..., None] * h).sum(1))


def _mlp(out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, out))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "classes": (lambda: _mlp(3), "classification"),
    "targets": (lambda: _mlp(2), "regression"),
    "binary": (lambda: _mlp(1), "binary"),
    "counts": (lambda: _mlp(1), "count"),
    "images": (_conv, "classification"),
    "tokens": (Attended, "classification"),
}


def problem(name: str, n: int = 23) -> tuple[nn.Module, Tensor, Tensor, str]:
    torch.manual_seed(0)
    build, likelihood = MODELS[name]
    model = build().double().eval()
    if name == "images":
        X = torch.randn(n, 1, 5, 5).double()
    else:
        X = torch.randint(7, (n, 4)) if name == "tokens" else torch.randn(n, 3).double()
    if likelihood == "regression":
        return model, X, torch.randn(n, 2).double(), likelihood
    if likelihood == "binary":
        return model, X, torch.randint(2, (n,)).double(), likelihood
    if likelihood == "count":
        return model, X, torch.randint(4, (n, 1)).double(), likelihood
    return model, X, torch.randint(3, (n,)), likelihood


def shard(X: Tensor, Y: Tensor, cuts: list[int] | None = None) -> list[tuple[Tensor, Tensor]]:
    """This rank's rows as batches of four: ranks have unequal numbers of data and of batches."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cuts = [0, *(round(len(X) * (i / world) ** 1.5) for i in range(1, world)), len(X)] if cuts is None else cuts
    rows = torch.arange(cuts[rank], cuts[rank + 1])
    return [(X[some], Y[some]) for some in rows.split(4) if len(some)]


def check_equal(
    found: lw.Posterior, reference: Callable[[], lw.Posterior], x: Tensor, what: str, rtol: float = 1e-12
) -> None:
    """The same as one process found, on rank 0; and the same bits on all ranks.

    Errors are relative to the largest entry; those of logs are the relative errors of what they are the logs of.
    """
    values = dict(_values(found, x))
    for other in distributed.gathered(values):
        assert all(torch.equal(values[name], other[name]) for name in values), f"{what}: ranks differ"
    if dist.get_rank() == 0:
        with distributed.alone():
            expected = dict(_values(reference(), x))
        for name, value in values.items():
            largest = 1.0 if name.startswith("log ") else expected[name].abs().max().clamp(min=1e-300)
            error = float((value - expected[name]).abs().max() / largest)
            assert error < rtol, f"{what}: {name} is off by {error:.2g}"


def _values(posterior: lw.Posterior, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "n", torch.tensor(float(posterior.n_data))
    bound = None if posterior.refinement is None else posterior.refinement.elbo
    yield "evidence", posterior.log_evidence().detach() if bound is None else torch.tensor(bound, dtype=torch.float64)
    yield "log precisions", posterior.prior.precisions.detach().log()
    if isinstance(posterior.likelihood, lw.Gaussian):
        yield "log noise", posterior.likelihood.resolved().detach().log()
    if posterior.expansion is not None:
        yield "linear mode", posterior.linear_mode()
    yield "gradient", posterior.data_gradient()
    yield "var", posterior.outputs(x).var
    yield (
        "prediction",
        posterior.predict(x).log_prob(torch.zeros_like(posterior.outputs(x).mean[:, 0]).long())
        if (isinstance(posterior.likelihood, lw.Categorical))
        else posterior.outputs(x).mean,
    )


# --- what ranks do ------------------------------------------------------------------------------------------------


def fits_equal_one_process(names: list[str], structures: list[str]) -> None:
    for name, structure in product(names, structures):
        given = problem(name)
        found = _fitted(*given, structure, shard(*given[1:3]))
        check_equal(found, partial(_fitted, *given, structure, given[1:3]), given[1][:3], f"{name}, {structure}")


def tuning_equals_one_process(names: list[str], structures: list[str], groups: str | None) -> None:
    for name, structure in product(names, structures):
        given = problem(name)
        found = _tuned(*given, structure, shard(*given[1:3]), groups)
        reference = partial(_tuned, *given, structure, given[1:3], groups)
        check_equal(found, reference, given[1][:3], f"{name}, {structure}, groups {groups}")


def _fitted(model: nn.Module, X: Tensor, Y: Tensor, likelihood: str, structure: str | lw.GP, data: Any) -> lw.Posterior:
    return lw.fit(model, data, likelihood, structure=structure)


def _tuned(
    model: nn.Module, X: Tensor, Y: Tensor, likelihood: str, structure: str, data: Any, groups: str | None
) -> lw.Posterior:
    return lw.tune(lw.fit(model, data, likelihood, structure=structure), data, groups=groups)


def held_out_data_are_spread_as_well() -> None:
    model, X, Y, likelihood = problem("classes", 40)
    posterior = lw.fit(model, shard(X[:20], Y[:20]), likelihood, structure="kron")
    found = lw.tune(posterior, by="validation", validation=shard(X[20:], Y[20:]))

    def reference() -> lw.Posterior:
        whole = lw.fit(model, (X[:20], Y[:20]), likelihood, structure="kron")
        return lw.tune(whole, by="validation", validation=(X[20:], Y[20:]))

    check_equal(found, reference, X[:3], "validation")


def other_ways_to_fit() -> None:
    model, X, Y, likelihood = problem("classes")
    more = lw.fit(model, shard(X[:12], Y[:12]), likelihood, structure="kron").updated(shard(X[12:], Y[12:]))
    whole = lw.fit(model, shard(X, Y), likelihood, params="last_layer", structure="full")
    few = lw.fit(model, shard(X, Y), likelihood, params=lw.Subnetwork("variance", k=7), structure="full")
    check_equal(more, lambda: lw.fit(model, (X, Y), likelihood, structure="kron"), X[:3], "updated")
    check_equal(
        whole,
        lambda: lw.fit(model, (X, Y), likelihood, params="last_layer", structure="full"),
        X[:3],
        "last layer",
    )
    check_equal(
        few,
        lambda: lw.fit(model, (X, Y), likelihood, params=lw.Subnetwork("variance", k=7), structure="full"),
        X[:3],
        "subnetwork",
    )
    sampled = lw.fit(model, shard(X, Y), likelihood, fisher="mc", structure="diag")
    assert len({float(v.sum()) for v in distributed.gathered(sampled.marginal_variance())}) == 1


def refinement_equals_one_process(names: list[str], structures: list[str], options: dict[str, Any]) -> None:
    for name, structure in product(names, structures):
        given = problem(name)
        found = _refined(*given, structure, shard(*given[1:3]), options)
        reference = partial(_refined, *given, structure, given[1:3], options)
        check_equal(found, reference, given[1][:3], f"{name}, {structure}, refined {options}")
        assert len({str(report) for report in distributed.gathered(found.refinement)}) == 1
        fewer = shard(given[1][1:], given[2][1:])
        posterior = _fitted(*given, structure, shard(*given[1:3]))
        _assert_raises(lw.InputError, "refine got 22 data", partial(lw.refine, posterior, fewer, **options))


def _refined(
    model: nn.Module, X: Tensor, Y: Tensor, likelihood: str, structure: str, data: Any, options: dict[str, Any]
) -> lw.Posterior:
    return lw.refine(lw.fit(model, data, likelihood, structure=structure), data, **options)


GPS = (
    lw.GP(9),
    lw.GP(9, points="informative", mean="newton"),
    lw.GP(9, sod_scale="prior"),
    lw.GP(9, sod_scale="none", coupling="independent"),
    lw.GP(9, coupling="diag"),
    lw.GP(9, method="nystrom", rank=5),
    lw.GP(coupling="independent"),
    lw.GP(coupling="diag"),
    lw.GP(40),
)
SPARSE = (lw.GP(9, method="nystrom"), lw.GP(9, method="inducing"))


def gps_equal_one_process(names: list[str], gps: list[lw.GP], cuts: list[int] | None, rtol: float = 1e-12) -> None:
    for name, gp in product(names, gps):
        if name == "targets" and gp.points == "informative":
            continue  # all data are
        given = problem(name)
        found = _fitted(*given, gp, shard(*given[1:3], cuts))
        check_equal(found, partial(_fitted, *given, gp, given[1:3]), given[1][:3], f"{name}, {gp}", rtol)


class Interrupted(BaseException):
    """As Ctrl-C is."""


def _stopped_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """On the last rank, the function until it is called for so many times; then its process would end."""
    calls = count(1)

    def stopping(*args: Any) -> Any:
        if next(calls) == number and dist.get_rank() == dist.get_world_size() - 1:
            raise Interrupted
        return function(*args)

    return stopping


def interrupted_tuning_goes_on(turn: int) -> None:
    """Stopped before a turn is written by all ranks, and before all have given up the last: to the same bits."""
    model, X, Y, likelihood = problem("classes")
    data = shard(X, Y)
    posterior = lw.fit(model, data, likelihood, structure="kron", params="last_layer")
    whole = lw.tune(posterior, data, groups="layer")
    folder = Path(distributed.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "", 0))
    others = data[:: -1 if dist.get_rank() == dist.get_world_size() - 1 else 1]
    for owner, name in ((InStep, "write"), (InStep, "_promote_next"), (joint, "find_mode")):
        keep = partial(lw.tune, posterior, data, groups="layer", checkpoint=folder, every=0)
        with mock.patch.object(owner, name, _stopped_at(turn, getattr(owner, name))):
            _assert_raises((Interrupted, lw.RankError), "", keep)
        assert list(folder.glob(f"rank{dist.get_rank()}/*tuning.lapwing"))
        refused = partial(lw.tune, posterior, others, groups="layer", checkpoint=folder)
        _assert_raises((lw.StorageError, lw.RankError), "or their order", refused)
        values, again = (dict(_values(found, X[:3])) for found in (whole, keep()))
        assert all(torch.equal(value, again[key]) for key, value in values.items()), f"stopped in {name}"
        assert not list(folder.glob(f"rank{dist.get_rank()}/*"))
    distributed.gathered("done")
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    check_equal(whole, partial(_last_layer_tuned, model, X, Y, likelihood), X[:3], "checkpoint")


def _last_layer_tuned(model: nn.Module, X: Tensor, Y: Tensor, likelihood: str) -> lw.Posterior:
    fitted = lw.fit(model, (X, Y), likelihood, structure="kron", params="last_layer")
    return lw.tune(fitted, (X, Y), groups="layer")


def rows_and_matrices_meet() -> None:
    """One rank's data are fewer than the weights and are kept as rows; the other's are a matrix."""
    model, X, Y, likelihood = problem("targets", 60)
    found = lw.fit(model, shard(X, Y, [0, 4, *[60] * (dist.get_world_size() - 1)]), likelihood, structure="full")
    check_equal(found, lambda: lw.fit(model, (X, Y), likelihood, structure="full"), X[:3], "full")


def a_rank_may_have_no_data(structures: list[str]) -> None:
    model, X, Y, likelihood = problem("classes")
    for structure in structures:
        data = shard(X, Y, [0, *[0] * (dist.get_world_size() - 1), len(X)])
        found = lw.fit(model, data, likelihood, structure=structure)
        found = lw.tune(found, data) if structure == "kron" else lw.refine(found, data)

        def reference(s: str = structure) -> lw.Posterior:
            alone = lw.fit(model, (X, Y), likelihood, structure=s)
            return lw.tune(alone, (X, Y)) if s == "kron" else lw.refine(alone, (X, Y))

        check_equal(found, reference, X[:3], f"no data, {structure}")


def training_equals_one_process() -> None:
    """Batches of all ranks together are one batch: the same steps, so the same optimum."""
    torch.manual_seed(0)
    X, Y = torch.randn(23, 3).double(), torch.randint(3, (23,))

    def network() -> nn.Module:
        torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
        return nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 3)).double()

    rows = slice(0, 9) if dist.get_rank() == 0 else slice(9, 23)
    ways = {
        "map": lw.train.map,
        "variational_laplace": partial(lw.train.variational_laplace, fisher="exact", multiplier=1000),
        "marglik": partial(lw.train.marglik, steps=5, structure="full", fisher="exact"),
    }
    for name, train in ways.items():
        sgd = partial(train, likelihood="classification", epochs=8, optimizer=lambda g: torch.optim.SGD(g, lr=0.05))
        found = sgd(network(), [(X[rows], Y[rows])])
        theta = torch.cat([p.detach().flatten() for p in found.model.parameters()])
        variances = found.posterior.marginal_variance()
        assert all(torch.equal(theta, other) for other in distributed.gathered(theta)), f"{name}: ranks differ"
        if dist.get_rank() == 0:
            with distributed.alone():
                alone = sgd(network(), [(X, Y)])
                expected_variances = alone.posterior.marginal_variance()
            expected = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
            torch.testing.assert_close(theta, expected, rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(variances, expected_variances, rtol=1e-8, atol=0)
    uneven = [(X[i : i + 4], Y[i : i + 4]) for i in range(rows.start, rows.stop, 4)]
    run = lw.train.mean_field(DistributedDataParallel(network()), uneven, "classification", epochs=2, multiplier=1000)
    ends = distributed.gathered([p.detach() for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def two_of_three_ranks_have_data() -> None:
    """Run on three ranks or more."""
    for structure in STRUCTURES:
        given = problem("classes")
        n, world = len(given[1]), dist.get_world_size()
        found = _fitted(*given, structure, shard(*given[1:3], [0, 9, *[n] * (world - 1)]))
        check_equal(found, partial(_fitted, *given, structure, given[1:3]), given[1][:3], structure)


def padding_is_counted_once() -> None:
    model, X, Y, likelihood = problem("classes")
    sampler = DistributedSampler(TensorDataset(X, Y), shuffle=True)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)
    found = lw.tune(lw.fit(DistributedDataParallel(model), loader, likelihood, structure="kron"))
    assert found.n_data == len(X)

    def reference() -> lw.Posterior:
        return lw.tune(lw.fit(model, (X, Y), likelihood, structure="kron"))

    check_equal(found, reference, X[:3], "sampler")


def wrapped_models_take_the_buffers_of_rank_0() -> None:
    model, X, Y, likelihood = problem("images")
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():
        model[1].running_mean += dist.get_rank()  # as after an epoch of training
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    found = lw.fit(wrapped, shard(X, Y), likelihood, structure="diag")
    check_equal(found, lambda: lw.fit(model, (X, Y), likelihood, structure="diag"), X[:3], "buffers")
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())
    with torch.no_grad():
        model[4].weight += dist.get_rank()
    _assert_raises(lw.RankError, "'4.weight' on rank 1", lambda: lw.fit(wrapped, shard(X, Y), likelihood))


def sharded_weights_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, X, Y, likelihood = problem("classes")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    _assert_raises(lw.InputTypeError, "is a DTensor", lambda: lw.fit(model, shard(X, Y), likelihood))


def an_error_on_one_rank_is_everyones() -> None:
    model, X, Y, likelihood = problem("classes")
    bad = X.clone()
    bad[-1, 0] = torch.nan
    last = dist.get_rank() == dist.get_world_size() - 1
    expected, words = (lw.InputError, "batch") if last else (lw.RankError, f"rank {dist.get_world_size() - 1}: Input")
    _assert_raises(expected, words, lambda: lw.fit(model, shard(bad, Y), likelihood, structure="diag"))
    posterior = lw.fit(model, shard(X, Y), likelihood, structure="diag")  # and the group is as good as before
    assert posterior.n_data == len(X)
    dense = lw.EM(solver=lw.Cholesky())
    _assert_raises(lw.StructureError, "one process", lambda: lw.tune(posterior, shard(X, Y), by=dense))
    nobody = [0] * (dist.get_world_size() + 1)
    _assert_raises(lw.InputError, "on any rank", lambda: lw.fit(model, shard(X, Y, nobody), likelihood))


def one_rank_asks_alone() -> None:
    """Predictions, evidence and diagnosis need nobody else."""
    model, X, Y, likelihood = problem("classes")
    posterior = lw.fit(model, shard(X, Y), likelihood)
    if dist.get_rank() == 0:
        posterior.predict(X[:2])
        posterior.log_evidence()
        posterior.diagnose()


def _assert_raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], Any]
) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"{kind} was not raised")


QUICK: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (fits_equal_one_process, (["classes"], [*STRUCTURES])),
    (fits_equal_one_process, (["images"], ["ekfac"])),
    (tuning_equals_one_process, (["targets"], ["full"], "layer")),
    (tuning_equals_one_process, (["targets"], ["diag"], "tensor")),
    (tuning_equals_one_process, (["classes"], ["kron"], "one")),
    (tuning_equals_one_process, (["images"], ["block", "kron"], None)),  # normalised groups, some of them switched off
    (tuning_equals_one_process, (["images"], ["full"], "layer")),  # rows; a group of 0.04 effective dimensions
    (held_out_data_are_spread_as_well, ()),
    (refinement_equals_one_process, (["images"], ["kron"], {})),
    (refinement_equals_one_process, (["targets"], ["full"], {"memory": 800})),  # the network visited in every step
    (refinement_equals_one_process, (["classes"], ["diag"], {"by": "vi"})),
    (gps_equal_one_process, (["classes"], [*GPS[:2], *SPARSE], None)),
    (other_ways_to_fit, ()),
    (rows_and_matrices_meet, ()),
    (a_rank_may_have_no_data, (["full", "kron"],)),
    (interrupted_tuning_goes_on, (3,)),
    (padding_is_counted_once, ()),
    (wrapped_models_take_the_buffers_of_rank_0, ()),
    (an_error_on_one_rank_is_everyones, ()),
    (one_rank_asks_alone, ()),
]


def several(checks: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """One start of the processes for many checks."""
    for check, args in checks:
        check(*args)


def dies_while_fitting(dead: int, batch: int, silence: float) -> None:
    """Rank `dead` is killed when it is asked for a batch; the others must say so."""
    heartbeat._TIMEOUT = silence
    model, X, Y, likelihood = problem("classes")

    class Fatal:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for number, pair in enumerate(shard(X, Y)):
                if dist.get_rank() == dead and number == batch:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

    lw.fit(model, Fatal(), likelihood, structure="kron")


def suspended_while_fitting(silence: float, pause: float) -> None:
    """All ranks are stopped for longer than a silent one is waited for, as by a scheduler, and go on."""
    heartbeat._TIMEOUT = silence
    model, X, Y, likelihood = problem("classes")
    pids = distributed.gathered(os.getpid())

    class Slow:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for pair in shard(X, Y):
                sleep(1.0)
                yield pair

    if dist.get_rank() == 0:
        stop = "; ".join(f"kill -STOP {pid}; sleep 1" for pid in reversed(pids))
        go = "; ".join(f"kill -CONT {pid}; sleep 1" for pid in pids)
        subprocess.Popen(f"sleep 1; {stop}; sleep {pause}; {go}", shell=True)
    started = monotonic()
    assert lw.fit(model, Slow(), likelihood, structure="diag").n_data == len(X)
    assert monotonic() - started > pause


def dies_before_fitting(dead: int) -> None:
    if dist.get_rank() == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    model, X, Y, likelihood = problem("classes")
    lw.fit(model, shard(X, Y), likelihood, structure="kron")
