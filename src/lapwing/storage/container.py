"""The file format: named tensors in the safetensors layout, a JSON document in its metadata, and hashes of all bytes.

    8 bytes   length of the header, little endian
    header    JSON: name → dtype, shape, data_offsets; "__metadata__": format, schema, document, sha256 of each tensor,
              and of the header itself (computed with zeros in its place)
    data      the tensors, contiguous, in the order of the header

Other safetensors readers can open it. This reader validates every number against the size of the file before it
allocates memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import torch
from torch import Tensor

from lapwing.errors import StorageError
from lapwing.storage.strict_json import strictly_parsed

FORMAT, SCHEMA = "lapwing", 1
_NO_DIGEST = "0" * 64  # stands in the header while its own hash is computed
_METADATA = {"format", "schema", "document", "tensor_sha256", "header_sha256"}
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_AXES = 16


@dataclass(frozen=True)
class Content:
    """The content of a file: a JSON document, and the tensors that it refers to."""

    document: str
    tensors: Mapping[str, Tensor]


def write(file: IO[bytes], content: Content) -> None:
    """Write one tensor at a time; a copy (of a non-contiguous or GPU tensor) is freed before the next."""
    header = _header(content)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for tensor in content.tensors.values():
        file.write(raw(tensor))


def read(file: IO[bytes], size: int) -> Content:
    """Read and validate the content of a file of `size` bytes."""
    header, start = _read_header(file, size)
    metadata = header.pop("__metadata__", None)
    _check_metadata(metadata)
    digests = strictly_parsed(metadata["tensor_sha256"], "the list of hashes")
    places = list(_places(header, size - start))
    if not isinstance(digests, dict) or digests.keys() != header.keys():
        raise StorageError("the list of hashes does not name the tensors of the file.")
    tensors = {}
    for name, dtype, shape, n_bytes in places:
        # n_bytes was checked against the size of the file, so a forged header cannot exhaust memory.
        content = bytearray(n_bytes)
        if file.readinto(content) != n_bytes:  # type: ignore[attr-defined]
            raise StorageError(f"the file ends inside tensor '{name}'.")
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise StorageError(f"tensor '{name}' has changed since it was written: its SHA-256 does not match.")
        tensors[name] = _tensor(content, dtype, shape)
    return Content(metadata["document"], tensors)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = tensor.cpu().reshape(-1)
    if not len(flat):
        return memoryview(b"")
    # A tensor of one number is contiguous with any stride, which view() does not accept.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def can_hold(dtype: torch.dtype) -> bool:
    return dtype in _NAMES


def _header(content: Content) -> bytes:
    """The header with offsets, document and hashes, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in content.tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    digests = {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in content.tensors.items()}
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "document": content.document,
        "tensor_sha256": json.dumps(digests),
        "header_sha256": _NO_DIGEST,
    }
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)  # safetensors: data start at a multiple of 8 bytes
    mark = b'"header_sha256": "'
    # The hash of the header was computed with zeros in its place; fill it in.
    return text.replace(mark + _NO_DIGEST.encode(), mark + hashlib.sha256(text).hexdigest().encode(), 1)


def _read_header(file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the data; version first, then the header's own hash."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= size - 8:
        raise StorageError(f"its {size} bytes do not contain a complete header.")
    text = file.read(length)
    header = strictly_parsed(text, "the header")
    if not isinstance(header, dict):
        raise StorageError("the header is not a JSON object.")
    _check_version(header.get("__metadata__"))
    digest = str(header["__metadata__"].get("header_sha256")).encode()
    blank = text.replace(b'"' + digest + b'"', b'"' + _NO_DIGEST.encode() + b'"')
    if len(digest) != len(_NO_DIGEST) or hashlib.sha256(blank).hexdigest().encode() != digest:
        raise StorageError("the header has changed since it was written: its SHA-256 does not match.")
    return header, 8 + length


def _check_version(metadata: Any) -> None:
    """Checked before the hash, since another version may compute hashes differently."""
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise StorageError("it is not a file that lw.save wrote.")
    if metadata.get("schema") != str(SCHEMA):
        raise StorageError(
            f"it has schema {metadata.get('schema')!r:.40}; this version of Lapwing reads schema {SCHEMA}. "
            "Load it with the version that wrote it."
        )


def _check_metadata(metadata: dict[str, Any]) -> None:
    if metadata.keys() != _METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise StorageError(f"its metadata are not {', '.join(sorted(_METADATA))}.")


def _places(header: dict[str, Any], room: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """(name, dtype, shape, bytes) of each tensor; together they must fill the data without gaps or overlaps."""
    end = 0
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise StorageError(f"the header's entry for '{name:.80}' is not dtype, shape and data_offsets.")
        shape, offsets = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None or not _are_counts(shape) or not _are_counts(offsets) or len(shape) > _MOST_AXES:
            raise StorageError(f"the header's entry for '{name:.80}' has no dtype, shape or offsets that can be read.")
        n_bytes = prod(shape) * dtype.itemsize
        if offsets != [end, end + n_bytes] or end + n_bytes > room or max(shape, default=0) > room:
            raise StorageError(f"tensor '{name:.80}' of shape {shape!s:.80} does not fit where it should stand.")
        end += n_bytes
        yield name, dtype, tuple(shape), n_bytes
    if end != room:
        raise StorageError(f"{room} bytes follow the header, which announces {end}.")


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype == torch.bool and max(content, default=0) > 1:
        raise StorageError("a truth value is neither 0 nor 1.")
    return (torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)).reshape(shape)
