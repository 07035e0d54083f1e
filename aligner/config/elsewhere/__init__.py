"""Configuration keys of other libraries, and their names here."""

IGNORED: dict[str, None] = {}  # keys that were given and change no result: for the start-up report
