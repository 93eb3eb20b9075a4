"""The closed table of what the file of a posterior may hold; structures come from the registry.

A check raises if the fields of a value are inconsistent. Hashes have been verified by then, so the checks protect
against files made by hand, and against our own mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod

import torch

from lapwing import operators
from lapwing._types import Float, Tensor
from lapwing.curvature import STRUCTURES, Empirical, Estimate, Exact, FitStatistics, Labels, Nystrom, Sampled, Signs
from lapwing.data import Columns
from lapwing.errors import StorageError, StructureError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.linear_model import Elbo, Expansion, Refinement, Search
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import (
    Arrangement,
    BlockDiagonalCurvature,
    Eigen,
    EigenCurvature,
    Factor,
    KroneckerCurvature,
    KroneckerFactors,
    Leading,
    LeadingEigen,
    LowRankCurvature,
    SeparateCurvature,
    one_group,
)
from lapwing.posterior import Readout
from lapwing.posterior.sampling import WeightDraws
from lapwing.posterior.trained import Trained
from lapwing.predictive import link_rules
from lapwing.priors import GaussianPrior
from lapwing.storage.codec import Entry, Table
from lapwing.tuning import Step
from lapwing.tuning.em import EMStep

_MOST_WRITTEN = 1 << 28  # entries of dense rows in a file: 2 GiB


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise StorageError(f"the file describes {what}.")


# --- reduced before writing ----------------------------------------------------------------------------


def _without_datum_rows(H: LowRankCurvature) -> LowRankCurvature:
    """H with other rows: an orthogonal combination that gives the same H, but does not show the training data."""
    if H.rank * H.p > _MOST_WRITTEN:
        raise StructureError(
            f"The full curvature is kept as {H.rank} rows of {H.p} parameters, as factors that hold the training data; "
            f"a file holds none, and written out they would be {H.rank * H.p:.2g} numbers (at most {_MOST_WRITTEN}). "
            'Use structure="kron", or fewer parameters: params="last_layer".'
        )
    return H.in_eigenbasis()


def _untied(H: SeparateCurvature) -> SeparateCurvature:
    """Refuse outputs coupled by a softmax: their rows cannot be rotated, and would show the training data."""
    if H.tie is not None:
        raise StructureError(
            'lw.GP(coupling="independent") of a softmax connects outputs datum by datum, so its rows show the data '
            'they came from, and cannot be saved: a file holds no training data. coupling="full" and "diag" can.'
        )
    return H


def _without_outputs(at: Expansion) -> Expansion:
    """Drop the linear model's outputs on the training data; they only speed up the next mode search."""
    return replace(at, outputs=None)


@dataclass(frozen=True, eq=False)
class _WrittenFactors:
    """Kronecker factors as stored. If eigenvalues are given, eigenvectors are stored instead of the sums.

    Of a factor that is kept as leading directions always: its sketch would not be smaller.
    """

    A_sum: Float[Tensor, "q i r"]
    count: float
    B_sum: Float[Tensor, "q o s"]
    shared: None = None  # in older files
    a: Float[Tensor, "q j"] | None = None
    b: Float[Tensor, "q k"] | None = None
    leading_A: Leading | None = None
    leading_B: Leading | None = None

    @classmethod
    def of(cls, factors: KroneckerFactors) -> _WrittenFactors:
        A, B = factors.eigen_A, factors.eigen_B
        a, b = (eigen.pair[0] if _by_eigenvectors(eigen) else None for eigen in (A, B))
        leading = [eigen.leading if isinstance(eigen, LeadingEigen) else None for eigen in (A, B)]
        return cls(A.held, factors.count, B.held, a=a, b=b, leading_A=leading[0], leading_B=leading[1])

    def factors(self, device: torch.device) -> KroneckerFactors:
        A = _factor(self.A_sum, self.a, self.leading_A, self.count)
        return KroneckerFactors(A, self.count, _factor(self.B_sum, self.b, self.leading_B, 1.0))


def _by_eigenvectors(factor: Factor) -> bool:
    return factor.sum_released if isinstance(factor, Eigen) else True


def _factor(held: Tensor, values: Tensor | None, leading: Leading | None, count: float) -> Factor:
    if values is None:
        return Eigen(held, count)
    if leading is None:
        return Eigen.decomposed(values, held, count)
    return LeadingEigen.decomposed(values, held, leading, count)


def _one_index(prior: GaussianPrior) -> GaussianPrior:
    """A prior with a single group is stored without its index, which is as long as the parameters."""
    return replace(prior, index=prior.index[:1]) if len(prior.group_names) == 1 else prior


def _every_index(prior: GaussianPrior, device: torch.device) -> GaussianPrior:
    if len(prior.group_names) > 1:
        return prior
    return replace(prior, index=one_group(prior.layout.p).to(prior.index.device))


# --- what goes together -------------------------------------------------------------------------------


def _check_layout(layout: ParamLayout) -> None:
    _require(len(layout.names) == len(layout.shapes) == len(set(layout.names)) > 0, "parameters without a shape each")
    _require(all(size >= 0 for shape in layout.shapes for size in shape), "parameters of negative size")
    chosen = layout.selection
    if chosen is not None and len(chosen):
        inside = int(chosen[0]) >= 0 and int(chosen[-1]) < layout.whole.p
        _require(inside and bool((chosen.diff() > 0).all()), "a subnetwork of other weights")


def _check_arrangement(layer: Arrangement) -> None:
    weight, bias = (0 if s is None else s.stop - s.start for s in (layer.weight, layer.bias))
    maps = layer.q * layer.o
    _require(layer.q >= 1 and layer.o >= 1 and (weight or bias) > 0, "a layer without parameters")
    _require(sorted(layer.order) == list(range(len(layer.view))), "a layer whose axes are in no order")
    _require(layer.weight is None or (prod(layer.view) == weight and weight % maps == 0), "a weight of another shape")
    _require(layer.bias is None or bias == maps, "a bias of another shape")


def _check_tiling(slices: Sequence[slice], sizes: Sequence[int]) -> None:
    ends = [0, *(s.stop for s in slices)]
    tiled = all(s.start == end for s, end in zip(slices, ends, strict=False))
    _require(len(slices) == len(sizes) > 0 and tiled, "blocks that do not tile the parameters")
    _require([s.stop - s.start for s in slices] == list(sizes), "blocks of another size than their place")


def _check_blocks(H: BlockDiagonalCurvature) -> None:
    _check_tiling(H.slices, [block.p for block in H.blocks])


def _check_factors(factors: _WrittenFactors) -> None:
    _require(isfinite(factors.count) and factors.count > 0, "a layer without data")
    _require(len(factors.A_sum) == len(factors.B_sum), "factors of different layers")
    A, B = (factors.a, factors.A_sum, factors.leading_A), (factors.b, factors.B_sum, factors.leading_B)
    for values, U, leading in (A, B):
        (_, d, r), fewer = U.shape, leading is not None
        kept = r < d and values is not None and r <= leading.rank if leading is not None else r == d
        _require(kept, "factors of another size than their directions")
        if values is not None:
            same = values.shape == (len(U), r + fewer) and bool((values >= 0).all())
            _require(same, "factors with other eigenvalues")


def _check_kronecker(H: KroneckerCurvature) -> None:
    A, B = H.factors.eigen_A.held, H.factors.eigen_B.held
    _check_maps(H.arrangement, (*A.shape[:2], A.shape[1]), (*B.shape[:2], B.shape[1]))


def _check_eigen(H: EigenCurvature) -> None:
    q, o, i = H.s.shape
    _check_maps(H.arrangement, H.basis.U_A.shape, H.basis.U_B.shape)
    _require((H.arrangement.q, H.arrangement.o, H.arrangement.i) == (q, o, i), "eigenvalues of another layer")


def _check_maps(layer: Arrangement, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    q, o, i = layer.q, layer.o, layer.i
    _require(tuple(inputs) == (q, i, i) and tuple(outputs) == (q, o, o), "factors of another size than their layer")
    in_order = sorted(layer.slices, key=lambda s: s.start)
    _check_tiling(in_order, [s.stop - s.start for s in in_order])


def _check_separate(H: SeparateCurvature) -> None:
    _require(len(H.outputs) > 0 and len({part.p for part in H.outputs}) == 1, "outputs with other weights")
    k = H.output_of
    _require(len(k) > 0 and int(k.min()) >= 0 and int(k.max()) < len(H.outputs), "rows of outputs that are not there")


def _check_low_rank(H: LowRankCurvature) -> None:
    _require(tuple(H.scale.shape) in ((), (H.rank,)), "rows with other scales")


def _check_prior(prior: GaussianPrior) -> None:
    p, g = prior.layout.p, len(prior.group_names)
    _require(len(prior.index) == p or len(prior.index) == g == 1, "a prior over other parameters")
    _require(not p or (int(prior.index.min()) >= 0 and int(prior.index.max()) < g), "a prior with unknown groups")
    _require(tuple(prior.mean.shape) in ((), (p,)), "a prior mean of another shape")
    _require(len(prior.reasons) in (0, g), "reasons of other groups")


def _check_statistics(statistics: FitStatistics) -> None:
    _require(statistics.n >= 1, "a posterior without data")


def _check_estimate(estimate: Estimate) -> None:
    p = estimate.statistics.gradients.shape[1]
    _require(len(estimate.parts) > 0 and all(H.p == p for H in estimate.parts), "curvatures of other parameters")


def _check_draws(draws: WeightDraws) -> None:
    shape = tuple(draws.zeta.shape)
    alike = tuple(draws.prior.shape) == shape and tuple(draws.data.shape) == (len(draws.scales), *shape)
    _require(alike and len(draws.precisions) == shape[1], "samples of other weights")
    _require(bool((draws.precisions > 0).all()) and bool((draws.scales > 0).all()), "samples without a precision")


def _check_trained(trained: Trained) -> None:
    _require(trained.predictive in ("glm", "bnn", "mean") and trained.n_draws >= 1, "an unknown way to predict")
    _require(trained.beta > 0 and 0 <= trained.reverted <= 1 and 0 <= trained.unmoved <= 1, "a training of no kind")


def _check_columns(columns: Columns) -> None:
    inputs, keywords = columns.inputs, columns.keywords
    _require(keywords is None or (inputs is not None and len(keywords) == len(inputs)), "columns without keywords")
    _require(len(columns.targets) > 0, "no column of targets")


def _check_rows(sizes: RowSizes) -> None:
    _require(sizes.factored >= 0 and sizes.dense >= 0, "rows of no size")


CURVATURES = {
    "DenseCurvature": Entry(operators.DenseCurvature),
    "SymmetricMatrix": Entry(operators.SymmetricMatrix),
    "DiagonalCurvature": Entry(operators.DiagonalCurvature),
    "BlockDiagonalCurvature": Entry(BlockDiagonalCurvature, check=_check_blocks),
    "KroneckerCurvature": Entry(KroneckerCurvature, check=_check_kronecker),
    "KroneckerFactors": Entry(
        KroneckerFactors,
        _WrittenFactors.of,
        _check_factors,
        form=_WrittenFactors,
        restored=_WrittenFactors.factors,
    ),
    "Leading": Entry(Leading),
    "EigenCurvature": Entry(EigenCurvature, check=_check_eigen),
    "Basis": Entry(operators.Basis),
    "Arrangement": Entry(Arrangement, check=_check_arrangement),
    "ExactDamping": Entry(operators.ExactDamping),
    "SplitDamping": Entry(operators.SplitDamping),
    "LowRankCurvature": Entry(LowRankCurvature, _without_datum_rows, _check_low_rank),
    "SeparateCurvature": Entry(SeparateCurvature, _untied, _check_separate),
    "BoundedCurvature": Entry(operators.BoundedCurvature),
    "RootKernels": Entry(operators.RootKernels),
    "DenseRows": Entry(operators.DenseRows),
    "WrittenRows": Entry(operators.WrittenRows),
}
LIKELIHOODS = {
    "Gaussian": Entry(Gaussian),
    "Categorical": Entry(Categorical),
    "Bernoulli": Entry(Bernoulli),
    "Poisson": Entry(Poisson),
    "HeteroscedasticGaussian": Entry(HeteroscedasticGaussian),
}
OTHERS = {
    "Estimate": Entry(Estimate, check=_check_estimate),
    "FitStatistics": Entry(FitStatistics, check=_check_statistics),
    "Exact": Entry(Exact),
    "Sampled": Entry(Sampled),
    "Labels": Entry(Labels),
    "Signs": Entry(Signs),
    "Empirical": Entry(Empirical),
    "GaussianPrior": Entry(GaussianPrior, _one_index, _check_prior, restored=_every_index),
    "ParamLayout": Entry(ParamLayout, check=_check_layout, on_host=True),
    "RowSizes": Entry(RowSizes, check=_check_rows),
    "Expansion": Entry(Expansion, _without_outputs),
    "Search": Entry(Search),
    "Refinement": Entry(Refinement),
    "Elbo": Entry(Elbo),
    "Trained": Entry(Trained, check=_check_trained),
    "Readout": Entry(Readout),
    "Columns": Entry(Columns, check=_check_columns),
    "Step": Entry(Step),
    "EMStep": Entry(EMStep),
    "WeightDraws": Entry(WeightDraws, check=_check_draws),
    "DefaultLink": Entry(link_rules.Default),
    "MonteCarloLink": Entry(link_rules.MonteCarlo),
    "QuadratureLink": Entry(link_rules.Quadrature),
}
LINKS = {
    link.name: link for link in (link_rules.PROBIT, link_rules.PAIRWISE, link_rules.BRIDGE, link_rules.BRIDGE_NORM)
}


def table() -> Table:
    """Types of the library, and of the structures that are registered."""
    found = [structure for structure in STRUCTURES.values() if not structure.streams]
    structures = {type(structure).__name__: Entry(type(structure)) for structure in (*found, Nystrom())}
    theirs = {kind.__name__: Entry(kind) for structure in found for kind in structure.file_values}
    return Table({**structures, **CURVATURES, **theirs, **LIKELIHOODS, **OTHERS}, LINKS)
