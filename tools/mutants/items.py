"""Single tests of a pytest session."""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol


def passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Whether a test passes; what it shares with the following one is kept."""
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))
