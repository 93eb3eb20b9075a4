"""How the posterior of an image will be held, and what that takes: decided by sizes, before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from lapwing.errors import InputError, InputTypeError
from lapwing.imaging.blocks import blocks_of, one_block, weights
from lapwing.imaging.distances import taps
from lapwing.imaging.operator import Operator
from lapwing.imaging.prior import KINDS
from lapwing.imaging.reconstruction import Reconstruction, default_network
from lapwing.planning.budget import in_words, parse_memory

_WORK = 4  # matrices of d × d in work at a time: S, its root, the covariance, a product
_SLAB_BYTES = 6 * (1 << 21) * 8  # of rows that are converted and multiplied at a time
WAYS = ("auto", "dense", "matrixfree")
_ALL, _SOME = 2_048, 1_024  # measurements up to which all are taken; of more, so many: the work grows cubically
_FEWEST = 64  # measurements that the evidence can do with


@dataclass(frozen=True, repr=False)
class ImagingPlan:
    """ "dense": the Jacobian is stored and every answer is exact. "matrixfree": products, samples with an error."""

    way: str
    why: str
    dense_bytes: int
    matrixfree_bytes: int
    memory: int
    n_pixels: int
    n_measurements: int
    n_weights: int
    n_evidence: int  # measurements that the hyperparameters are chosen with
    keeps_rows: bool  # whether the matrix-free way stores A J, and factorises K
    passes: int  # of the network, forwards and backwards, to linearise

    def __repr__(self) -> str:
        rows = (
            "all of them" if self.n_evidence == self.n_measurements else f"{self.n_evidence:,} of them, evenly spaced"
        )
        solver = "K factorised" if self.keeps_rows else "conjugate gradients"
        return (
            f"{self.n_pixels:,} pixels, {self.n_measurements:,} measurements, {self.n_weights:,} weights\n"
            f"dense       {in_words(self.dense_bytes):>9}  exact covariance\n"
            f"matrixfree  {in_words(self.matrixfree_bytes):>9}  samples, {solver}\n"
            f"of {in_words(self.memory)} allowed: {self.way} ({self.why}), about {self.passes:,} passes to linearise\n"
            f"evidence with {rows}"
        )

    def record(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return asdict(self)


def plan(
    what: Reconstruction | Operator,
    network: nn.Module | None = None,
    *,
    prior: str = "blocks",
    blocks: Any = None,
    memory: str | float | None = None,
) -> ImagingPlan:
    """What `lw.imaging.posterior` will do with a reconstruction, or an operator and a network, and what it takes."""
    if isinstance(what, Reconstruction):
        A, net = what.operator, what.network
    elif isinstance(what, Operator):
        A, net = what, network if network is not None else default_network(what.image_shape)
    else:
        raise InputTypeError(f"plan: expected a reconstruction or an operator, got {type(what).__name__}.")
    if prior not in KINDS:
        raise InputError(f"plan: prior must be one of {', '.join(map(repr, KINDS))}; got {prior!r}.")
    if not isinstance(net, nn.Module):
        raise InputTypeError(f"plan: network must be an nn.Module, got {type(net).__name__}.")
    layout = weights(net)
    chosen = blocks_of(net, layout, blocks) if prior == "blocks" else one_block(layout)
    n_grams = sum(len(taps(b.kernel).distances) for b in chosen)
    itemsize = max(p.element_size() for p in net.parameters())
    return sized(A.linear.d, A.linear.m, layout.p, n_grams, itemsize, parse_memory(memory))


def sized(d: int, m: int, p: int, n_grams: int, itemsize: int, memory: int, way: str = "auto") -> ImagingPlan:
    """The plan for d pixels, m measurements, p weights and so many matrices of the evidence."""
    slabs = min(_SLAB_BYTES, 48 * d * p)
    n_evidence = _affordable(m, p, n_grams, itemsize, memory // 2 - slabs)
    evidence = (n_grams + 4) * 8 * n_evidence**2
    dense = d * p * itemsize + max(evidence, 8 * (_WORK * d * d + 3 * m * d + 2 * m * m)) + slabs
    rows = m * p * itemsize + 3 * 8 * m * m
    activations = 64 * p * 8 + 64 * d * 8 + slabs
    keeps_rows = n_evidence == m and rows + evidence + activations <= memory
    free = n_evidence * p * itemsize + evidence + activations + (3 * 8 * m * m if keeps_rows else 200 * 8 * m)
    if way == "dense" or (way == "auto" and dense <= memory):
        why = "the Jacobian and its matrices fit" if dense <= memory else "asked for"
        return ImagingPlan("dense", why, dense, free, memory, d, m, p, n_evidence, keeps_rows, d)
    if way == "auto" and free > memory:
        raise InputError(
            f"imaging: neither way fits into {in_words(memory)}: dense takes {in_words(dense)}, matrix-free "
            f"{in_words(free)}. Allow more (memory=...), or use a network of fewer channels."
        )
    why = "asked for" if dense <= memory else f"the Jacobian and its matrices would take {in_words(dense)}"
    return ImagingPlan("matrixfree", why, dense, free, memory, d, m, p, n_evidence, keeps_rows, n_evidence)


def _affordable(m: int, p: int, n_grams: int, itemsize: int, memory: int) -> int:
    """As many measurements as fit with their rows of A J and their matrices; of very many, a part."""
    n = m if m <= _ALL else _SOME
    while n > _FEWEST and n * p * itemsize + (n_grams + 4) * 8 * n * n > memory:
        n = int(0.9 * n)
    return n
