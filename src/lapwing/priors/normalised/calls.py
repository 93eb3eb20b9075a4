"""Intercept every normalisation in a forward pass, and run it with other statistics or ε if requested.

torch's norms are functions of (input, statistics, eps), whichever module calls them. Hand-written norms are recognised
by the small constant they add to a variance or a norm before dividing, as in x · rsqrt(mean(x²) + ε).
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
_NEGLIGIBLE = 1e-12  # factor that makes an ε negligible


@dataclass(frozen=True, eq=False)
class NormCall:
    """One call of a normalisation: function, arguments, and path of the calling module."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    path: str = ""

    @property
    def input(self) -> Tensor:
        return self.arguments["input"]

    @property
    def is_guard(self) -> bool:
        """Whether this is the addition x + ε in a hand-written norm."""
        return self.function is torch.add

    @property
    def of_running_statistics(self) -> bool:
        """Whether it uses running statistics instead of those of the input: BatchNorm in eval mode."""
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


class NormWatcher(TorchFunctionMode):
    """Records every normalisation inside the context and runs `treat(number, call)` in its place."""

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
    """Whether x + c is a non-negative tensor (a variance or a norm) plus a small constant."""
    small = isinstance(x, Tensor) and isinstance(c, float) and 0 < c <= _LARGEST_GUARD
    return small and x.is_floating_point() and bool((x.detach() >= 0).all())


def unchanged(number: int, call: NormCall) -> NormCall:
    return call


def with_negligible_eps(number: int, call: NormCall) -> NormCall:
    """The same norm with a negligible ε, so that it is exactly invariant to the scale of its input."""
    return call.with_eps_times(_NEGLIGIBLE)


def with_batch_statistics(number: int, call: NormCall) -> NormCall:
    """The same norm with a negligible ε and batch statistics instead of running statistics.

    The network is then homogeneous of degree 0 in a group normalised by BatchNorm, so J_g θ_g = 0.
    """
    call = with_negligible_eps(number, call)
    if not call.of_running_statistics:
        return call
    x, batch = call.input, call.function is F.batch_norm
    if x.numel() == (x.shape[1] if batch else x.shape[0] * x.shape[1]):  # torch raises for a single value per channel
        return call
    flag = "training" if batch else "use_input_stats"
    return call.with_arguments(running_mean=None, running_var=None, **{flag: True})


class Rescaled:
    """Adjusts each norm to the scale of its input after parameters have been multiplied by a factor k.

    If the input is k times its earlier value, ε becomes k² ε, and running statistics (m, v) become (k m, k² v), channel
    by channel; the output of the norm then stays the same. Norms with any other input are not changed. Several factors
    may occur at once; `followers` records the norms that followed each of them.
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
        # Wanted: (x − k m) / √(k² (v + ε)). The norm adds ε to the variance it is given, so pass k² (v + ε) − ε.
        return call.with_arguments(
            running_mean=k * mean, running_var=torch.where(k == 1, var, k**2 * (var + eps) - eps)
        )

    def _followed(self, x: Float[Tensor, "c _"], old: Float[Tensor, "c _"], degree: int) -> Float[Tensor, " c"]:
        """For every row, the factor k with x = k^degree · old up to rounding; 1 if there is none."""
        x, old, factors = x.double(), old.double(), self.factors.to(x.device)
        ratio = (x * old).sum(1) / (old * old).sum(1)
        nearest = factors[(ratio[:, None] - factors**degree).abs().argmin(1)]
        off = (x - nearest[:, None] ** degree * old).abs().amax(1)
        size = old.abs().amax(1)
        return torch.where((size > 0) & (off <= self.tolerance * size), nearest, torch.ones_like(nearest))
