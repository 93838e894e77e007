"""Manual optimization: the micro-batches of a step run side by side, from one backward to the next."""
