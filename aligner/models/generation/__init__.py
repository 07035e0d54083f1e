"""Place of sampling engines that live outside the policy; the policy's own is in `models.gpt`."""
