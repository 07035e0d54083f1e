"""Log-probs over a vocabulary that tensor-parallel ranks share."""
