"""`Lapwing`, a callback of the Hugging Face Trainer, and `fit(trainer)`; pip install lapwing[hf]"""

from lapwing.integrations.transformers import ChosenLogits, Lapwing, fit, load

__all__ = ["ChosenLogits", "Lapwing", "fit", "load"]
