"""A reward model behind HTTP: server and client."""
