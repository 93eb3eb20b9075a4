"""Choose prior precisions and noise by maximising the marginal likelihood (evidence)."""
