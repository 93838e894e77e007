"""The command ``unicron plan``: files, tables and pictures around the pure library `unicron_lightning.planner`."""
