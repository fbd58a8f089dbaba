"""`tandem top`: a live view of the cluster in the terminal."""

from cluster.commands.top.command import top

__all__ = ["top"]
