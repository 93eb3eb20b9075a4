"""Every normalisation a forward pass performs, seen and, where asked, performed with other constants.

torch's own norms are functions of (input, statistics, eps), whichever module calls them. A norm written by hand shows
itself by the small constant it adds to a variance or a norm before dividing: x · rsqrt(mean(x²) + ε).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lapwing._types import Float, Tensor

_NORMS: tuple[Callable[..., Any], ...] = (
    F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm, F.normalize,
)  # fmt: skip
_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
_LARGEST_GUARD = 1e-3  # a larger constant is part of the model, not a guard against division by zero
_SHARPER = 1e-12


@dataclass(frozen=True, eq=False)
class NormCall:
    """One normalisation: the function, what it was called with, and the module that called it."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    path: str = ""

    @property
    def input(self) -> Tensor:
        return self.arguments["input"]

    @property
    def is_guard(self) -> bool:
        return self.function is torch.add

    @property
    def of_running_statistics(self) -> bool:
        """Whether constants stand in for the statistics of the input: BatchNorm in eval mode."""
        of_input = self.arguments.get("training", self.arguments.get("use_input_stats", True))
        return self.function in (F.batch_norm, F.instance_norm) and not of_input

    @property
    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """The scale and the shift applied after the normalisation."""
        return self.arguments.get("weight"), self.arguments.get("bias")

    def with_arguments(self, **arguments: Any) -> NormCall:
        return replace(self, arguments={**self.arguments, **arguments})

    def with_eps_times(self, factor: float) -> NormCall:
        name = "other" if self.is_guard else "eps"
        eps = self.arguments.get(name)
        return self if eps is None else self.with_arguments(**{name: eps * factor})

    def run(self) -> Any:
        return self.function(**self.arguments)


Treatment = Callable[[int, NormCall], NormCall]


class Watch(TorchFunctionMode):
    """Sees every normalisation of the passes made inside it, and performs what `treat` makes of each."""

    def __init__(self, treat: Treatment, path: Callable[[], str]) -> None:
        super().__init__()
        self.treat, self.path = treat, path
        self.calls: list[NormCall] = []

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _recognised(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        self.calls.append(replace(call, path=self.path()))
        return self.treat(len(self.calls) - 1, self.calls[-1]).run()


def _recognised(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormCall | None:
    if func in _NORMS:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        return NormCall(func, dict(bound.arguments))
    if func in _SUMS and len(args) == 2 and not kwargs and _is_guarded(*args):
        return NormCall(torch.add, {"input": args[0], "other": args[1]})
    return None


def _is_guarded(x: Any, c: Any) -> bool:
    """A variance or a norm, which is not negative, plus a small constant."""
    small = isinstance(x, Tensor) and isinstance(c, float) and 0 < c <= _LARGEST_GUARD
    return small and x.is_floating_point() and bool((x.detach() >= 0).all())


def as_it_is(number: int, call: NormCall) -> NormCall:
    return call


def sharpened(number: int, call: NormCall) -> NormCall:
    """The same norm with a negligible ε."""
    return call.with_eps_times(_SHARPER)


def of_the_batch(number: int, call: NormCall) -> NormCall:
    """The same norm with a negligible ε, and the statistics of its input in place of running ones.

    A group that is normalised by BatchNorm is of degree 0 then: J_g θ_g = 0.
    """
    call = sharpened(number, call)
    if not call.of_running_statistics:
        return call
    x, batch = call.input, call.function is F.batch_norm
    if x.numel() == (x.shape[1] if batch else x.shape[0] * x.shape[1]):  # one value has no variance
        return call
    flag = "training" if batch else "use_input_stats"
    return call.with_arguments(running_mean=None, running_var=None, **{flag: True})


class Rescaled:
    """What each norm must do when the parameters before it are multiplied by some k: follow the scale of its input.

    An input that is k times what it was gets ε k²; where running statistics normalise it, channel by channel, they
    become k m and k² v. Both leave the output what it was. Any other input is normalised as always. Several factors may
    be at work at once, each its own; who followed which is kept.
    """

    def __init__(self, factors: Sequence[float], before: Sequence[NormCall], tolerance: float) -> None:
        self.factors, self.before, self.tolerance = torch.tensor(factors, dtype=torch.float64), before, tolerance
        self.followers: dict[float, list[NormCall]] = {k: [] for k in factors}

    def __call__(self, number: int, call: NormCall) -> NormCall:
        if number >= len(self.before) or self.before[number].input.shape != call.input.shape:
            return call
        x, old = call.input, self.before[number].input
        if call.of_running_statistics:
            return self._with_statistics(call, x.transpose(0, 1).flatten(1), old.transpose(0, 1).flatten(1))
        for degree in (2, 1) if call.is_guard else (1,):
            k = float(self._followed(x.reshape(1, -1), old.reshape(1, -1), degree))
            if k != 1:
                self.followers[k].append(call)
                return call.with_eps_times(k ** (degree if call.is_guard else 2))
        return call

    def _with_statistics(self, call: NormCall, x: Float[Tensor, "c _"], old: Float[Tensor, "c _"]) -> NormCall:
        k = self._followed(x, old, degree=1)
        for factor in set(k.tolist()) - {1.0}:
            self.followers[factor].append(call)
        mean, var, eps = (call.arguments[name] for name in ("running_mean", "running_var", "eps"))
        k = k.to(mean)
        # (x − k m) / √(k² (v + ε)): the norm adds its own ε to what it is given.
        return call.with_arguments(
            running_mean=k * mean, running_var=torch.where(k == 1, var, k**2 * (var + eps) - eps)
        )

    def _followed(self, x: Float[Tensor, "c _"], old: Float[Tensor, "c _"], degree: int) -> Float[Tensor, " c"]:
        """Row by row, the factor k for which x = k^degree · old up to rounding; 1 when there is none."""
        x, old, factors = x.double(), old.double(), self.factors.to(x.device)
        ratio = (x * old).sum(1) / (old * old).sum(1)
        nearest = factors[(ratio[:, None] - factors**degree).abs().argmin(1)]
        off = (x - nearest[:, None] ** degree * old).abs().amax(1)
        size = old.abs().amax(1)
        return torch.where((size > 0) & (off <= self.tolerance * size), nearest, torch.ones_like(nearest))
