"""What the stand-in says of a backend that breaks the interface."""


class BackendFault(AssertionError):
    """The backend answered what no backend may, or touched memory that is not its to touch."""
