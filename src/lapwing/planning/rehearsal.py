"""Peak memory of a fit and of a prediction, found by doing the beginning of both.

The engine works through the data in pieces, and through each piece some columns of SᵀJ at a time; every piece takes as
much memory as the first two. So they are done, with the first two groups of columns, and the bytes alive are counted:
whatever the engine keeps is in the figure, at the cost of a few backward passes over one batch. Where that would take
more than MOST_TRIED bytes, they are counted instead: a plan takes no more than the look at the network itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Exact, Fisher, Structure, Survey, Workload, estimate
from lapwing.curvature.passes import in_equal_parts
from lapwing.data import ModelInput
from lapwing.data.joining import joined_size
from lapwing.likelihoods import Bernoulli, Categorical, Likelihood, OutputCurvature, Sites
from lapwing.network.linearised import Linearised
from lapwing.operators import Curvature, GroupedDiagonal
from lapwing.planning.ledger import Ledger
from lapwing.predictive import FUNCTION_PAIRS, WeightGaussian, antithetic_draws, pushforward

MOST_TRIED = 256 << 20  # bytes of sums up to which a fit is tried
_CONTRACTED_BYTES = 64 << 20  # rows of one layer while they are rotated and contracted


@dataclass(frozen=True)
class Piece:
    """How much is in memory at a time: data, and columns of each."""

    n: int
    columns: int


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """A model and the data of its first batch, with which the engine is tried."""

    survey: Survey
    likelihood: Likelihood
    sites: Sites
    x: ModelInput
    y: Tensor
    n_parts: int
    n_data: int | None = None  # as announced; None when the data do not say
    _found: dict[tuple[Structure, Piece, Piece], tuple[int, int]] = field(default_factory=dict, init=False)

    @property
    def p(self) -> int:
        return self.linearised.layout.p

    @property
    def linearised(self) -> Linearised:
        return self.survey.linearised

    def peaks(self, structure: Structure, chunk_floats: int, columns: int, n_inputs: int) -> tuple[int, int]:
        """Bytes above the model and the data while fitting; and while predicting, the posterior included."""
        rows_at_once = max(1, chunk_floats // structure.row_floats(self.linearised.sizes))
        pieces = self._fit_piece(structure, rows_at_once, columns), self._predict_piece(rows_at_once, n_inputs)
        if self._large(structure):
            return self._counted(structure, *pieces)
        fitting, predicting = self._tried(structure.tried_as, *pieces, n_inputs)
        fit = max(self._probing, self._model_bytes + fitting + structure.second_pass_bytes(self._work))
        return fit, self._held(structure) + max(predicting, structure.decomposition_bytes(self._work))

    @cached_property
    def _work(self) -> Workload:
        return Workload(self.survey, self.n_parts, self.n_data)

    @property
    def _probing(self) -> int:
        """Checking the layers' rules: the copy, shifted weights, a gradient, and a direction of the largest tensor."""
        largest = max(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())
        return 3 * self._model_bytes + 2 * largest

    def _large(self, structure: Structure) -> bool:
        """Whether a trial would take so much memory that its bytes are counted instead."""
        return structure.sum_bytes(self._work) > MOST_TRIED

    def _counted(self, structure: Structure, fitted: Piece, predicted: Piece) -> tuple[int, int]:
        """The same without a trial: what is held, with the activations of a piece and its rows."""
        survey, k = self.survey, self.linearised.k
        size = (self.linearised.network.dtype or torch.float64).itemsize
        kept = self._held(structure)
        # What a forward pass keeps, and every layer's output once more, to be differentiated by.
        outputs = sum(tile.r * tile.maps[0] * tile.maps[1] for tile in survey.tiles if tile.maps)
        activations = size * ((self.linearised.datum_floats or self.linearised.sizes.factored) + outputs)
        rows = size * self.linearised.sizes.factored
        gradient = sum(self.linearised.network.tensors[n].numel() for n in self.linearised.layout.names) * size
        fit = kept + fitted.n * activations + max(gradient, fitted.n * fitted.columns * rows)
        fit += structure.second_pass_bytes(self._work)
        # One position more for columns that are stacked, and for what is rotated and contracted of one layer.
        at_once = predicted.n * (activations + k * rows) + _CONTRACTED_BYTES
        return max(self._probing, fit), kept + structure.predicting_bytes(self._work, at_once)

    def _fit_piece(self, structure: Structure, rows_at_once: int, columns: int) -> Piece:
        """As `curvature.estimate` takes them."""
        at_most = max(1, rows_at_once // (self.linearised.k if self.linearised.rest.names else 1))
        together = joined_size(self.x.n, min(at_most, self.linearised.worth_a_pass))
        n = in_equal_parts(min(together, self.n_data or together), at_most)
        alone = structure.by_column and not self.linearised.rest.names
        return Piece(n, 1 if alone else min(columns, max(1, rows_at_once // n)))

    def _predict_piece(self, rows_at_once: int, n_inputs: int) -> Piece:
        """As `predictive.pushforward` takes them."""
        return Piece(min(n_inputs, max(1, rows_at_once // self.linearised.k)), self.linearised.k)

    def _tried(self, structure: Structure, fitted: Piece, predicted: Piece, n_inputs: int) -> tuple[int, int]:
        key = (structure, fitted, predicted)
        if key not in self._found:
            found, fit_peak = self._fit(structure, fitted)
            self._found[key] = fit_peak, self._predict(found.parts[0], predicted, n_inputs)
        return self._found[key]

    def _fit(self, structure: Structure, piece: Piece) -> tuple[Estimate, int]:
        rows = piece.n * (self.linearised.k if self.linearised.rest.names else piece.columns)
        with Ledger() as ledger:
            found = estimate(
                self.linearised,
                self.likelihood,
                lambda: [self._first(piece.n)] * 2,
                sites=self.sites,
                structure=structure,
                fisher=_FewColumns(2 * piece.columns),
                chunk_floats=rows * structure.row_floats(self.linearised.sizes),
            )
        return found, ledger.peak

    def _predict(self, curvature: Curvature, piece: Piece, n_inputs: int) -> int:
        x, _ = self._first(min(n_inputs, 2 * piece.n))
        with Ledger() as ledger:
            P0 = GroupedDiagonal.identity(curvature.p, self.linearised.network.device)
            H = curvature.scaled(P0.values[0])  # kept, as the posterior keeps it
            weights = WeightGaussian(self.linearised, H.unfactorised(P0), piece.n * piece.columns)
            if weights.many_outputs and isinstance(self.likelihood, Bernoulli | Categorical):
                antithetic_draws(weights, x, P0.diagonal.new_zeros(FUNCTION_PAIRS, curvature.p))
            else:
                pushforward(weights, x)
        return ledger.peak

    def _first(self, n: int) -> tuple[ModelInput, Tensor]:
        """n data of the first batch, over again if it has fewer."""
        index = torch.arange(n) % self.x.n
        return self.x.rows(index), self.y[index.to(self.y.device)]

    @cached_property
    def roots_per_site(self) -> int:
        """Columns of S per likelihood term, of all parts."""
        x, y = self._first(1)
        f = self.sites.split(self.linearised.outputs(x))
        return sum(part.shape[-1] for part in Exact().parts(self.likelihood, f, y))

    @property
    def _model_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())

    def _held(self, structure: Structure) -> int:
        """The posterior: the network's copy, gradients of the fit statistics, curvature."""
        gradients = self.n_parts * self.survey.gradient_bytes
        return self._model_bytes + gradients + structure.stored_bytes(self._work)


@dataclass(frozen=True)
class _FewColumns(Fisher):
    """Some columns of S, all sites in each: as many bytes per column as any Fisher takes, and no random numbers."""

    limit: int
    separate_sites = False

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        return [part[..., : self.limit] for part in Exact().parts(likelihood, f, y)]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return Exact().curvatures(likelihood, f, y)

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()
