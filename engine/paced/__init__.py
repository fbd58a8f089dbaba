"""An engine that computes nothing and takes the time that a profile says: for large clusters on small machines."""
