"""A posterior as a BoTorch model, and its function draws as deterministic models."""

from lapwing.integrations.extras import needed

needed("botorch", extra="botorch")

from lapwing.integrations.botorch.draws import FunctionDraw  # noqa: E402
from lapwing.integrations.botorch.model import LapwingModel  # noqa: E402

__all__ = ["FunctionDraw", "LapwingModel"]
