"""Tests of adapters need their libraries: `make test-adapters` installs them, and then none is left out."""

from __future__ import annotations

from importlib.util import find_spec

LIBRARIES = {
    "test_lightning.py": "lightning",
    "test_hugging_face.py": "peft",
    "test_botorch.py": "botorch",
    "test_onnx.py": "onnxruntime",
}
collect_ignore = [name for name, library in LIBRARIES.items() if find_spec(library) is None]
