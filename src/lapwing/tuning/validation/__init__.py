"""Prior scale, noise or temperature, and mean by held-out data."""
