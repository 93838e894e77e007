"""Results of simulations as tables, files and pictures."""
