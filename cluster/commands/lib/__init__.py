"""What the commands of `tandem` share: their options, the way to a cluster's HTTP API, tables, waiting."""
