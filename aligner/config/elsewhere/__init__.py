"""Configuration keys of other libraries, and their names here."""
