"""Where traces come from: generators with stated parameters, and files of one's own events. Pure."""
