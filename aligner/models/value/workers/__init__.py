"""Workers of a critic: the base class, and a class for each backend."""
