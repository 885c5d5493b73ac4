"""The client, the wire format and the command line of npufleet: what every part may import."""

__version__ = "0.1.0"
