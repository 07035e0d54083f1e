"""HTTP servers of the library: for rewards, and for a policy.

event loop (a thread): token, bytes ─► threads: JSON, tokens ─► JobQueue ─► the model (main thread)
                  ▲                                                             │
                  └──────────────────── results or an error ◄───────────────────┘

`listening` bounds connections and time, `application` the bytes of requests, `queue` what waits.
"""

JSON_TYPE = "application/json"
MAX_BYTES = 64 * 2**20  # of the body of a request, and of an answer
