"""Convert pandas and polars tables to tensors, without importing either package: the objects' own methods suffice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import InputTypeError

_PACKAGES = {"pandas", "polars"}


def is_frame(value: Any) -> bool:
    """Whether the value is a DataFrame or a Series."""
    return _package(value) in _PACKAGES and hasattr(value, "to_numpy")


def frame_inputs(frame: Any, where: str) -> Tensor:
    """A DataFrame as (N, columns), a Series as (N,); float64, converted to the network's dtype later."""
    return torch.from_numpy(np.array(_numbers(frame, where), dtype=np.float64))


def frame_targets(frame: Any, where: str) -> Tensor:
    """The same, but integers stay integers (class labels). Missing values become NaN."""
    return torch.from_numpy(np.array(_numbers(frame, where)))


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _numbers(frame: Any, where: str) -> np.ndarray:
    columns = _dtypes(frame)
    bad = [f"{name!r} ({dtype})" for name, dtype in columns if not _numeric(dtype)]
    if bad:
        what = f"column{'s' * (len(bad) > 1)} {', '.join(bad)} of the {type(frame).__name__}"
        if not hasattr(frame, "columns") and frame.name in (None, ""):
            what = f"the {type(frame).__name__} ({frame.dtype})"
        raise InputTypeError(
            f"{where}: {what} {'are' if len(bad) > 1 else 'is'} not numeric. Encode as numbers first (one-hot: "
            "pandas.get_dummies; labels: .astype('category').cat.codes), or leave out."
        )
    whole = all(_kind(dtype) in "biu" for _, dtype in columns)
    found = frame.to_numpy()
    if found.dtype == object or (found.dtype.kind in "biu") != whole:  # nullable or mixed columns
        missing = {"na_value": np.nan} if _package(frame) == "pandas" else {}
        found = frame.to_numpy(dtype=np.float64, **missing) if missing else found.astype(np.float64)
        if whole and not np.isnan(found).any():
            found = found.astype(np.int64)
    return found


def _dtypes(frame: Any) -> list[tuple[str, Any]]:
    """Name and dtype of every column."""
    if not hasattr(frame, "columns"):  # a Series
        return [(str(frame.name), frame.dtype)]
    return list(zip(map(str, frame.columns), list(frame.dtypes), strict=True))


def _numeric(dtype: Any) -> bool:
    return _kind(dtype) in "biuf"


def _kind(dtype: Any) -> str:
    """NumPy's kind of a dtype: b, i, u and f are numeric, everything else is "O".

    pandas: `kind` of sparse and categorical dtypes is that of their values. polars: through its predicate methods.
    """
    kind = getattr(dtype, "kind", None)
    if isinstance(kind, str):
        return kind
    if getattr(dtype, "is_numeric", None) is None:
        return "O"
    if dtype.is_integer():
        return "i"
    if str(dtype) == "Boolean":
        return "b"
    return "f" if dtype.is_float() else "O"
