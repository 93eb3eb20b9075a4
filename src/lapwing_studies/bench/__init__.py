"""Tasks and their runners → plain records (JSON). Uses the public API only, as a user would."""
