"""Prior precisions and noise by the marginal likelihood (evidence)."""
