"""Files of the page that the coordinator serves."""
