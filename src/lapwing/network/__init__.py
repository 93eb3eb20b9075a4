"""The user's module as a function of inputs and parameters, and its Jacobian."""
