"""The loop: epochs of steps, what is measured and written down between them, and how it goes on after a kill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lapwing.data import ModelInput, as_batches
from lapwing.errors import InputError, LapwingError, NumericalError, StorageError, located
from lapwing.posterior import Epoch
from lapwing.runtime import distributed
from lapwing.runtime.progress import bar
from lapwing.runtime.sandbox import random_state_kept, seed_everything, set_states, states_as_tensors
from lapwing.storage import Checkpoint, InStep, as_nodes, from_nodes, training_binding
from lapwing.train.batch_loss import BatchLoss
from lapwing.train.kernels import refuse_autocast
from lapwing.train.ranks import average_gradients, start_alike
from lapwing.train.settings import Settings
from lapwing.train.stream import Stream
from lapwing.train.validation import measured

_TERMS = ("log_lik", "penalty", "kl")


class AfterEpoch:
    """What else happens at the end of an epoch; nothing, unless a method has more to do."""

    def __call__(self, number: int) -> Mapping[str, Any]:
        """Fields of the epoch's record."""
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return


@dataclass(eq=False)
class _Position:
    """Where a run is: all that changes besides weights and optimizer."""

    epoch: int = 0
    done: int = 0  # batches of the epoch
    seed: int | None = None  # of the epoch
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # S · terms, and S
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
    best: dict[str, Tensor] | None = None  # weights of the best held-out NLL, where training may stop early
    stopped: bool = False


class Loop:
    """One run of training in place."""

    def __init__(
        self,
        loss: BatchLoss,
        stream: Stream,
        settings: Settings,
        what: str,
        bound_to: Mapping[str, Any],
        generator: torch.Generator,
        after_epoch: AfterEpoch | None = None,
    ) -> None:
        self.loss, self.stream, self.settings, self.what = loss, stream, settings, what
        self.bound_to, self.after_epoch = bound_to, after_epoch or AfterEpoch()
        self.optimizer, self.schedule = settings.made(loss)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.seeds = torch.Generator().manual_seed(int(torch.randint(1 << 48, (), generator=generator).item()))
        self.at = _Position()
        self._loaders: list[Tensor] = []
        self._found_random: dict[str, Any] | None = None
        held_out = settings.validation
        self.held_out = None if held_out is None else as_batches(held_out, "validation", loss.columns)

    def run(self) -> tuple[Epoch, ...]:
        """The records of all epochs. A loss that is not finite leaves the weights of the last good step."""
        with random_state_kept(), _in_training(self.loss.model):
            start_alike([*self.loss.model.state_dict().values()])
            with self._keeper() as keeper:
                self._go_on_from(keeper)
                self._epochs(keeper)
        return tuple(self.at.history)

    # --- epochs and steps ---------------------------------------------------------------------------

    def _epochs(self, keeper: Checkpoint | None) -> None:
        total = self.settings.epochs * len(self.stream)
        with bar(range(total), total=total, what=self.what, progress=self.settings.progress) as shown:
            shown.update(self.at.epoch * len(self.stream) + self.at.done)
            while self.at.epoch < self.settings.epochs and not self.at.stopped:
                started = monotonic() - self.at.seconds
                for _ in self._steps():
                    shown.update(1)
                    self.at.seconds = monotonic() - started
                    if keeper is not None and not distributed.is_distributed():
                        keeper.offer(self._state)
                self._finish_epoch(started)
                record = self.at.history[-1]
                shown.set_postfix_str(f"epoch {record.epoch + 1}/{self.settings.epochs}, loss {record.loss:.4g}")
                if keeper is not None:
                    keeper.offer(self._state)
        if self.at.best is not None:
            self.loss.load_state_dict(self.at.best)

    def _steps(self) -> Iterator[None]:
        at = self.at
        if at.seed is None:
            at.seed = int(torch.randint(1 << 48, (), generator=self.seeds).item())
            self._loaders = [g.get_state() for g in self.stream.generators()]
        seed_everything(at.seed + distributed.rank())
        for generator, state in zip(self.stream.generators(), self._loaders, strict=True):
            generator.set_state(state)
        for batch in self._batches():
            self._step(*batch) if batch is not None else self._step_without_data()
            yield

    def _batches(self) -> Iterator[tuple[ModelInput, Any] | None]:
        """Those that are left of the epoch. Of several ranks, one that has none left goes on until all have none."""
        skip, found = self.at.done, self._found_random
        for number, batch in enumerate(self.stream.epoch(self.at.epoch)):
            if number >= skip:
                if self._any_left(True):
                    yield batch
            elif number == skip - 1 and found is not None:
                set_states(found)
        self._found_random = None
        while self._any_left(False):
            yield None

    def _any_left(self, here: bool) -> bool:
        return any(distributed.gathered(here)) if distributed.is_distributed() else here

    def _step(self, x: ModelInput, y: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        where = f"epoch {self.at.epoch}, batch {self.at.done}"
        with located(where):
            refuse_autocast(self.what)
            self.loss.of_batch(x, y).backward()
        average_gradients(self.parameters, x.n)
        self._update(where)
        self._count(x.n)

    def _step_without_data(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        average_gradients(self.parameters, 0)
        self._update(f"epoch {self.at.epoch}")
        self.at.done += 1

    def _update(self, where: str) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(g).double().cpu() for g in gradients])
        if not bool(torch.isfinite(norms).all()):
            raise NumericalError(
                f"{where}: the gradient is not finite, though the loss is. The weights are those of the last good "
                "step. Lower the learning rate, clip gradients (clip=1.0), or check the scale of the inputs."
            )
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        if self.settings.schedule_every == "step" and self.schedule is not None:
            self._step_schedule(float(self.loss.parts.penalty - self.loss.parts.log_lik))

    def _count(self, n: int) -> None:
        parts = self.loss.parts
        for i, name in enumerate(_TERMS):
            self.at.sums[i] += n * float(parts[name])
        self.at.sums[3] += n
        self.at.done += 1

    # --- the end of an epoch ---------------------------------------------------------------------------

    def _finish_epoch(self, started: float) -> None:
        at = self.at
        sums = distributed.total(torch.tensor(at.sums, dtype=torch.float64)).tolist()
        if not sums[3]:
            raise InputError(
                "The data gave no batch: the loader or data set is empty. Check the sampler and the split."
            )
        log_lik, penalty, kl = (value / sums[3] for value in sums[:3])
        start_alike([*self.loss.model.buffers()])
        lr = float(self.optimizer.param_groups[0]["lr"])
        more = self.after_epoch(at.epoch)
        found = {} if self.held_out is None else measured(self.loss, self.held_out)
        seconds = monotonic() - started
        value = penalty - log_lik + self.loss.beta * kl
        at.history.append(Epoch(at.epoch, value, log_lik, penalty, kl, lr, seconds, found, **more))
        if self.settings.schedule_every == "epoch":
            self._step_schedule(found.get("nll", value))
        self._note_best()
        at.epoch, at.done, at.seed, at.sums, at.seconds = at.epoch + 1, 0, None, [0.0] * 4, 0.0
        if self.settings.callback is not None:
            self.settings.callback(at.history[-1])

    def _step_schedule(self, value: float) -> None:
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(value)
        elif self.schedule is not None:
            self.schedule.step()

    def _note_best(self) -> None:
        patience, at = self.settings.patience, self.at
        if patience is None:
            return
        values = [record.validation["nll"] for record in at.history]
        best = values.index(min(values))
        if best == len(values) - 1:
            at.best = deepcopy(self.loss.state_dict())
        at.stopped = len(values) - 1 - best >= patience

    # --- what is written down ----------------------------------------------------------------------------

    @contextmanager
    def _keeper(self) -> Iterator[Checkpoint | None]:
        if self.settings.checkpoint is None:
            yield None
            return
        kind = InStep if distributed.is_distributed() else Checkpoint
        arguments = {
            **self.bound_to,
            "epochs": self.settings.epochs,
            "lr": self.settings.lr,
            "multiplier": self.settings.multiplier,
            "optimizer": type(self.optimizer).__name__,
            "schedule": type(self.schedule).__name__,
            "data (their number)": self.loss.n_data,
            "data (their batches)": len(self.stream),
        }
        bound_to = training_binding(self.loss.model, arguments)
        device = self.loss.number.device
        keeper = kind.of_training(self.settings.checkpoint, self.settings.every, bound_to, device)
        with keeper.going_on():
            yield keeper

    def _state(self) -> dict[str, Any]:
        at = self.at
        return {
            "epoch": at.epoch,
            "batches": at.done,
            "seed": at.seed,
            "sums": at.sums,
            "seconds": at.seconds,
            "history": [asdict(record) for record in at.history],
            "best": as_nodes(at.best, "weights"),
            "stopped": at.stopped,
            "loss": as_nodes(dict(self.loss.state_dict()), "weights"),
            "optimizer": as_nodes(self.optimizer.state_dict(), "optimizer"),
            "schedule": None if self.schedule is None else as_nodes(self.schedule.state_dict(), "schedule"),
            "seeds": self.seeds.get_state(),
            # Between epochs the loader's own generators stand where the last one left them.
            "loaders": self._loaders if at.done else [g.get_state() for g in self.stream.generators()],
            "random": states_as_tensors(),
            "after_epoch": as_nodes(self.after_epoch.state(), "after_epoch"),
        }

    def _go_on_from(self, keeper: Checkpoint | None) -> None:
        state = None if keeper is None else keeper.resumed()
        if state is None:
            return
        at = self.at
        at.epoch, at.done, at.seed, at.seconds = state["epoch"], state["batches"], state["seed"], state["seconds"]
        at.sums, at.stopped = list(state["sums"]), state["stopped"]
        at.history = [Epoch(**{**record, "precisions": tuple(record["precisions"])}) for record in state["history"]]
        at.best = from_nodes(state["best"])
        try:
            self.loss.load_state_dict(from_nodes(state["loss"]))
            self.optimizer.load_state_dict(from_nodes(state["optimizer"]))
            if self.schedule is not None:
                self.schedule.load_state_dict(from_nodes(state["schedule"]))
        except LapwingError:
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise StorageError(
                f"checkpoint: the unfinished training there was of another optimizer or schedule ({error!s:.200}). Go "
                "on with the same, or remove the directory to start anew."
            ) from error
        self.seeds.set_state(state["seeds"].cpu())
        self._loaders = [s.cpu() for s in state["loaders"]]
        for generator, found in zip(self.stream.generators(), self._loaders, strict=True):
            generator.set_state(found)
        self.after_epoch.restore(from_nodes(state["after_epoch"]))
        self._found_random = state["random"] if at.done else None


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """In training mode inside, unless it is already: layers left in eval mode then stay so. Modes and gradients are as
    they were afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    if not model.training:
        model.train()
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p, gradient in gradients:
            p.grad = gradient
