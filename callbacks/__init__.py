"""Lightning callbacks; imported as unicron_lightning.callbacks."""
