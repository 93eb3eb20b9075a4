"""One line per structure: what it keeps, what it takes, and how many gradient epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lapwing.curvature import (
    GP,
    Block,
    Diag,
    Ekfac,
    Empirical,
    Exact,
    Fisher,
    Full,
    Kron,
    LowRank,
    MatrixFree,
    Nystrom,
    Sampled,
    Structure,
)
from lapwing.planning.budget import chunk_floats
from lapwing.planning.choice import Needs, name_of
from lapwing.planning.effort import layer_macs as _layer
from lapwing.planning.kind import Kind, settled
from lapwing.planning.rehearsal import Rehearsal
from lapwing.planning.survey import Survey, counted

_ROUNDS = 6  # passes that leading eigenpairs usually take
_PRODUCT = 5  # forward passes that a product with H takes: three forward with tangents, two backward


@dataclass(frozen=True)
class Line:
    """A structure on some parameters: how it covers them, and its cost. Bytes are above the model and the data."""

    structure: str
    params: str
    p: int
    how: str
    exact: bool
    stored_bytes: int
    fit_bytes: int
    predict_bytes: int
    gradient_epochs: float
    fits: bool


@dataclass(frozen=True, eq=False)
class Question:
    """Some parameters of a model, and what is to be done with them."""

    params: str
    needs: Needs
    rehearsal: Rehearsal
    kind: Kind  # of curvature; what `auto` takes depends on the structure
    n_data: int | None  # None when the data do not say
    n_inputs: int
    forward_macs: int  # multiplications of one forward pass of the whole network, per datum
    through_body: bool  # whether columns go through the whole network: not when only the output layer is inferred

    @property
    def survey(self) -> Survey:
        return self.needs.survey

    @property
    def fisher(self) -> Fisher:
        assert isinstance(self.kind, Fisher)  # `line` settles it first
        return self.kind

    @property
    def body_columns(self) -> int:
        return self.columns if self.through_body else 0

    def line(self, structure: Structure) -> Line:
        """What it keeps and takes, with the kind of curvature that goes with it."""
        structure = self.needs.settled(structure)
        return replace(self, kind=settled(self.kind, structure, self.needs)[0])._line(structure)

    def _line(self, structure: Structure) -> Line:
        stored, fit, predict = self._bytes(structure)
        return Line(
            name_of(structure),
            self.params,
            self.needs.p,
            self._how(structure),
            structure.exact and isinstance(self.fisher, Exact),
            stored,
            fit,
            predict,
            round(self._macs(structure) / (3 * self.forward_macs), 2),
            self.needs.fits(structure) and max(fit, predict) <= self.needs.budget,
        )

    @property
    def columns(self) -> int:
        """Columns of SᵀJ per datum, of all parts."""
        return n_columns(self.rehearsal, self.fisher)

    @property
    def closed_output(self) -> bool:
        """Whether the output layer alone is inferred, so that its curvature needs no columns."""
        return self.rehearsal.linearised.only_last

    def n_rows(self, structure: Structure) -> int | None:
        """Rows of the data, when they are fewer than the parameters: then they are kept instead of the matrix.

        Of `full` the matrix must fit nevertheless: what the data announce is not what they must give.
        """
        if self.n_data is None or (isinstance(structure, Full) and not self.needs.fits(Full())):
            return None
        return self.n_data * self.columns if self.n_data * self.columns < self.needs.p else None

    def _how(self, structure: Structure) -> str:
        if isinstance(structure, Full | GP):
            n_rows = self.n_rows(structure)
            return "full matrix" if n_rows is None else f"{counted(n_rows, 'row')} of the data, exactly"
        if isinstance(structure, Block):
            return counted(len(self.survey.layout.modules), "dense block")
        if isinstance(structure, LowRank):
            return counted(min(structure.rank, self.needs.p), "leading eigenpair")
        if isinstance(structure, Nystrom):
            return counted(structure.rank or 0, "random direction")
        if isinstance(structure, MatrixFree):
            return f"products with all of it, preconditioned by {self._preconditioner(structure)}"
        return self.survey.treatments() if isinstance(structure, Kron) else "exact diagonal"

    def _preconditioner(self, structure: MatrixFree) -> str:
        near = structure.preconditioner
        if near is None:
            return "the prior alone"
        return self._how(near) if isinstance(near, LowRank | Nystrom) else name_of(near)

    def _bytes(self, structure: Structure) -> tuple[int, int, int]:
        """To store, at the peak of a fit, at the peak of a prediction."""
        stored, needed = self.needs.stored_bytes(structure), self.needs.needed_bytes(structure)
        if needed > self.needs.budget:  # not tried: it would not fit
            return stored, needed, needed
        if isinstance(structure, Full | Block | GP):
            return self._dense_bytes(structure, stored)
        if isinstance(structure, MatrixFree):
            _, fit, predict = self._bytes(structure.preconditioner or Diag())
            return stored, fit, predict + 8 * structure.working_floats(self.survey.layout) * self.rehearsal.linearised.k
        if isinstance(structure, LowRank | Nystrom):
            fit, predict = self._tried(Diag())
            return stored, 8 * structure.working_floats(self.survey.layout) + fit, 3 * stored + predict
        return stored, *self._tried(structure)

    def _tried(self, structure: Structure) -> tuple[int, int]:
        rows = chunk_floats(self.needs.budget, self.needs.needed_bytes(structure))
        columns = -(-self.columns // self.needs.n_parts)
        return self.rehearsal.peaks(structure, rows, columns, self.n_inputs)

    def _dense_bytes(self, structure: Structure, stored: int) -> tuple[int, int, int]:
        """Counted, besides the passes: the matrix and the rows folded into it; then a scaled copy, sum and factor."""
        fit, predict = self._tried(Diag())
        n_rows = self.n_rows(structure)
        if isinstance(structure, Full | GP) and n_rows is not None:
            kernel = 8 * n_rows**2
            stored = 8 * n_rows * self.rehearsal.linearised.sizes.factored
            return stored, stored + 3 * kernel + fit, stored + 4 * kernel + predict
        slices = self.survey.layout.module_slices.values()
        largest = self.needs.p if isinstance(structure, Full | GP) else max(s.stop - s.start for s in slices)
        matrix = 8 * largest**2
        return stored, stored + 2 * matrix + fit, 2 * stored + 3 * matrix + predict

    def _macs(self, structure: Structure) -> int:
        """Multiplications per datum: forward, gradient of the log likelihood, columns of SᵀJ, and adding them up."""
        if isinstance(structure, MatrixFree) and structure.preconditioner is not None:
            return self._macs(structure.preconditioner)
        gradient = 2 * self.forward_macs if self.body_columns else sum(_layer(tile) for tile in self.survey.tiles)
        passes = self.forward_macs + gradient + self.body_columns * self.forward_macs
        if isinstance(structure, MatrixFree):  # nothing but the statistics
            return self.forward_macs + gradient
        if isinstance(structure, Nystrom):
            return 2 * self.forward_macs + gradient + (structure.rank or 0) * _PRODUCT * self.forward_macs
        if self.closed_output and not isinstance(structure, Full | Block | LowRank | GP):
            return passes + self._output_macs(structure)
        if isinstance(structure, LowRank):
            vectors = _ROUNDS * min(structure.rank + structure.oversample, self.needs.p)
            return self.forward_macs + gradient + _ROUNDS * self.forward_macs + vectors * _PRODUCT * self.forward_macs
        if isinstance(structure, Ekfac):
            second = self.forward_macs * (1 + self.body_columns) + self._factor_macs() + self._dense_row_macs()
            return passes + self._factor_macs() + second
        if isinstance(structure, Kron):
            return passes + self._factor_macs()
        if isinstance(structure, Full | Block | GP):
            return passes + self._dense_row_macs() + self._gram_macs(structure)
        return passes + sum(_layer(tile) * (self.columns if tile.r > 1 else 1) for tile in self.survey.tiles)

    def _factor_macs(self) -> int:
        """r q i² for A, once; r q o² for B, per column."""
        maps = [(tile.r, *tile.maps) for tile in self.survey.tiles if tile.maps]
        return sum(r * q * (i**2 + self.columns * o**2) for r, q, o, i in maps)

    def _output_macs(self, structure: Structure) -> int:
        """Of the output layer's r terms: r (i² + o²) for both factors, r o i along the axes of W or of their basis."""
        (tile,) = self.survey.tiles
        _, o, i = tile.maps or (0, 0, 0)
        factors = tile.r * (i**2 + o**2)
        if isinstance(structure, Ekfac):
            return 2 * factors + tile.r * o**2 + _layer(tile) + self.forward_macs
        return factors if isinstance(structure, Kron) else _layer(tile)

    def _dense_row_macs(self) -> int:
        return self.columns * sum(_layer(tile) for tile in self.survey.tiles)

    def _gram_macs(self, structure: Structure) -> int:
        n_rows = self.n_rows(structure)
        if isinstance(structure, Full | GP) and n_rows is not None:
            return self.columns * n_rows * self.rehearsal.linearised.sizes.factored
        return self.columns * structure.stored_floats(self.survey.layout) // 2


def n_columns(rehearsal: Rehearsal, fisher: Fisher) -> int:
    """Columns of SᵀJ per datum that a kind of curvature takes, of all parts."""
    if isinstance(fisher, Sampled):
        return fisher.n_draws * rehearsal.n_parts
    if isinstance(fisher, Empirical):
        return rehearsal.sites.t
    return rehearsal.sites.t * rehearsal.roots_per_site


def forward_macs(survey: Survey) -> int:
    return max(1, sum(_layer(tile) for tile in survey.tiles))
