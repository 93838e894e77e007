"""Lightning strategies; imported as unicron_lightning.strategies."""
