"""The Jacobian as a value: one block per layer or parameter tensor, factored where the layer allows it."""

from lapwing.jacobian.block import Block, RowSizes, padded
from lapwing.jacobian.dense import DenseBlock
from lapwing.jacobian.embedding import EmbeddingBlock
from lapwing.jacobian.factored import FactorBlock
from lapwing.jacobian.inputs import Given, Images, Inputs
from lapwing.jacobian.output import OutputBlock
from lapwing.jacobian.rows import Jacobian
from lapwing.jacobian.thinned import ThinnedBlock

__all__ = [
    "Block",
    "DenseBlock",
    "EmbeddingBlock",
    "FactorBlock",
    "Given",
    "Images",
    "Inputs",
    "Jacobian",
    "OutputBlock",
    "RowSizes",
    "ThinnedBlock",
    "padded",
]
