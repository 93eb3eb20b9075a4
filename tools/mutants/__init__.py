"""Would the tests see a small mistake in the numerical core? Seeded mutants of it, and the test that kills each."""
