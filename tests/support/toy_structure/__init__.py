"""A structure made of the pieces that CONTRIBUTING names, and of nothing else: one curvature for each tensor."""
