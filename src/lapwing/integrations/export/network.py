"""Mean and covariance of a network's outputs, its way back written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import StructureError
from lapwing.integrations.export.covariance import Rotated, parts
from lapwing.integrations.export.graph import steps
from lapwing.integrations.export.layers import BatchNorm, Convolution, Dense, Layer, layer_of
from lapwing.posterior import Posterior

Rows = dict[str, tuple[Tensor, Tensor]]  # by module: the cotangent (B, K, …) at its output, and its input


class OutputGaussian(nn.Module):
    """x → mean (B, K) and covariance (B, K, K)."""

    shift: Tensor | None

    def __init__(self, posterior: Posterior, model: nn.Module, example: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = model
        layout = posterior.layout
        if layout.selection is not None:
            raise StructureError("export: a posterior over single weights of tensors is not written out.")
        self.k = posterior.linearised.k
        self.only = posterior.linearised.last if posterior.linearised.only_last else None
        self.places = {path: {n.rpartition(".")[2]: layout[n] for n in layout.modules[path]} for path in layout.modules}
        self.steps = [] if self.only is not None else steps(model, example)
        self.layers = self._inferred(model)
        found = parts(posterior.precision, dtype)
        self.slices = [s for s, _ in found]
        self.parts = nn.ModuleList(part for _, part in found)
        shift = posterior.shift
        self.register_buffer("shift", None if shift is None else shift.to(dtype))

    def _inferred(self, model: nn.Module) -> dict[str, Layer]:
        """The layers whose parameters are inferred."""
        if self.only is not None:
            return {self.only: layer_of(self.only, model.get_submodule(self.only))}
        called = [step.path for step in self.steps]
        missing = [path or "the model itself" for path in self.places if called.count(path) == 0]
        if missing:
            raise StructureError(f"export: the parameters of {', '.join(missing)} are not those of a known layer.")
        again = [path for path in self.places if called.count(path) > 1]
        if again:
            raise StructureError(f"export: {', '.join(again)}: a layer that is called twice is not written out.")
        return {step.path: step.layer for step in self.steps if step.path in self.places and step.layer is not None}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, rows = self._through_last(x) if self.only is not None else self._through(x)
        mean = f
        cov = torch.zeros_like(f)[:, :, None] * torch.zeros_like(f)[:, None]
        for s, part in zip(self.slices, self.parts, strict=True):
            cov = cov + self._covariance(part, s, rows)
        if self.shift is not None:
            for path, (g, a) in rows.items():
                for where, block in self._columns(path, g, a):
                    mean = mean + (block @ self.shift[where])
        return mean, cov

    def _through(self, x: Tensor) -> tuple[Tensor, Rows]:
        """The outputs, and of every inferred layer the cotangent at its output, and its input."""
        values = [x]
        for step in self.steps:
            values.append(step.run(*(values[k] for k in step.sources)))
        f = values[-1].reshape(x.shape[0], self.k)
        g: list[Tensor | None] = [None] * len(values)
        g[-1] = self._identity(f).reshape(x.shape[0], self.k, *values[-1].shape[1:])
        rows: Rows = {}
        for k in range(len(self.steps) - 1, -1, -1):
            step, at_output = self.steps[k], g[k + 1]
            if at_output is None:
                continue
            inputs = [values[j] for j in step.sources]
            if step.path in self.places:
                rows[step.path] = at_output, inputs[0]
            if len(rows) == len(self.places):
                break
            for j, part in zip(step.sources, step.back(at_output, inputs), strict=True):
                so_far = g[j]
                g[j] = part if so_far is None else so_far + part
        return f, rows

    def _through_last(self, x: Tensor) -> tuple[Tensor, Rows]:
        assert self.only is not None
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any) -> None:
            seen.append(args[0])

        handle = self.network.get_submodule(self.only).register_forward_pre_hook(keep)
        try:
            out = self.network(x)
        finally:
            handle.remove()
        out = getattr(out, "logits", out)
        f = out.reshape(out.shape[0], self.k)
        return f, {self.only: (self._identity(f), seen[-1])}

    def _identity(self, f: Tensor) -> Tensor:
        eye = torch.eye(self.k, dtype=f.dtype, device=f.device)
        return eye.expand(f.shape[0], self.k, self.k)

    def _covariance(self, part: nn.Module, s: slice, rows: Rows) -> Tensor:
        inside = [path for path, where in self.places.items() if any(_within(w, s) for w in where.values())]
        if isinstance(part, Rotated):
            (path,) = inside
            g, a = rows[path]
            layer = self.layers[path]
            names = {name for name, w in self.places[path].items() if _within(w, s)}
            if isinstance(layer, Dense) and g.ndim == 3:
                return part.of_factors(g, _inputs(a, names))
            return part(self._matrices(layer, g, a, names))
        blocks = [block for path in inside for where, block in self._columns(path, *rows[path]) if _within(where, s)]
        return part(torch.cat(blocks, -1))

    def _columns(self, path: str, g: Tensor, a: Tensor) -> list[tuple[slice, Tensor]]:
        """The rows of J written out, tensor by tensor: (B, K, p)."""
        layer = self.layers[path]
        found = []
        for name, where in self.places[path].items():
            if isinstance(layer, BatchNorm):
                product = g * layer.standardised(a)[:, None] if name == "weight" else g
                block = product.flatten(3).sum(-1) if product.ndim > 3 else product
            else:
                block = self._matrices(layer, g, a, {name}).flatten(2)
            found.append((where, block))
        return found

    def _matrices(self, layer: Layer, g: Tensor, a: Tensor, names: set[str]) -> Tensor:
        """Σ_t g_t a_tᵀ: (B, K, o, i), with a last column for the bias."""
        if isinstance(layer, Dense):
            inputs = _inputs(a, names)
            return g[..., None] * inputs[:, None, None]
        assert isinstance(layer, Convolution)
        return g.flatten(3) @ _inputs(layer.patches(a), names)[:, None]


def _inputs(a: Tensor, names: set[str]) -> Tensor:
    """With a one for the bias; the one alone where the weight is not asked for."""
    one = torch.ones_like(a[..., :1])
    if "weight" not in names:
        return one
    return torch.cat([a, one], -1) if "bias" in names else a


def _within(inner: slice, outer: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)
