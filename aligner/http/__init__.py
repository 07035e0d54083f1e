"""HTTP servers of the library: listening within limits, and bearer tokens."""

JSON_TYPE = "application/json"
MAX_BYTES = 64 * 2**20  # of the body of a request, and of an answer
