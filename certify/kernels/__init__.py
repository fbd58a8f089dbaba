"""The work that `tandem certify` gives to every Triton kernel: against references, for its bits, and for its time."""
