"""Accumulate outer products of layer inputs and output gradients into a flat parameter vector."""

from __future__ import annotations

from lapwing._types import Float, State, Tensor
from lapwing.linalg import ProductSum
from lapwing.operators import Arrangement


class LayerProducts:
    """Running Σ x yᵀ (q, o, i) per layer, added to a flat vector (p,) when enough rows have been collected."""

    def __init__(self, total: Float[Tensor, " p"]) -> None:
        self.total = total
        self.layers: dict[int, tuple[Arrangement, ProductSum]] = {}  # key: start of the layer's parameters

    def add(
        self, arrangement: Arrangement, x: Float[Tensor, "m q o"], y: Float[Tensor, "m q i"], *, ones: bool = False
    ) -> None:
        """Rows x and y of one layer; with `ones`, y lacks its last column of ones (that of the bias)."""
        _, products = self.layers.setdefault(arrangement.slices[0].start, (arrangement, ProductSum()))
        products.add(x, y, ones=ones)
        if products.full:
            self._fold(arrangement, products)

    def add_product(self, arrangement: Arrangement, product: Float[Tensor, "q o i"]) -> None:
        """Add a sum over rows that is already multiplied out."""
        arrangement.add_(self.total, product)

    def finish(self) -> None:
        for arrangement, products in self.layers.values():
            self._fold(arrangement, products)

    def state(self) -> State:
        layers = [{"arrangement": layer, "products": products.state()} for layer, products in self.layers.values()]
        return {"total": self.total, "layers": layers}

    def restore(self, state: State) -> None:
        self.total.copy_(state["total"])
        self.layers = {}
        for layer in state["layers"]:
            products = ProductSum()
            products.restore(layer["products"])
            self.layers[layer["arrangement"].slices[0].start] = layer["arrangement"], products

    def _fold(self, arrangement: Arrangement, products: ProductSum) -> None:
        product = products.take()
        if product is not None:
            self.add_product(arrangement, product)
