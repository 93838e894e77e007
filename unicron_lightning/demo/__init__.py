"""``make demo``: a small GPT trained through three failures, with proof that nothing was lost."""
