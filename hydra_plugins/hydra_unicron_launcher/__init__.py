"""The Hydra plugin ``hydra/launcher=unicron``; `hydra_plugins` is a namespace that plugins share, without __init__."""
