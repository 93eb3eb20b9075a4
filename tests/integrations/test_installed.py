"""That the tests of this folder are all collected, and that missing libraries are named."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

import lapwing as lw
from lapwing.integrations.extras import MissingExtraError, needed


@pytest.mark.adapters
@pytest.mark.parametrize(
    "library", ["lightning", "transformers", "peft", "botorch", "onnx", "onnxscript", "onnxruntime"]
)
def test_every_adapters_library_is_installed(library: str):
    assert find_spec(library) is not None, "run `make test-adapters`"


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lapwing\[botorch\]'") as caught:
        needed("botorch", extra="botorch")
    assert isinstance(caught.value, lw.LapwingError) and isinstance(caught.value, ImportError)
