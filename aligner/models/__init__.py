"""Models: interfaces, fronts that a trainer talks to, workers, and the GPT itself."""
