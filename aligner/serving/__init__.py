"""HTTP server of a policy with OpenAI's interface, for any sampling engine."""

from aligner.packages import require_extra

require_extra("serve", "the HTTP interface of a policy")
