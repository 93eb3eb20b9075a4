"""lw.save and lw.load: a posterior in one file, bound to the model that it was fitted to."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from lapwing.curvature import FitStatistics, Full
from lapwing.errors import InputTypeError, LapwingError, StorageError, StructureError, located
from lapwing.likelihoods import CustomLikelihood, Gaussian, Likelihood
from lapwing.network.jacobian import RowSizes
from lapwing.network.layers import rule_for
from lapwing.network.linearised import Linearised
from lapwing.network.module import Network, Traits, check_module, unwrapped
from lapwing.network.parameters import ParamLayout
from lapwing.operators import DenseCurvature
from lapwing.posterior import Posterior, writes_posteriors
from lapwing.runtime.arguments import positive_scale
from lapwing.runtime.sandbox import plain_tensors
from lapwing.storage import container
from lapwing.storage.atomic import replace_file
from lapwing.storage.binding import check_same, described, module_at
from lapwing.storage.codec import Decoder, Encoder, Node
from lapwing.storage.hints import conforms
from lapwing.storage.kinds import kind_named, kind_of
from lapwing.storage.strict_json import strictly_parsed
from lapwing.storage.table import table

_HOST = torch.device("cpu")
_ON_HOST = {"likelihood", "likelihood_scale", "readout"}  # small tensors that stay on the CPU
_NOT_WRITTEN = {"source", "linearised", "first_predict"}
_MOST_MULTIPLIED_OUT = 4_096  # parameters of a matrix-free posterior that is saved as a dense matrix of 128 MiB
_MEMORY_FORMATS = {
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
    "contiguous": torch.contiguous_format,
}


@writes_posteriors
@plain_tensors()
def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Write a posterior to one file, atomically: an older file is replaced as a whole or not at all.

    The file stores curvature, prior, likelihood, tuning history and how predictions are made, in the safetensors
    layout, with hashes of all bytes. It contains no pickle, no weights and no training data. A matrix-free posterior
    needs the data for every computation, so it is saved as the full matrix it represents, and loaded with structure
    `full`.
    """
    target = _path("save", path)
    content = _content(posterior)
    replace_file(target, lambda file: container.write(file, content))


@plain_tensors()
def load(path: str | os.PathLike[str], model: nn.Module, *, likelihood: Likelihood | None = None) -> Posterior:
    """Load a posterior written by `lw.save`, onto the same network; raises if the weights differ.

    `likelihood` is needed only for a CustomLikelihood, whose functions are not in the file.
    """
    check_module("load", model)
    source = _path("load", path)
    with located(str(source)):
        try:
            with open(source, "rb") as file:
                content = container.read(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise StorageError(f"it cannot be read ({error.strerror or error}).") from error
        return _guarded(content, Network.lent(unwrapped(model)), likelihood)


def _content(posterior: Any) -> container.Content:
    kind = kind_of(posterior)
    if kind is not None:
        return kind.encode(posterior)
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"save: expected a Posterior from lw.fit, got {type(posterior).__name__}.")
    return encoded(_without_data(posterior))


def _path(function: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputTypeError(f"{function}: expected a path, got {type(path).__name__}.")
    return Path(path)


def _without_data(posterior: Posterior) -> Posterior:
    """A matrix-free posterior with the dense matrix it represents; others as they are."""
    if not posterior.structure.streams:
        return posterior
    p = posterior.layout.p
    if p > _MOST_MULTIPLIED_OUT:
        raise StructureError(
            "save: a matrix-free posterior is products with its training data, which are not written to a file; the "
            f"full matrix is, up to {_MOST_MULTIPLIED_OUT} parameters, and these are {p}. Fit again where it is "
            'needed, or save structure="lowrank" or "kron".'
        )
    with torch.no_grad():
        matrices = [H.to_dense() for H in posterior.estimate.parts]
    parts = tuple(DenseCurvature.of((H + H.T) / 2) for H in matrices)
    return replace(posterior, structure=Full(), estimate=replace(posterior.estimate, parts=parts))


# --- to a document and back -----------------------------------------------------------------------------


def encoded(posterior: Posterior) -> container.Content:
    encoder = Encoder(table())
    written = {f.name: getattr(posterior, f.name) for f in fields(Posterior) if f.name not in _NOT_WRITTEN}
    if isinstance(posterior.likelihood, CustomLikelihood):
        written["likelihood"] = _options(posterior.likelihood)
    document = {
        "model": described(posterior.linearised.network),
        "linearised": _Shortcuts.of(posterior.linearised).encoded(encoder),
        "posterior": {name: encoder.encode(value, name) for name, value in written.items()},
    }
    return container.Content(json.dumps(document, allow_nan=False), encoder.tensors)


def _guarded(content: container.Content, network: Network, likelihood: Likelihood | None) -> Any:
    """Decode; errors that a corrupt or malicious file can cause become a StorageError."""
    try:
        return decoded(content, network, likelihood)
    except LapwingError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise StorageError(
            f"it does not describe a valid posterior ({type(error).__name__}: {error!s:.200})."
        ) from error


def decoded(content: container.Content, network: Network, likelihood: Likelihood | None) -> Any:
    document = strictly_parsed(content.document, "the document")
    if isinstance(document, dict) and "kind" in document:
        return kind_named(document["kind"]).decode(document, content.tensors, network.model)
    if not isinstance(document, dict) or document.keys() != {"model", "linearised", "posterior"}:
        raise StorageError("the document is not model, linearised and posterior.")
    check_same(document["model"], network)
    decoder = Decoder(table(), content.tensors)
    linearised = _Shortcuts.decoded(document["linearised"], decoder).on(network)
    values = _fields(document["posterior"], decoder, network.device)
    values["likelihood"] = _likelihood(values.get("likelihood"), likelihood)
    decoder.check_all_used()
    posterior = Posterior(linearised=linearised, **values)
    _check(posterior)
    return posterior


def _fields(nodes: Node, decoder: Decoder, device: torch.device) -> dict[str, Any]:
    hints = get_type_hints(Posterior)
    known = {f.name for f in fields(Posterior)} - _NOT_WRITTEN
    if not isinstance(nodes, dict) or not nodes.keys() <= known:
        raise StorageError("the posterior has unknown fields.")
    values = {name: decoder.decode(node, _HOST if name in _ON_HOST else device) for name, node in nodes.items()}
    for name, value in values.items():
        if name != "likelihood" and not conforms(value, hints[name]):
            raise StorageError(f"the posterior has a {name} that is not {hints[name]}.")
    readout = values.get("readout")
    if readout is not None and readout.shift is not None:
        values["readout"] = replace(readout, shift=readout.shift.to(device))
    return values


@dataclass(frozen=True)
class _Shortcuts:
    """What a Linearised has found out about its network: saved, so that loading needs no forward pass."""

    layout: ParamLayout
    datum_shape: tuple[int, ...]
    ruled: tuple[str, ...]
    vectorised: bool
    sizes: RowSizes
    images: str
    last: str | None
    shared: tuple[str, ...] = ()  # fields from here on are missing in older files
    traits: tuple[bool, bool, bool] = (False, True, True)
    ragged: int | None = None

    @classmethod
    def of(cls, known: Linearised) -> _Shortcuts:
        images = next(name for name, value in _MEMORY_FORMATS.items() if value == known.layout_of_images)
        ruled, shared = tuple(known.ruled), tuple(sorted(known.shared))
        traits = astuple(known.network.traits)
        sizes = known.sizes
        return cls(
            known.layout,
            known.datum_shape,
            ruled,
            known.vectorised,
            sizes,
            images,
            known.last,
            shared,
            traits,
            known.ragged,
        )

    def encoded(self, encoder: Encoder) -> Node:
        return {f.name: encoder.encode(getattr(self, f.name), f.name) for f in fields(self)}

    @classmethod
    def decoded(cls, nodes: Node, decoder: Decoder) -> _Shortcuts:
        hints = get_type_hints(cls)
        if not isinstance(nodes, dict) or {*nodes, "shared", "traits", "ragged"} != hints.keys():
            raise StorageError("the fields of the linearised network are not the expected ones.")
        values = {name: decoder.decode(node, _HOST) for name, node in nodes.items()}
        wrong = [name for name, value in values.items() if not conforms(value, hints[name])]
        if wrong or values["images"] not in _MEMORY_FORMATS:
            raise StorageError(f"the linearised network has an invalid {(wrong or ['images'])[0]}.")
        return cls(**values)

    def on(self, network: Network) -> Linearised:
        """The Linearised for this network; raises if a layer rule or parameter is missing."""
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            if name not in network.tensors or name in network.buffers or tuple(network.tensors[name].shape) != shape:
                raise StorageError(f"the model has no parameter '{name:.80}' of shape {shape}.")
        ruled = {path: module_at(network.model, path) for path in self.ruled}
        for path, module in ruled.items():
            if rule_for(module) is None or path not in self.layout.modules:
                raise StorageError(
                    f"module '{path}' ({type(module).__name__}) had a rule when the posterior was fitted, and has none "
                    "now; register it first: lapwing.network.layers.register_rule."
                )
        if self.last is not None and self.last not in ruled:
            raise StorageError(f"the last layer '{self.last:.80}' has no rule.")
        return Linearised(
            network.with_traits(Traits(*self.traits)),
            self.layout,
            self.datum_shape,
            self.ruled,
            self.vectorised,
            self.sizes,
            layout_of_images=_MEMORY_FORMATS[self.images],
            last=self.last,
            shared=frozenset(self.shared),
            ragged=self.ragged,
        )


# --- likelihoods of one's own -----------------------------------------------------------------------------


def _options(likelihood: CustomLikelihood) -> dict[str, Any]:
    """Its options, without the functions."""
    return {"psd": likelihood.psd, "n_fisher": likelihood.n_fisher, "class_axis": likelihood.class_axis}


def _likelihood(saved: Any, given: Likelihood | None) -> Likelihood:
    if isinstance(saved, Likelihood):
        if given is not None:
            raise StorageError(
                f"it holds its own likelihood, {type(saved).__name__}; leave likelihood out, and change it afterwards "
                "by posterior.with_likelihood(...)."
            )
        return saved
    if not isinstance(saved, dict) or saved.keys() != {"psd", "n_fisher", "class_axis"}:
        raise StorageError("the posterior has no likelihood.")
    if not isinstance(given, CustomLikelihood):
        raise StorageError(
            "the posterior was fitted with a CustomLikelihood, whose functions are not in the file: "
            "lw.load(path, model, likelihood=lw.CustomLikelihood(log_prob, ...)), the one it was fitted with."
        )
    if _options(given) != saved:
        raise StorageError(f"the CustomLikelihood has the options {_options(given)}; it was fitted with {saved}.")
    return given


# --- what goes together -------------------------------------------------------------------------------------


def _check(posterior: Posterior) -> None:
    p, statistics = posterior.layout.p, posterior.estimate.statistics
    n_parts = len(posterior.estimate.parts)
    at, shift, draws = posterior.expansion, posterior.readout.shift, posterior.draws
    same = {
        "curvature": posterior.estimate.parts[0].p == p,
        "prior": posterior.prior.layout == posterior.layout,
        "mean": shift is None or len(shift) == p,
        "linear mode": at is None or len(at.theta) == p,
        "samples": draws is None or (draws.zeta.shape[1] == p and len(draws.scales) == n_parts),
        "noise": len(posterior.fisher.scales(posterior.likelihood)) == n_parts,
        "statistics": all(_belong(s, posterior) for s in (statistics, *([] if at is None else [at.statistics]))),
        "budget": posterior.chunk_floats >= 1,
    }
    wrong = [name for name, right in same.items() if not right]
    if wrong:
        raise StorageError(f"its {wrong[0]} does not go with the rest of the posterior.")
    positive_scale("likelihood_scale", posterior.likelihood_scale)
    if not 0 < posterior.readout.temperature < float("inf"):
        raise StorageError("its temperature is not positive.")


def _belong(statistics: FitStatistics, posterior: Posterior) -> bool:
    n_parts = len(posterior.estimate.parts)
    n_numbers = 2 * n_parts if isinstance(posterior.likelihood, Gaussian) else 1
    return (
        tuple(statistics.gradients.shape) == (n_parts, posterior.layout.p) and len(statistics.likelihood) == n_numbers
    )
