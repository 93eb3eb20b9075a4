"""The user's module as a function f(x; θ): parameter layout, linearisation, Jacobian, Jacobian products."""
