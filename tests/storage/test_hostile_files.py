"""Files that nobody should trust: an error of ours, nothing run, nothing believed, and no more memory than the file."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lapwing as lw
from stored import answers, kept, network

ZEROS = "0" * 64
Header = dict[str, Any]


def parts(content: bytes) -> tuple[Header, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def forged(header: Header, data: bytes) -> bytes:
    """A file whose hashes are all right, whatever it says."""
    digests = {
        name: hashlib.sha256(data[slice(*entry["data_offsets"])]).hexdigest()
        for name, entry in header.items()
        if name != "__metadata__" and _has_offsets(entry)
    }
    metadata = {**header["__metadata__"], "tensor_sha256": json.dumps(digests), "header_sha256": ZEROS}
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    return signed(text) + data


def signed(text: bytes) -> bytes:
    signed_text = text.replace(ZEROS.encode(), hashlib.sha256(text).hexdigest().encode())
    return len(signed_text).to_bytes(8, "little") + signed_text


def _has_offsets(entry: Any) -> bool:
    return isinstance(entry, dict) and all(type(end) is int for end in entry.get("data_offsets", ["no"]))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("original") / "net.lapwing"
    lw.save(kept("classes", "kron"), path)
    return path.read_bytes()


def refused(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    with pytest.raises(lw.LapwingError) as raised:
        lw.load(path, network(3))
    return str(raised.value)


# --- mutations: no hash is right any more ---------------------------------------------------------------------------


def mutated(content: bytes, draw: random.Random) -> bytes:
    """One change, of the kinds that disks, networks and people make."""
    at = draw.randrange(len(content))
    length = int.from_bytes(content[:8], "little")
    in_header = 8 + draw.randrange(length)
    header = content[8 : 8 + length]
    return draw.choice(
        [
            lambda: content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :],
            lambda: content[:in_header] + bytes([draw.randrange(256)]) + content[in_header + 1 :],
            lambda: content[:at],
            lambda: content + bytes(draw.randrange(1, 40)),
            lambda: content[:at] + content[at + draw.randrange(1, 64) :],
            lambda: content[:at] + content[at : at + 32] + content[at:],
            lambda: content[: max(8, at - 64)] + content[at:] + content[max(8, at - 64) : at],
            lambda: draw.randrange(2**64).to_bytes(8, "little") + content[8:],
            lambda: content[:8] + _other_digit(header, draw) + content[8 + length :],
            lambda: content[:8] + header.replace(b'"shape": [', b'"shape": [9', 1) + content[8 + length :],
            lambda: _relengthed(header.replace(b'"dtype"', b'"dtype": "F64", "dtype"', 1), content[8 + length :]),
        ]
    )()


def _other_digit(header: bytes, draw: random.Random) -> bytes:
    digits = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
    at = draw.choice(digits)
    return header[:at] + str(draw.randrange(10)).encode() + header[at + 1 :]


def _relengthed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("n", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused(n: int, original: bytes, tmp_path: Path) -> None:
    draw, path, unchanged = random.Random(n), tmp_path / "mutated.lapwing", 0
    for _ in range(n):
        content = mutated(original, draw)
        if content == original:
            unchanged += 1
            continue
        refused(content, path)
    assert unchanged < n / 10


# --- by hand: every hash is right, and the file lies ------------------------------------------------------------------


def lie(change: Callable[[Header, dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Change the header and the document it holds, and sign again."""

    def make(content: bytes) -> bytes:
        header, data = parts(content)
        document = json.loads(header["__metadata__"]["document"])
        change(header, document)
        if isinstance(header.get("__metadata__"), dict) and "document" in header["__metadata__"]:
            header["__metadata__"]["document"] = json.dumps(document)
        return forged(header, data)

    return make


def first_tensor(header: Header) -> Any:
    return header[next(name for name in header if name != "__metadata__")]


def block(document: dict[str, Any], k: int = 0) -> dict[str, Any]:
    return document["posterior"]["estimate"]["with"]["parts"][0]["with"]["blocks"][k]["with"]


def field(document: dict[str, Any], name: str) -> dict[str, Any]:
    return document["posterior"][name]["with"]


def put(target: dict[str, Any] | list[Any], key: Any, value: Any) -> None:
    target[key] = value


PRIOR, ESTIMATE = "prior", "estimate"
LIES: dict[str, tuple[Callable[[Header, dict[str, Any]], Any], str]] = {
    "a shape of exabytes": (lambda h, d: put(first_tensor(h), "shape", [2**62]), "does not fit"),
    "a shape that overflows": (lambda h, d: put(first_tensor(h), "shape", [2**40, 2**40, 2**40]), "does not fit"),
    "a huge empty shape": (lambda h, d: put(first_tensor(h), "shape", [0, 2**62]), "does not fit"),
    "a negative shape": (lambda h, d: put(first_tensor(h), "shape", [-1, -4]), "can be read"),
    "a shape of truths": (lambda h, d: put(first_tensor(h), "shape", [True, 4]), "can be read"),
    "a shape of fractions": (lambda h, d: put(first_tensor(h), "shape", [1.5]), "can be read"),
    "a hundred axes": (lambda h, d: put(first_tensor(h), "shape", [1] * 100), "can be read"),
    "offsets that overlap": (lambda h, d: put(first_tensor(h), "data_offsets", [8, 16]), "does not fit"),
    "offsets beyond the end": (lambda h, d: put(first_tensor(h), "data_offsets", [0, 2**60]), "does not fit"),
    "an unknown dtype": (lambda h, d: put(first_tensor(h), "dtype", "PICKLE"), "can be read"),
    "an entry with more to say": (lambda h, d: put(first_tensor(h), "code", "1"), "is not dtype, shape"),
    "a tensor that is nobody's": (
        lambda h, d: put(h, "estimate.more", {"dtype": "U8", "shape": [0], "data_offsets": [_end(h), _end(h)]}),
        "no value refers to",
    ),
    "a class by its name": (
        lambda h, d: put(d["posterior"], "structure", {"is": "os.system", "with": {}}),
        "not among",
    ),
    "a class of the table in the wrong place": (
        lambda h, d: put(d["posterior"], "structure", copy.deepcopy(d["posterior"]["prior"])),
        "structure that is not",
    ),
    "a field it does not have": (lambda h, d: put(field(d, PRIOR), "__class__", "x"), "unknown fields"),
    "a field that is missing": (lambda h, d: field(d, PRIOR).pop("index"), "lacks its field index"),
    "a tensor that is not there": (lambda h, d: put(field(d, PRIOR), "mean", {"tensor": "/etc/passwd"}), "no tensor"),
    "a node of no kind": (lambda h, d: put(field(d, PRIOR), "mean", {"eval": "1"}), "unknown kind of node"),
    "axes that are not there": (
        lambda h, d: put(field(d, PRIOR), "mean", {"tensor": "prior.mean", "order": [3]}),
        "has no axes",
    ),
    "a negative slice": (
        lambda h, d: put(block(d)["arrangement"]["with"], "weight", {"slice": [-5, 2]}),
        "not a slice",
    ),
    "a curvature of another size": (
        lambda h, d: put(block(d)["factors"]["with"], "A_sum", copy.deepcopy(block(d, 3)["factors"]["with"]["B_sum"])),
        "another size",
    ),
    "a layer twice as wide": (lambda h, d: put(block(d)["arrangement"]["with"], "o", 8), "the file describes"),
    "a million maps": (lambda h, d: put(block(d)["arrangement"]["with"], "q", 10**9), "the file describes"),
    "blocks that overlap": (
        lambda h, d: put(d["posterior"][ESTIMATE]["with"]["parts"][0]["with"]["slices"], 1, {"slice": [0, 8]}),
        "do not tile",
    ),
    "no data": (lambda h, d: put(field(d, ESTIMATE)["statistics"]["with"], "n", 0), "without data"),
    "a count that is not a number": (
        lambda h, d: put(block(d)["factors"]["with"], "count", {"float": "nan"}),
        "without data",
    ),
    "a count of words": (lambda h, d: put(block(d)["factors"]["with"], "count", "many"), "count that is not"),
    "a float by another name": (
        lambda h, d: put(block(d)["factors"]["with"], "count", {"float": "1e9"}),
        "not a number",
    ),
    "a likelihood of no kind": (lambda h, d: put(d["posterior"], "likelihood", "classes"), "no likelihood"),
    "a negative budget": (lambda h, d: put(d["posterior"], "chunk_floats", -1), "budget"),
    "a cold temperature": (lambda h, d: put(field(d, "readout"), "temperature", -1.0), "temperature"),
    "another prior's parameters": (
        lambda h, d: put(field(d, PRIOR)["layout"]["with"]["names"], 0, "other.weight"),
        "prior does not go with",
    ),
    "a module that is not there": (lambda h, d: put(d["linearised"]["ruled"], 0, "__class__"), "no module"),
    "a module without a rule": (lambda h, d: put(d["linearised"]["ruled"], 0, "2"), "had a rule"),
    "no linearised": (lambda h, d: d.pop("linearised"), "is not model, linearised"),
    "a document with more to say": (lambda h, d: put(d, "code", "1"), "is not model, linearised"),
    "a model without hashes": (lambda h, d: put(d["model"], "tensors", []), "another model"),
    "another schema": (lambda h, d: put(h["__metadata__"], "schema", "2"), "reads schema 1"),
    "another format": (lambda h, d: put(h["__metadata__"], "format", "torch"), "not a file that lw.save wrote"),
    "metadata with more to say": (lambda h, d: put(h["__metadata__"], "code", "1"), "its metadata are not"),
    "metadata that are no words": (lambda h, d: put(h["__metadata__"], "document", 3), "its metadata are not"),
}


def _end(header: Header) -> int:
    return max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")


@pytest.mark.parametrize("name", LIES)
def test_a_lie_with_all_hashes_right_is_refused(name: str, original: bytes, tmp_path: Path) -> None:
    change, words = LIES[name]
    if name == "metadata that are no words":
        header, data = parts(original)
        header["__metadata__"]["document"] = 3
        content = forged(header, data)
    else:
        content = lie(change)(original)
    assert words in refused(content, tmp_path / "lie.lapwing")


def test_a_file_signed_again_without_a_lie_is_read(original: bytes, tmp_path: Path) -> None:
    """The forger of these tests can forge."""
    path = tmp_path / "net.lapwing"
    path.write_bytes(lie(lambda h, d: None)(original))
    ours, theirs = answers(kept("classes", "kron")), answers(lw.load(path, network(3)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


RAW = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header without end": (2**63).to_bytes(8, "little") + b"{}",
    "a pickle": b"\x80\x04cos\nsystem\n(S'echo'\ntR.",
    "a zip": b"PK\x03\x04" + bytes(100),
    "no JSON": (4).to_bytes(8, "little") + b"\xff\xfe\x00\x01",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "brackets without end": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "objects without end": (500_000).to_bytes(8, "little") + b'{"a":' * 100_000,
    "a number without end": (100_008).to_bytes(8, "little") + b'{"a": ' + b"9" * 100_001 + b"}",
    "NaN": (10).to_bytes(8, "little") + b'{"a": NaN}',
    "a key twice": (16).to_bytes(8, "little") + b'{"a": 1, "a": 2}',
    "other tensors": (65).to_bytes(8, "little")
    + b'{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}    '
    + bytes(8),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_such_file_is_refused(name: str, tmp_path: Path) -> None:
    assert "net.lapwing: " in refused(RAW[name], tmp_path / "net.lapwing")


def test_a_directory_or_nothing_at_all_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.lapwing"):
        with pytest.raises(lw.StorageError, match="cannot be read"):
            lw.load(path, network(3))


@pytest.mark.slow
def test_memory_is_bounded_by_the_file(original: bytes, tmp_path: Path) -> None:
    """A child that may take only some megabytes more than it has loads every lie about sizes, and is refused."""
    for number, name in enumerate(LIES):
        (tmp_path / f"{number}.lapwing").write_bytes(
            lie(LIES[name][0])(original) if name != "metadata that are no words" else b""
        )
    script = (
        "import resource, sys, torch, lapwing as lw; from stored import network; m = network(3)\n"
        "lw.fit(m, (torch.zeros(4, 3).double(), torch.arange(4) % 3), 'classification', structure='kron')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "for path in sys.argv[1:]:\n"
        "    try: lw.load(path, m)\n"
        "    except lw.LapwingError: continue\n"
        "    sys.exit(path)\n"
    )
    paths = [str(path) for path in tmp_path.iterdir()]
    where = [str(Path(lw.__file__).parent.parent), str(Path(__file__).parents[1] / "support")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {where!r}\n{script}", *paths],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
