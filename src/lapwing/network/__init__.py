"""The user's module as a function of inputs and parameters: layout, linearisation, Jacobian, products with it."""
