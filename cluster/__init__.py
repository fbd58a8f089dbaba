"""The running cluster: the command `tandem`, the controller and its workers, and what they need of Ray."""

__version__ = "0.3.0"
