"""The front of whatever scores responses."""
