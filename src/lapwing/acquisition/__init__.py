"""Active learning: which inputs to label next, by the information that their labels would give"""

from lapwing.acquisition.scores import bald, batch_bald, epig

__all__ = ["bald", "batch_bald", "epig"]
