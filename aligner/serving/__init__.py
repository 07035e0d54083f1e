"""A policy behind OpenAI's HTTP interface, for whichever engine samples for it."""
