"""From the user's data (loaders, data sets, arrays, tables) to batches (x, encoded y)."""

from lapwing.data.batches import Batches, Unlabelled, as_batches, as_inputs, is_array, pair_of
from lapwing.data.columns import Columns
from lapwing.data.inputs import ModelInput, as_input

__all__ = [
    "Batches",
    "Columns",
    "ModelInput",
    "Unlabelled",
    "as_batches",
    "as_input",
    "as_inputs",
    "is_array",
    "pair_of",
]
