"""What went wrong, and how it is known: of processes, exceptions, machines and links. Light: all sides import it."""
