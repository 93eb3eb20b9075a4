"""Sums of products of layers' inputs and output gradients, which go into a flat vector of parameters."""

from __future__ import annotations

from lapwing._types import Float, State, Tensor
from lapwing.linalg import Products
from lapwing.operators import Arrangement


class LayerProducts:
    """Σ x yᵀ of layers' rows, added to a flat vector of parameters once there are many of them."""

    def __init__(self, total: Float[Tensor, " p"]) -> None:
        self.total = total
        self.layers: dict[int, tuple[Arrangement, Products]] = {}  # by where a layer begins

    def add(
        self, arrangement: Arrangement, x: Float[Tensor, "m q o"], y: Float[Tensor, "m q i"], *, ones: bool = False
    ) -> None:
        """`ones`: y comes without its last column, the bias's."""
        _, products = self.layers.setdefault(arrangement.slices[0].start, (arrangement, Products()))
        products.add(x, y, ones=ones)
        if products.full:
            self._fold(arrangement, products)

    def add_product(self, arrangement: Arrangement, product: Float[Tensor, "q o i"]) -> None:
        """A sum that was multiplied out elsewhere."""
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
            products = Products()
            products.restore(layer["products"])
            self.layers[layer["arrangement"].slices[0].start] = layer["arrangement"], products

    def _fold(self, arrangement: Arrangement, products: Products) -> None:
        product = products.take()
        if product is not None:
            self.add_product(arrangement, product)
