"""Mean and covariance of a network's outputs, its way back written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import StructureError
from lapwing.integrations.export.covariance import Rotated, parts
from lapwing.integrations.export.layers import BatchNorm, Convolution, Dense, Layer, layer_of
from lapwing.posterior import Posterior


class OutputGaussian(nn.Module):
    """x → mean (B, K) and covariance (B, K, K)."""

    shift: Tensor | None

    def __init__(self, posterior: Posterior, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = model
        layout = posterior.layout
        if layout.selection is not None:
            raise StructureError("export: a posterior over single weights of tensors is not written out.")
        self.k = posterior.linearised.k
        self.only = posterior.linearised.last if posterior.linearised.only_last else None
        chain = [(self.only, model.get_submodule(self.only))] if self.only is not None else _chain(model)
        self.layers: list[tuple[str, nn.Module, Layer]] = [(path, m, layer_of(path, m)) for path, m in chain]
        self.places = {path: {n.rpartition(".")[2]: layout[n] for n in layout.modules[path]} for path in layout.modules}
        missing = set(layout.modules) - {path for path, _ in chain}
        if missing:
            raise StructureError(
                f"export: the parameters of {', '.join(sorted(missing))} are not those of a known layer."
            )
        found = parts(posterior.precision, dtype)
        self.slices = [s for s, _ in found]
        self.parts = nn.ModuleList(part for _, part in found)
        shift = posterior.shift
        self.register_buffer("shift", None if shift is None else shift.to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, seen = self._forward(x)
        rows = self._rows(seen, self._identity(f))
        mean = f
        cov = torch.zeros_like(f)[:, :, None] * torch.zeros_like(f)[:, None]
        for s, part in zip(self.slices, self.parts, strict=True):
            cov = cov + self._covariance(part, s, rows)
        if self.shift is not None:
            for path, (g, a) in rows.items():
                for where, block in self._columns(path, g, a):
                    mean = mean + (block @ self.shift[where])
        return mean, cov

    def _forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen: dict[str, Tensor] = {}
        if self.only is None:
            for path, module, _ in self.layers:
                seen[path] = x
                x = module(x)
            return x.reshape(x.shape[0], self.k), seen

        def keep(module: nn.Module, args: Any) -> None:
            seen["last"] = args[0]

        handle = self.layers[0][1].register_forward_pre_hook(keep)
        try:
            out = self.network(x)
        finally:
            handle.remove()
        out = getattr(out, "logits", out)
        return out.reshape(out.shape[0], self.k), {self.only: seen["last"]}

    def _identity(self, f: Tensor) -> Tensor:
        eye = torch.eye(self.k, dtype=f.dtype, device=f.device)
        return eye.expand(f.shape[0], self.k, self.k)

    def _rows(self, seen: dict[str, Tensor], g: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Of every layer with inferred parameters: the cotangent at its output, and its input."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        left = len(self.places)
        for path, _, layer in reversed(self.layers):
            x = seen[path]
            if path in self.places:
                found[path] = g, x
                left -= 1
            if not left:
                break
            g = layer.back(self._shaped(g, path, seen), x)
        return found

    def _shaped(self, g: Tensor, path: str, seen: dict[str, Tensor]) -> Tensor:
        return g

    def _covariance(self, part: nn.Module, s: slice, rows: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        inside = [path for path, where in self.places.items() if any(_within(w, s) for w in where.values())]
        if isinstance(part, Rotated):
            (path,) = inside
            g, a = rows[path]
            layer = self._layer(path)
            names = {name for name, w in self.places[path].items() if _within(w, s)}
            if isinstance(layer, Dense) and g.ndim == 3:
                return part.of_factors(g, _inputs(a, names))
            return part(self._matrices(layer, g, a, names))
        blocks = [block for path in inside for where, block in self._columns(path, *rows[path]) if _within(where, s)]
        return part(torch.cat(blocks, -1))

    def _columns(self, path: str, g: Tensor, a: Tensor) -> list[tuple[slice, Tensor]]:
        """The rows of J written out, tensor by tensor: (B, K, p)."""
        layer = self._layer(path)
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

    def _layer(self, path: str) -> Layer:
        return next(layer for p, _, layer in self.layers if p == path)


def _inputs(a: Tensor, names: set[str]) -> Tensor:
    """With a one for the bias; the one alone where the weight is not asked for."""
    one = torch.ones_like(a[..., :1])
    if "weight" not in names:
        return one
    return torch.cat([a, one], -1) if "bias" in names else a


def _within(inner: slice, outer: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)


def _chain(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The modules of nested nn.Sequential, in their order."""
    if type(model) is not nn.Sequential and not (
        isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    ):
        return [(prefix.rstrip("."), model)]
    return [found for name, child in model.named_children() for found in _chain(child, f"{prefix}{name}.")]
