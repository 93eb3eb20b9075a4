"""An image's posterior in a file: the operator, the hyperparameters, and the prior covariance or the way back to it.

Of a dense posterior the covariance of images is written; of a matrix-free one the network's input, for its products
come from the network, which is given again when the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing._types import Float
from lapwing.errors import StorageError, StructureError
from lapwing.imaging.blocks import Block, weights
from lapwing.imaging.evidence import Found
from lapwing.imaging.jacobian import ImageJacobian
from lapwing.imaging.linear_image import rows_of
from lapwing.imaging.maps import FourierMap, FunctionMap, MatrixMap, SeparableMap
from lapwing.imaging.operator import Operator
from lapwing.imaging.prior import ImagePrior
from lapwing.imaging.projections import FilteredBackProjection
from lapwing.imaging.sampled import Effort, SampledWay
from lapwing.imaging.value import ImagingPosterior, Inserted
from lapwing.imaging.ways import DenseWay
from lapwing.network.module import Network
from lapwing.storage.binding import check_same, described
from lapwing.storage.codec import Decoder, Encoder, Entry, Table
from lapwing.storage.container import Content
from lapwing.storage.kinds import Kind, register

_HOST = torch.device("cpu")
_MOST_WRITTEN = 1 << 24  # entries of an operator of functions that are written out as a matrix


@dataclass(frozen=True, eq=False)
class _KeptMatrix:
    """A matrix by its non-zero entries, or dense: no indices then."""

    values: Tensor
    starts: Tensor | None
    columns: Tensor | None
    n_columns: int

    @classmethod
    def of(cls, linear: MatrixMap) -> _KeptMatrix:
        A = linear.matrix
        if A.layout == torch.strided:
            return cls(A, None, None, A.shape[1])
        return cls(A.values(), A.crow_indices(), A.col_indices(), A.shape[1])

    def restored(self, device: torch.device) -> MatrixMap:
        if self.starts is None or self.columns is None:
            return MatrixMap(self.values)
        coo = torch.sparse_csr_tensor(
            self.starts, self.columns, self.values, (len(self.starts) - 1, self.n_columns), check_invariants=True
        )
        return MatrixMap(coo)


@dataclass(frozen=True, eq=False)
class _KeptOperator:
    """An operator; its filtered back-projection is written where it is the library's own."""

    image_shape: tuple[int, ...]
    data_shape: tuple[int, ...]
    linear: MatrixMap | SeparableMap | FourierMap
    filtered: FilteredBackProjection | None
    name: str

    @classmethod
    def of(cls, A: Operator) -> _KeptOperator:
        linear: Any = A.linear
        if isinstance(linear, FunctionMap):
            if linear.m * linear.d > _MOST_WRITTEN:
                raise StructureError(
                    f"save: {A!r} is made of functions, which cannot be in a file, and its matrix of {linear.m} × "
                    f"{linear.d} is too large to stand for them. Make the operator of a sparse matrix."
                )
            linear = MatrixMap(A.matrix())
        own = A.filtered if isinstance(A.filtered, FilteredBackProjection) else None
        return cls(A.image_shape, A.data_shape, linear, own, A.name)

    def restored(self, device: torch.device) -> Operator:
        return Operator(self.linear, self.image_shape, data_shape=self.data_shape, fbp=self.filtered, name=self.name)


@dataclass(frozen=True, eq=False)
class _Kept:
    """The posterior without its network; `S` of a dense one, `effort` of one of samples."""

    operator: Operator
    mean: Float[Tensor, "h w"]
    prior: ImagePrior
    eta: Float[Tensor, " q"]
    noise_std: float
    mode: str
    inserted: Inserted
    found: Found | None
    image_noise_var: float
    input: Tensor | None
    S: Float[Tensor, "d d"] | None
    effort: Effort | None
    keeps_rows: bool

    @classmethod
    def of(cls, post: ImagingPosterior) -> _Kept:
        dense = post.way if isinstance(post.way, DenseWay) else None
        free = post.way if isinstance(post.way, SampledWay) else None
        shared = (post.operator, post.mean, post.prior, post.eta, post.noise_std, post.mode, post.inserted, post.found)
        return cls(
            *shared, post.image_noise_var, post.input, None if dense is None else dense.S,
            None if free is None else free.effort, free is not None and free.rows is not None,
        )  # fmt: skip

    def on(self, network: nn.Module) -> ImagingPosterior:
        way: Any
        noise_var = self.noise_std**2
        if self.S is not None:
            way = DenseWay(self.operator, self.S, noise_var)
        else:
            assert self.effort is not None and self.input is not None
            J = ImageJacobian.of(network, self.input)
            m = self.operator.linear.m
            rows = J.all_rows(rows_of(self.operator, torch.arange(m))) if self.keeps_rows else None
            way = SampledWay(self.operator, J, self.prior, self.eta, noise_var, self.effort, rows)
        return ImagingPosterior(
            self.operator, self.mean, self.prior, self.eta, self.noise_std, way, self.mode, self.inserted, self.found,
            self.image_noise_var, self.input, network,
        )  # fmt: skip

    def check(self) -> None:
        d, m = self.operator.linear.d, self.operator.linear.m
        right = {
            "mean": tuple(self.mean.shape) == self.operator.image_shape,
            "covariance": (self.S is None) != (self.effort is None) and (self.S is None or self.S.shape == (d, d)),
            "hyperparameters": len(self.eta) == len(self.prior.names) and bool(torch.isfinite(self.eta).all()),
            "prior": sum(b.size for b in self.prior.blocks) == self.prior.p,
            "noise": 0 < self.noise_std < float("inf") and 0 <= self.image_noise_var < float("inf"),
            "evidence": len(self.inserted.target) == m,
        }
        for what, holds in right.items():
            if not holds:
                raise StorageError(f"its {what} does not go with the rest of the posterior.")


_TABLE = Table(
    {
        "Block": Entry(Block),
        "Effort": Entry(Effort),
        "FilteredBackProjection": Entry(FilteredBackProjection),
        "Found": Entry(Found),
        "FourierMap": Entry(FourierMap),
        "ImagePrior": Entry(ImagePrior),
        "ImagingPosterior": Entry(_Kept, check=_Kept.check),
        "Inserted": Entry(Inserted),
        "MatrixMap": Entry(MatrixMap, _KeptMatrix.of, form=_KeptMatrix, restored=_KeptMatrix.restored),
        "Operator": Entry(Operator, _KeptOperator.of, form=_KeptOperator, restored=_KeptOperator.restored),
        "SeparableMap": Entry(SeparableMap),
    }
)


def _encoded(post: ImagingPosterior) -> Content:
    encoder = Encoder(_TABLE)
    document = {
        "kind": "imaging",
        "model": described(Network.lent(post.network)),
        "posterior": encoder.encode(_Kept.of(post), "posterior"),
    }
    return Content(json.dumps(document, allow_nan=False), encoder.tensors)


def _decoded(document: Mapping[str, Any], tensors: Mapping[str, Tensor], network: nn.Module) -> ImagingPosterior:
    if document.keys() != {"kind", "model", "posterior"}:
        raise StorageError("the document is not kind, model and posterior.")
    check_same(document["model"], Network.lent(network))
    decoder = Decoder(_TABLE, tensors)
    kept = decoder.decode(document["posterior"], _HOST)
    decoder.check_all_used()
    if not isinstance(kept, _Kept):
        raise StorageError("the document describes no posterior of an image.")
    if weights(network).p != kept.prior.p:
        raise StorageError("its prior is not over the weights of this network.")
    return kept.on(network)


register(Kind("imaging", ImagingPosterior, _encoded, _decoded))
