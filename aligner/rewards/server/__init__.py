"""HTTP server of a reward model, and its client."""

from aligner.packages import require_extra

require_extra("serve", "the reward server")
