"""Models: interfaces, handles that a trainer talks to, workers, and the GPT itself."""
