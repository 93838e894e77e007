"""The time until the next failure: lifetimes, their rates, and estimates from observed failures."""
