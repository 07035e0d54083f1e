"""What a run has left in its directory."""


def newest(store):
    """Directory of the newest complete run state of a store, or None.

    What an interrupted save left is removed.
    """
    store.recover()
    states = store.states()
    return states[-1].path if states else None


def snapshot(folder):
    """Path and content of every file in a folder, except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
