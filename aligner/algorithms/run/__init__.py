"""What runs of all algorithms share: start of the workers, directory, loop."""
