"""Hydra configuration of the simulator; imported as unicron_lightning.conf.simulate."""
