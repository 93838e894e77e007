"""``make demo``: a small GPT trained straight through three failures, and the proof that nothing was lost."""
