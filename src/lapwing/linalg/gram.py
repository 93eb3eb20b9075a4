"""Running sums of x yᵀ over many rows: products in the rows' own precision, sums over many of them in float64.

Products are added in place, so that a batch costs what its multiplication costs and no array of rows is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lapwing._types import Float, State, Tensor
from lapwing.linalg.symmetric import BLOCK, mirror_

_MOST_ROWS = 4096  # summed in the rows' own precision; then the float64 sum is written
_FEWEST_ROWS = 64  # multiplied at once: fewer are gathered first
_CONVERTED = 1 << 15  # numbers converted to another precision at a time
_ALIGNED = 16  # numbers: products are written a third faster to rows that begin at multiples of so many
_PAGE = 4096  # bytes: rows that begin at multiples of so many crowd each other out of the processor's cache
SINGLE_SIDE = 512  # from which on sums of float32 rows are kept in float32
_MOVED_ROWS = 1024  # such rows are moved apart so many at a time


class Products:
    """A running Σ x yᵀ for rows x (m, q, d) and y (m, q, e), per map q; `take` it when it is full."""

    def __init__(self) -> None:
        self.few = _Few(), _Few()
        self.part: Tensor | None = None
        self.n = 0

    @property
    def full(self) -> bool:
        return self.n >= _MOST_ROWS

    def add(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"], *, ones: bool = False) -> None:
        """`ones`: the last of the e columns of y are ones, and y comes without them."""
        x, y = single_or_better(x), single_or_better(y)
        left, right = self.few[0].joined(x), self.few[1].joined(y, ones=ones)
        if left is not None and right is not None:
            self._multiply(left, right, ones=ones and right is y)

    def take(self) -> Float[Tensor, "q d e"] | None:
        """The sum since it was last taken, to be added elsewhere before the next rows come; None if there was none."""
        left, right = self.few[0].rest(), self.few[1].rest()
        if left is not None and right is not None:
            self._multiply(left, right)
        empty, self.n = self.n == 0, 0
        return None if empty else self.part

    def state(self) -> State:
        return {"few": [few.state() for few in self.few], "part": self.part if self.n else None, "n": self.n}

    def restore(self, state: State) -> None:
        for few, kept in zip(self.few, state["few"], strict=True):
            few.restore(kept)
        self.part, self.n = state["part"], state["n"]

    def _multiply(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"], *, ones: bool = False) -> None:
        e, beta = y.shape[2], float(self.n > 0)  # β = 0 overwrites what was taken
        if self.part is None:
            self.part = _aligned(x, x.shape[1], x.shape[2], e + ones)
        self.part[..., :e].baddbmm_(x.permute(1, 2, 0), y.transpose(0, 1), beta=beta)
        if ones:
            _add_(self.part[..., e], x.sum(0), beta)
        self.n += len(x)


def stored_dtype(side: int, dtype: torch.dtype) -> torch.dtype:
    """What a sum of outer products of so many numbers is kept in: float32 where it is large, and the rows are too."""
    return torch.float32 if side >= SINGLE_SIDE and dtype != torch.float64 else torch.float64


class GramSum:
    """Σ x xᵀ for rows x (m, q, d), per map q; only the upper block triangle is computed until the end.

    Large sums of float32 rows (`stored_dtype`) are added up in place in float32: a third of the memory of a float64 sum
    and the float32 products beside it. `exact` keeps every sum in float64.
    """

    def __init__(self, q: int, d: int, device: torch.device, *, exact: bool = False) -> None:
        self.shape, self.device, self.exact = (q, d, d), device, exact
        self.H: Tensor | None = None  # the float64 sum; None until there is one
        self.few = _Few()
        self.part: Tensor | None = None  # the sum of n rows that are not in H, in their own precision
        self.n = 0

    def add(self, x: Float[Tensor, "m q d"], *, ones: bool = False) -> None:
        """`ones`: the last of the d columns are ones, and x comes without them."""
        x = single_or_better(x)
        rows = self.few.joined(x, ones=ones)
        if rows is not None:
            self._multiply(rows, ones=ones and rows is x)
        if self.n >= _MOST_ROWS and self.part is not None and not self._single(self.part):
            self._fold()

    def add_product(self, product: Float[Tensor, "q d d"]) -> None:
        """Σ x xᵀ of some rows, multiplied out elsewhere."""
        self._sum(product).add_(product)

    def add_transposed(self, x: Float[Tensor, "m d r"]) -> None:
        """Σ_m x xᵀ for one map, the rows x being columns here: they need not be copied to be multiplied."""
        x = single_or_better(x)
        if self._single(x):
            self._sum(x)[0].addbmm_(x, x.mT)
        else:
            self._sum(x)[0].add_(x.new_zeros(x.shape[1], x.shape[1]).addbmm_(x, x.mT))

    @property
    def empty(self) -> bool:
        return self.H is None and not self.n and not self.few.n

    def result(self) -> Float[Tensor, "q d d"]:
        rows = self.few.rest()
        if rows is not None:
            self._multiply(rows)
        if self.part is not None and self._single(self.part):
            total = self._sum(self.part)
        else:
            self._fold()
            total = self._sum(torch.empty(0, dtype=torch.float64))
        for H in total:
            mirror_(H)
        return total

    def state(self) -> State:
        return {"H": self.H, "few": self.few.state(), "part": self.part if self.n else None, "n": self.n}

    def restore(self, state: State) -> None:
        self.H, self.part, self.n = state["H"], state["part"], state["n"]
        self.few.restore(state["few"])

    def _multiply(self, x: Float[Tensor, "m q d"], *, ones: bool = False) -> None:
        d, beta = x.shape[2], float(self.n > 0)
        if self.part is None:
            self.part = _aligned(x, *self.shape)
        if x.shape[1] > 1 or d < 2 * BLOCK:
            self.part[:, :d, :d].baddbmm_(x.permute(1, 2, 0), x.transpose(0, 1), beta=beta)
        else:
            for M in _apart(x[:, 0]):
                strips = zip(range(0, d, BLOCK), self.part[0, :d, :d].split(BLOCK), M.T.split(BLOCK), strict=True)
                for start, strip, rows in strips:  # `narrow`, as slices take longer than small products
                    strip.narrow(1, start, d - start).addmm_(rows, M.narrow(1, start, d - start), beta=beta)
                beta = 1.0
        if ones:
            _add_(self.part[:, :d, d], x.sum(0), float(self.n > 0))
            self.part[:, d, d] = len(x) + (self.part[:, d, d] if self.n else 0)
        self.n += len(x)

    def _fold(self) -> None:
        if self.n and self.part is not None:
            begun = self.H is not None
            H = self._room() if self.H is None else self.H
            for start in range(0, self.shape[1], BLOCK):  # what is below the diagonal blocks was not computed
                rows = slice(start, start + BLOCK)
                if begun:
                    add_converted_(H[:, rows, start:], self.part[:, rows, start:])
                else:
                    H[:, rows, start:].copy_(self.part[:, rows, start:])
            self.H = H
        self.n = 0

    def _single(self, like: Tensor) -> bool:
        """Whether such rows, or products of them, are added up in float32."""
        return not self.exact and like.dtype == stored_dtype(self.shape[1], like.dtype) == torch.float32

    def _sum(self, like: Tensor) -> Float[Tensor, "q d d"]:
        """The sum that such products are added to; zeros if there is none yet."""
        if not self._single(like):
            self.H = self._room().zero_() if self.H is None else self.H
            return self.H
        if self.part is None:
            self.part = _aligned(like, *self.shape)
        if not self.n:
            self.part.zero_()
            self.n = 1  # something is in it
        return self.part

    def _room(self) -> Float[Tensor, "q d d"]:
        return torch.empty(self.shape, dtype=torch.float64, device=self.device)


def single_or_better(x: Tensor) -> Tensor:
    """Half precision has too few digits to be multiplied and added up in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _add_(total: Tensor, part: Tensor, beta: float) -> None:
    """total ← β total + part, β being 0 or 1."""
    if beta:
        total.add_(part)
    else:
        total.copy_(part)


def _apart(x: Float[Tensor, "m d"]) -> Iterator[Float[Tensor, "_ d"]]:
    """The rows, all at once if they lie well; else in pieces, each written where the last one was."""
    if x.stride(0) * x.element_size() % _PAGE:
        yield x
        return
    room = x.new_empty(min(len(x), _MOVED_ROWS), x.shape[1] + _ALIGNED)[:, :-_ALIGNED]
    for piece in x.split(_MOVED_ROWS):
        yield room[: len(piece)].copy_(piece)


def add_converted_(total: Float[Tensor, "q d *e"], part: Float[Tensor, "q d *e"]) -> None:
    """total ← total + part in total's precision, few rows at a time: what is converted stays in the cache."""
    step = max(1, _CONVERTED * part.shape[1] // max(1, part.numel()))
    for start in range(0, part.shape[1], step):
        rows = slice(start, start + step)
        total[:, rows].add_(part[:, rows])


def aligned_product(
    x: Float[Tensor, "m d"], y: Float[Tensor, "d e"], shift: Float[Tensor, " e"] | None = None
) -> Float[Tensor, "m e"]:
    """x y + shift, written to aligned rows; where x has a graph, as torch does it."""
    if x.requires_grad:
        return x @ y if shift is None else torch.addmm(shift, x, y)
    product = torch.mm(x, y, out=_aligned(x, len(x), y.shape[1]))
    return product if shift is None else product.add_(shift)


def _aligned(like: Tensor, *shape: int) -> Float[Tensor, ...]:
    """Room for so many numbers. A bias makes the last axis odd, and rows next to each other would begin anywhere."""
    *lead, e = shape
    return like.new_empty(*lead, -(-e // _ALIGNED) * _ALIGNED)[..., :e]


class _Few:
    """Rows that come few at a time, gathered until they are worth a multiplication.

    They are copied: whoever gave them may change them afterwards, as a loader does that fills one batch over and over.
    """

    def __init__(self) -> None:
        self.pending: list[Tensor] = []
        self.n = 0

    def joined(self, x: Float[Tensor, "m ..."], *, ones: bool = False) -> Tensor | None:
        """Rows to multiply now, if they are enough: x itself, or gathered ones, with their columns of ones."""
        if not self.n and len(x) >= _FEWEST_ROWS:
            return x
        self.pending.append(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1) if ones else x.clone())
        self.n += len(x)
        return self.rest() if self.n >= _FEWEST_ROWS else None

    def state(self) -> State:
        return {"pending": self.pending, "n": self.n}

    def restore(self, state: State) -> None:
        self.pending, self.n = list(state["pending"]), state["n"]

    def rest(self) -> Tensor | None:
        rows = torch.cat(self.pending) if self.n else None
        self.pending, self.n = [], 0
        return rows
