"""A policy behind OpenAI's HTTP interface, in front of whichever engine samples for it."""
