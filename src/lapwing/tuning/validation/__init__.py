"""Choose prior scale, noise or temperature, mean and link on held-out data."""
