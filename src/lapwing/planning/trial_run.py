"""Measure the peak memory of a fit and of a prediction by running the beginning of both.

The library processes the data in pieces, and each piece in groups of columns of SᵀJ. Every piece takes as much memory
as the first two, so the first two are run, with two groups of columns each, and live bytes are counted. The result
includes everything that is stored, and costs a few backward passes over one batch. If a trial would itself take more
than MOST_TRIED bytes, the memory is computed from shapes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Exact, Fisher, ModelSummary, Structure, Workload, estimate
from lapwing.curvature.passes import in_equal_parts
from lapwing.data import ModelInput
from lapwing.data.joining import joined_size
from lapwing.likelihoods import Likelihood, OutputCurvature, Sites
from lapwing.network.linearised import Linearised
from lapwing.operators import Curvature, GroupedDiagonal
from lapwing.planning.allocations import AllocationCounter
from lapwing.predictive import FUNCTION_PAIRS, WeightGaussian, antithetic_draws, pushforward

MOST_TRIED = 256 << 20  # bytes of accumulators above which memory is computed instead of measured
_CONTRACTED_BYTES = 64 << 20  # temporaries of one layer's rows in a prediction


@dataclass(frozen=True)
class Piece:
    """What is processed at a time: data, and columns of S for each."""

    n: int
    columns: int


@dataclass(frozen=True, eq=False)
class TrialRun:
    """A model and its first batch, on which fits and predictions are tried."""

    summary: ModelSummary
    likelihood: Likelihood
    sites: Sites
    x: ModelInput
    y: Tensor
    n_parts: int
    n_data: int | None = None  # None if the loader has no length
    _found: dict[tuple[Structure, Piece, Piece], tuple[int, int]] = field(default_factory=dict, init=False)

    @property
    def p(self) -> int:
        return self.linearised.layout.p

    @property
    def linearised(self) -> Linearised:
        return self.summary.linearised

    def peaks(self, structure: Structure, chunk_floats: int, columns: int, n_inputs: int) -> tuple[int, int]:
        """Peak bytes in addition to model and data: of the fit, and of a prediction including the posterior."""
        rows_at_once = max(1, chunk_floats // structure.row_floats(self.linearised.sizes))
        pieces = self._fit_piece(structure, rows_at_once, columns), self._predict_piece(rows_at_once, n_inputs)
        if self._too_large(structure):
            return self._computed(structure, *pieces)
        fitting, predicting = self._measured(structure.trial_structure, *pieces, n_inputs)
        fit = max(self._rule_check_bytes, self._model_bytes + fitting + structure.second_pass_bytes(self._work))
        return fit, self._posterior_bytes(structure) + max(predicting, structure.decomposition_bytes(self._work))

    @cached_property
    def _work(self) -> Workload:
        return Workload(self.summary, self.n_parts, self.n_data)

    @property
    def _rule_check_bytes(self) -> int:
        """Bytes of the check of layer rules: the copy, shifted weights, a gradient, and one direction for the largest
        tensor."""
        largest = max(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())
        return 3 * self._model_bytes + 2 * largest

    def _too_large(self, structure: Structure) -> bool:
        """Whether a trial would take too much memory."""
        return structure.sum_bytes(self._work) > MOST_TRIED

    def _computed(self, structure: Structure, fitted: Piece, predicted: Piece) -> tuple[int, int]:
        """The same from shapes: the posterior, with the activations of a piece and its rows."""
        summary, k = self.summary, self.linearised.k
        size = (self.linearised.network.dtype or torch.float64).itemsize
        kept = self._posterior_bytes(structure)
        # Activations stored by a forward pass, and the output of every layer once more, for its gradient.
        outputs = sum(block.r * block.maps[0] * block.maps[1] for block in summary.blocks if block.maps)
        activations = size * ((self.linearised.datum_floats or self.linearised.sizes.factored) + outputs)
        rows = size * self.linearised.sizes.factored
        gradient = sum(self.linearised.network.tensors[n].numel() for n in self.linearised.layout.names) * size
        fit = kept + fitted.n * activations + max(gradient, fitted.n * fitted.columns * rows)
        fit += structure.second_pass_bytes(self._work)
        # One more position for columns that are stacked, and the temporaries of one layer.
        at_once = predicted.n * (activations + k * rows) + _CONTRACTED_BYTES
        return max(self._rule_check_bytes, fit), kept + structure.predicting_bytes(self._work, at_once)

    def _fit_piece(self, structure: Structure, rows_at_once: int, columns: int) -> Piece:
        """The pieces that `curvature.estimate` would use."""
        at_most = max(1, rows_at_once // (self.linearised.k if self.linearised.rest.names else 1))
        together = joined_size(self.x.n, min(at_most, self.linearised.joined_batch_size))
        n = in_equal_parts(min(together, self.n_data or together), at_most)
        alone = structure.by_column and not self.linearised.rest.names
        return Piece(n, 1 if alone else min(columns, max(1, rows_at_once // n)))

    def _predict_piece(self, rows_at_once: int, n_inputs: int) -> Piece:
        """The pieces that `predictive.pushforward` would use."""
        return Piece(min(n_inputs, max(1, rows_at_once // self.linearised.k)), self.linearised.k)

    def _measured(self, structure: Structure, fitted: Piece, predicted: Piece, n_inputs: int) -> tuple[int, int]:
        key = (structure, fitted, predicted)
        if key not in self._found:
            found, fit_peak = self._fit(structure, fitted)
            self._found[key] = fit_peak, self._predict(found.parts[0], predicted, n_inputs)
        return self._found[key]

    def _fit(self, structure: Structure, piece: Piece) -> tuple[Estimate, int]:
        """Fit two pieces, and return the estimate with the peak of live bytes."""
        rows = piece.n * (self.linearised.k if self.linearised.rest.names else piece.columns)
        with AllocationCounter() as counter:
            found = estimate(
                self.linearised,
                self.likelihood,
                lambda: [self._first(piece.n)] * 2,  # two pieces: the second overlaps with what the first has left
                sites=self.sites,
                structure=structure,
                fisher=_FewColumns(2 * piece.columns),
                chunk_floats=rows * structure.row_floats(self.linearised.sizes),
            )
        return found, counter.peak

    def _predict(self, curvature: Curvature, piece: Piece, n_inputs: int) -> int:
        """Predict two pieces under a unit prior, and return the peak of live bytes."""
        x, _ = self._first(min(n_inputs, 2 * piece.n))
        with AllocationCounter() as counter:
            P0 = GroupedDiagonal.identity(curvature.p, self.linearised.network.device)
            H = curvature.scaled(P0.values[0])  # alive during the prediction, as in a posterior
            weights = WeightGaussian(self.linearised, H.unfactorised(P0), piece.n * piece.columns)
            if weights.many_outputs and self.likelihood.averages_functions:
                antithetic_draws(weights, x, P0.diagonal.new_zeros(FUNCTION_PAIRS, curvature.p))
            else:
                pushforward(weights, x)
        return counter.peak

    def _first(self, n: int) -> tuple[ModelInput, Tensor]:
        """The first n data of the batch, repeated if it has fewer."""
        index = torch.arange(n) % self.x.n
        return self.x.rows(index), self.y[index.to(self.y.device)]

    @cached_property
    def roots_per_site(self) -> int:
        """Columns of S per likelihood term, summed over parts."""
        x, y = self._first(1)
        f = self.sites.split(self.linearised.outputs(x))
        return sum(part.shape[-1] for part in Exact().parts(self.likelihood, f, y))

    @property
    def _model_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())

    def _posterior_bytes(self, structure: Structure) -> int:
        """Bytes of a posterior: the copy of the network, gradients of the fit statistics, curvature."""
        gradients = self.n_parts * self.summary.gradient_bytes
        return self._model_bytes + gradients + structure.stored_bytes(self._work)


@dataclass(frozen=True)
class _FewColumns(Fisher):
    """The first columns of S, all sites in each: the memory per column of any Fisher, without random numbers."""

    limit: int
    separate_sites = False

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        return [part[..., : self.limit] for part in Exact().parts(likelihood, f, y)]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return Exact().curvatures(likelihood, f, y)

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()
