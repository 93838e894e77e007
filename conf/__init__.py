"""Hydra configuration; imported as unicron_lightning.conf."""
