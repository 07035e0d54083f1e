"""A reward model behind HTTP: server and client."""

from aligner.packages import require_extra

require_extra("serve", "the reward server")
