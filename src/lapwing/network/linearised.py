"""The network linearised at θ*:  f_lin(x; θ) = f(x; θ*) + J(x) (θ − θ*).

A Linearised keeps its own copy of the weights: training the user's model further does not affect it. Jacobian
rows come from two sources: factors captured at layers with a rule, and reverse-mode AD per datum for all other
parameters, vectorised by `torch.func` if the model allows it. `rule_check` compares the former with the latter when
the object is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.data import ModelInput
from lapwing.errors import ModelError, NumericalError, ShapeError
from lapwing.linalg import all_finite
from lapwing.network.jacobian import Block, DenseBlock, FactorBlock, Jacobian, OutputBlock, RowSizes
from lapwing.network.layers import (
    Calls,
    OutputLayer,
    called_densely,
    captured_blocks,
    places,
    recording,
    vjp,
)
from lapwing.network.module import Network, with_images_in
from lapwing.network.parameters import ParamLayout
from lapwing.runtime.sandbox import PlainNorms, install, quiet_fallback

_JOINED_FLOATS = 1 << 21  # entries of activations that a forward pass of joined batches may keep
_MOST_JOINED = 1024  # data in a joined batch
MOST_DOUBLE = 1 << 24  # parameters up to which stored parameter vectors are float64


@dataclass(frozen=True, eq=False)
class Linearised:
    """f(x; θ*) and J(x) = ∂f/∂θ at θ* for the selected parameters."""

    network: Network
    layout: ParamLayout
    datum_shape: tuple[int, ...]
    ruled: tuple[str, ...]  # paths of modules with a rule, whose blocks come from captured factors
    vectorised: bool  # whether torch.func.vmap works for the rows of the other parameters
    sizes: RowSizes  # memory of one row of J
    layout_of_images: torch.memory_format = torch.preserve_format  # memory format of image inputs in a trace
    last: str | None = None  # path of the module whose output is the network's output
    shared: frozenset[str] = frozenset()  # names of unbatched arguments of the model
    ragged: int | None = None  # axis of a datum along which outputs may be shorter; they are padded with zeros
    datum_floats: int | None = None  # entries of activations that a forward pass keeps per datum; None: unknown
    chosen_jvp: list[Callable[..., Tensor]] = field(default_factory=list, repr=False)  # cache of `choose_jvp`

    @property
    def k(self) -> int:
        """Outputs per datum."""
        return prod(self.datum_shape)

    @property
    def joined_batch_size(self) -> int:
        """Size up to which small batches are joined, limited by the memory of their activations."""
        return min(_MOST_JOINED, _JOINED_FLOATS // max(1, self.datum_floats or _JOINED_FLOATS))

    @property
    def theta(self) -> Float[Tensor, " p"]:
        """θ*, float64. For a large network it is recomputed on each access, to save memory."""
        # Two properties, as cached_property has no condition: small networks cache, large ones recompute.
        return self._theta if self.layout.p <= MOST_DOUBLE else self._raveled()

    @cached_property
    def _theta(self) -> Float[Tensor, " p"]:
        return self._raveled()

    def _raveled(self) -> Float[Tensor, " p"]:
        return self.layout.ravel({name: self.network.tensors[name].double() for name in self.layout.names})

    @property
    def whole(self) -> ParamLayout:
        """The layout of all entries of the tensors: layers are differentiated as a whole, then columns selected."""
        return self.layout.whole

    @cached_property
    def rest(self) -> ParamLayout:
        """The layout of the tensors without a rule, whose rows come from reverse-mode AD."""
        ruled = {name for path in self.ruled for name in self.layout.modules[path]}
        return self.whole.restricted(name for name in self.layout.names if name not in ruled)

    @property
    def only_last(self) -> bool:
        """Whether only the output layer is inferred: then no backward pass through the network is needed."""
        return self.last is not None and set(self.layout.modules) == {self.last}

    def tangents(self, v: Float[Tensor, "... p"]) -> dict[str, Tensor]:
        """A flat direction v as named tensors in the parameters' dtypes; zero at entries that are not inferred."""
        return {name: t.to(self.network.tensors[name].dtype) for name, t in self.layout.unravel(v).items()}

    def tensors_at(self, theta: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A flat θ as named tensors; entries that are not inferred keep their trained values."""
        if self.layout.selection is None:
            return self.tangents(theta)
        fixed = self.whole.ravel({name: self.network.tensors[name].double() for name in self.layout.names})
        moved = fixed.index_copy(0, self.layout.selection.to(fixed.device), theta.to(fixed))
        return {n: t.to(self.network.tensors[n].dtype) for n, t in self.whole.unravel(moved).items()}

    def outputs(self, x: ModelInput) -> Float[Tensor, "n k"]:
        """f(x; θ*)."""
        with self.network.borrowed() as network, nullcontext() if x.attached else torch.no_grad():
            return self.flat(network(self.network.placed(x), {}), x.n, x.positions)

    def outputs_at(self, x: ModelInput, thetas: Float[Tensor, "s p"]) -> Float[Tensor, "s n k"]:
        """f(x; θ_s): the network itself at weights θ_s, not its linearisation."""
        placed = self.network.placed(x)
        with self.network.borrowed() as network, nullcontext() if x.attached else torch.no_grad():
            draws = [self.flat(network(placed, self.tensors_at(theta)), x.n) for theta in thetas]
        return torch.stack(draws)

    @contextmanager
    def borrowed(self) -> Iterator[Linearised]:
        """Context with the linearised network on a private copy of the module."""
        with self.network.borrowed() as network:
            own = replace(self, network=network)
            own.__dict__["rest"] = self.rest  # fill the cached_property, which `replace` does not copy
            yield own

    @contextmanager
    def trace(self, x: ModelInput) -> Iterator[Trace]:
        """Context with one forward pass for any number of backward passes; without a graph if none is needed."""
        placed = self.network.placed(x)
        with self.borrowed() as own:
            trace = None
            if self.only_last and not x.attached:
                with torch.no_grad():
                    trace = own._trace(placed)
            # Without `last`, these data do not leave the network through the output layer: trace again with a graph.
            yield own._trace(placed) if trace is None or trace.last is None else trace

    @contextmanager
    def graph(self, x: ModelInput) -> Iterator[Trace]:
        """The same, always with the graph of f."""
        with self.borrowed() as own:
            yield own._trace(self.network.placed(x))

    def _trace(self, x: ModelInput) -> Trace:
        if x.attached:
            return self._attached(x)
        leaves = {name: self.network.tensors[name].detach().requires_grad_() for name in self.layout.names}
        try:
            return self._traced(with_images_in(x, self.layout_of_images), leaves)
        except ModelError:
            if self.layout_of_images == torch.preserve_format:
                raise
            # The rule check ran the first data with this memory format, but `.view` may fail for other shapes.
            return self._traced(x, leaves)

    def _attached(self, x: ModelInput) -> Trace:
        """A trace whose outputs and rows are differentiable with respect to x.

        Layers with a rule need gradients of their outputs only, so just the other parameters are leaves: a backward
        pass through the result then reaches x, and no weights. Fused attention has no second derivatives.
        """
        leaves = {name: self.network.tensors[name].detach().requires_grad_() for name in self.rest.names}
        with self.network.plain_attention():
            return self._traced(x, leaves)

    def _traced(self, x: ModelInput, leaves: Mapping[str, Tensor]) -> Trace:
        ruled = {path: self.network.model.get_submodule(path) for path in self.ruled}
        with recording(ruled, attached=x.attached) as calls:
            f = self.flat(self.network(x, leaves), x.n, x.positions)
        last = None if self.last is None else OutputLayer.of(calls[self.last], places(self.whole, self.last), f)
        return Trace(self, x, leaves, calls, f, last)

    @contextmanager
    def unrecorded(self, x: ModelInput) -> Iterator[Trace]:
        """A trace for Jacobian products only: no factors of layers are captured."""
        with self.borrowed() as own, PlainNorms() if x.attached else nullcontext():
            yield replace(own, ruled=(), last=None)._trace(self.network.placed(x))

    def datum_shape_at(self, x: ModelInput) -> tuple[int, ...]:
        """The output shape of these inputs, which may differ from `datum_shape` along the ragged axis."""
        if self.ragged is None:
            return self.datum_shape
        with self.network.borrowed() as network, torch.no_grad():
            found = tuple(network(self.network.placed(x.rows(slice(0, 1))), {}).shape[1:])
        return found if self._differs_in_length(found) else self.datum_shape

    def _differs_in_length(self, found: tuple[int, ...]) -> bool:
        others = [size for axis, size in enumerate(self.datum_shape) if axis != self.ragged]
        return len(found) == len(self.datum_shape) and [s for i, s in enumerate(found) if i != self.ragged] == others

    def flat(self, output: Tensor, n: int, positions: int | None = None) -> Float[Tensor, "n k"]:
        """Outputs as (n, k), one row per datum. Shorter sequences are padded with zeros, whose labels are ignored.

        `positions` is the number of labels per datum, if it may differ between batches.
        """
        if self.ragged is not None and output.ndim == len(self.datum_shape) + 1 and len(output) == n:
            output = self._lengthened(output, positions)
        if output.numel() != n * self.k:
            raise ShapeError(
                f"The model gave outputs of shape {tuple(output.shape)} for {n} inputs; the first batch had shape "
                f"(n, {', '.join(map(str, self.datum_shape))}). All data must have outputs of one shape, and the batch "
                "as first axis (one datum alone: x[None])."
            )
        return output.reshape(n, self.k)

    def _lengthened(self, output: Tensor, positions: int | None) -> Tensor:
        assert self.ragged is not None
        axis = self.ragged + 1
        found, usual = output.shape[axis], self.datum_shape[self.ragged]
        if positions not in (None, found):
            raise ShapeError(
                f"The model gave outputs of shape {tuple(output.shape)}, which have {found} positions, but the labels "
                f"have {positions}. Label every position, with ignore_index where there is no label."
            )
        if found >= usual or not self._differs_in_length(tuple(output.shape[1:])):
            return output
        after = [0, 0] * (output.ndim - 1 - axis)
        return torch.nn.functional.pad(output, [*after, 0, usual - found])


@dataclass(frozen=True, eq=False)
class Trace:
    """The linearised network at some inputs, after one forward pass; valid inside `Linearised.trace`."""

    linearised: Linearised
    x: ModelInput
    leaves: Mapping[str, Tensor]
    calls: Mapping[str, Calls]
    f: Float[Tensor, "n k"]  # with its graph, unless only the output layer is inferred
    last: OutputLayer | None  # also None if for these data the network's output is not that layer's output

    @property
    def outputs(self) -> Float[Tensor, "n k"]:
        """f(x; θ*) in float32 or better, checked to be finite; detached unless x is attached."""
        f = self.f if self.x.attached else self.f.detach()
        if not all_finite(f.detach()):
            raise NumericalError(
                "The model's outputs hold NaN or infinite values at some of these inputs: nothing to linearise. "
                "Check the scale of the inputs, and the model in eval mode."
            )
        return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f

    def put_back(self) -> None:
        """Install the leaves again after others were installed: checkpointed layers rerun in the backward pass."""
        network = self.linearised.network
        install(network.model, {**network.tensors, **self.leaves}, network.aliases)

    def vjp(self, u: Float[Tensor, "n k"]) -> tuple[list[FactorBlock], dict[str, Tensor]]:
        """Σ_n J_nᵀ u_n. Linear layers are returned as blocks of factors (a, g), other tensors as gradients.

        The caller can then sum the products g aᵀ of many batches at once. Covers complete tensors, even if only some
        of their entries are inferred.
        """
        layout, last = self.linearised.whole, self._last_path
        dense = {path: calls for path, calls in self.calls.items() if path != last and called_densely(calls, self.x.n)}
        factored = {name for path in layout.modules if path in dense or path == last for name in layout.modules[path]}
        leaves = {name: leaf for name, leaf in self.leaves.items() if name not in factored}
        sources = [*(calls.outputs[0] for calls in dense.values()), *leaves.values()]
        gradients = pull_back(self.f, sources, u.to(self.f.dtype)) if sources else ()
        blocks = [] if self.last is None else [self.last.rows(u[..., None])]
        for (path, calls), g in zip(dense.items(), gradients, strict=False):
            blocks += calls.rule.blocks(calls, [[g]], places(layout, path), self.x.n)  # type: ignore[arg-type]
        return blocks, dict(zip(leaves, gradients[len(dense) :], strict=True))

    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        """total ← total + Σ_n J_nᵀ u_n, in place."""
        layout, whole = self.linearised.layout, self.linearised.whole
        everything = total if layout.selection is None else total.new_zeros(whole.p)
        blocks, gradients = self.vjp(u)
        for name, g in gradients.items():
            everything[whole[name]].add_(g.reshape(-1))
        for block in blocks:
            for s, part in zip(block.slices, block.totals(), strict=True):
                everything[s].add_(part)
        if layout.selection is not None:
            total.add_(everything[layout.selection.to(total.device)])

    @property
    def _last_path(self) -> str | None:
        return None if self.last is None else self.linearised.last

    def rows(self, cotangents: Float[Tensor, "n k c"]) -> Jacobian:
        """Rows u_cᵀ J_n for the c columns u of the cotangents (n, k, c); J itself if they are the identity."""
        return self._rows(cotangents, None if self.last is None else self.last.rows(cotangents))

    def jacobian(self) -> Jacobian:
        k = self.linearised.k
        block = self.output_block(torch.arange(k, device=self.f.device))
        unused = block is not None and self.linearised.only_last  # no backward pass: the cotangents are not read
        eye = self.f.new_zeros(1, 1) if unused else torch.eye(k, dtype=self.f.dtype, device=self.f.device)
        eye = eye.expand(self.x.n, k, k)
        return self.rows(eye) if block is None else self._rows(eye, block)

    def output_block(self, order: Int[Tensor, ...]) -> OutputBlock | None:
        """The output layer's block with an implicit identity as gradient, if its rows are in this order of f."""
        if self.last is None:
            return None
        own = self.last.order if order.ndim == 2 else self.last.order.flatten()
        return self.last.block() if torch.equal(own, order.double()) else None

    def _rows(self, cotangents: Float[Tensor, "n k c"], last: Block | None) -> Jacobian:
        layout, rest = self.linearised.whole, self.linearised.rest
        others = {path: calls for path, calls in self.calls.items() if path != self._last_path}
        captured = captured_blocks(others, layout, self.f, cotangents) if others else {}
        if last is not None and self._last_path is not None:
            captured[self._last_path] = [last]
        dense = self._rest_rows(cotangents) if rest.names else {}
        blocks: list[Block] = []
        for path, names in layout.modules.items():
            blocks += captured[path] if path in captured else [DenseBlock(layout[n], dense[n]) for n in names]
        J = Jacobian(tuple(blocks), self.x.n, cotangents.shape[-1], layout.p, self.f.device)
        selection = self.linearised.layout.selection
        return J if selection is None else J.selected(selection.to(J.device))

    def _rest_rows(self, cotangents: Tensor) -> dict[str, Float[Tensor, "n c _"]]:
        rest = {name: self.leaves[name] for name in self.linearised.rest.names}
        cotangents = cotangents.to(self.f.dtype)
        rows = None
        if self.linearised.vectorised and not self.x.attached:  # torch.func has wrong second derivatives of LayerNorm
            # vmap may fail for some input shapes even if it worked in the rule check; the loop gives the same rows.
            with suppress(RuntimeError):
                rows = vectorised_rows(self.linearised, self.x, rest, cotangents)
        if rows is None:
            rows = looped_rows(self.linearised, self.x, rest, cotangents)
        return {name: r.reshape(*r.shape[:2], -1) for name, r in rows.items()}


def looped_rows(
    linearised: Linearised, x: ModelInput, leaves: Mapping[str, Tensor], cotangents: Float[Tensor, "n k c"]
) -> dict[str, Tensor]:
    """Rows of J by one forward pass per datum and one backward pass per row; works for every model."""
    rows = []
    for i in range(x.n):
        with linearised.network.plain_attention() if x.attached else nullcontext():
            f = linearised.flat(linearised.network(x.rows(slice(i, i + 1)), leaves), 1)[0]
        sources = list(leaves.values())
        rows.append([pull_back(f, sources, u, attached=x.attached) for u in cotangents[i].unbind(-1)])
    return {
        name: torch.stack([torch.stack([row[j] for row in datum]) for datum in rows]) for j, name in enumerate(leaves)
    }


def pull_back(f: Tensor, sources: Sequence[Tensor], u: Tensor, *, attached: bool = False) -> tuple[Tensor, ...]:
    if not f.requires_grad:  # the output does not depend on any of these tensors
        return tuple(torch.zeros_like(p) for p in sources)
    gradients = vjp(f, sources, u, attached=attached)
    # nn.Embedding(sparse=True) has sparse gradients; rows are dense here.
    dense = (g.to_dense() if g is not None and g.is_sparse else g for g in gradients)
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(sources, dense, strict=True))


def vectorised_rows(
    linearised: Linearised, x: ModelInput, leaves: Mapping[str, Tensor], cotangents: Float[Tensor, "n k c"]
) -> dict[str, Tensor]:
    """The same rows by torch.func, with vmap over data and cotangents."""
    detached = {name: leaf.detach() for name, leaf in leaves.items()}
    batched = [value for _, value in x.leaves() if x.batched(value)]

    def rows_of_one(values: list[Tensor], u: Float[Tensor, "k c"]) -> dict[str, Tensor]:
        one = _refilled(x, [value[None] for value in values])

        def f(tensors: dict[str, Tensor]) -> Tensor:
            return linearised.flat(linearised.network(one, tensors), 1)[0]

        pull_back = torch.func.vjp(f, detached)[1]
        return torch.vmap(lambda column: pull_back(column)[0], in_dims=1)(u)

    with quiet_fallback():
        return torch.vmap(rows_of_one, randomness="same")(batched, cotangents)


def _refilled(x: ModelInput, values: list[Tensor]) -> ModelInput:
    """x with its batched arguments replaced by `values`, in order."""
    supply = iter(values)
    return x.mapped(lambda v: next(supply) if x.batched(v) else v, 1)
