"""The Jacobian of a batch: one block of columns per layer or parameter tensor, factored where the layer allows it."""

from lapwing.network.jacobian.block import Block, RowSizes, padded
from lapwing.network.jacobian.dense import DenseBlock
from lapwing.network.jacobian.embedding import EmbeddingBlock
from lapwing.network.jacobian.factored import FactorBlock
from lapwing.network.jacobian.inputs import Given, Images, Inputs
from lapwing.network.jacobian.output import OutputBlock
from lapwing.network.jacobian.rows import Jacobian
from lapwing.network.jacobian.sparse import SparseBlock

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
    "SparseBlock",
    "padded",
]
