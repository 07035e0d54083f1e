"""The newest complete run state of a store."""


def newest(store):
    """Its directory, or None; what an interrupted save left is removed."""
    store.recover()
    states = store.states()
    return states[-1].path if states else None
