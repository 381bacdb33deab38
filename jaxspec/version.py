"""The version of this package, for its command line and for the files that it writes."""

__version__ = "0.1.0"
