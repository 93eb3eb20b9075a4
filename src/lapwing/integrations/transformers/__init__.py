"""The Hugging Face Trainer: a callback, a fit of what it trained, and chosen logits of language models."""

from lapwing.integrations.extras import needed

needed("transformers", extra="hf")

from lapwing.integrations.transformers.chosen_logits import ChosenLogits  # noqa: E402
from lapwing.integrations.transformers.trainer import Lapwing, fit, load  # noqa: E402

__all__ = ["ChosenLogits", "Lapwing", "fit", "load"]
