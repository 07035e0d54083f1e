"""A policy behind OpenAI's HTTP interface, for whichever engine samples for it."""

from aligner.packages import require_extra

require_extra("serve", "the HTTP interface of a policy")
