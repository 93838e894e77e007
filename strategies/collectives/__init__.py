"""Lightning's and torch's collectives, as operations that survive failures."""
