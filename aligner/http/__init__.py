"""HTTP servers of the library, for a reward model and for a policy.

event loop (a thread): token, body ─► threads: JSON, tokens ─► JobQueue ─► the model (main thread)

`listening` limits connections and time, `application` the size of request bodies, and `queue` the
number of waiting items.
"""

JSON_TYPE = "application/json"
MAX_BYTES = 64 * 2**20  # of a request body, and of an answer
