"""Detection and classification of failures: of processes, exceptions, machines and links. Light: all sides
import it.
"""
