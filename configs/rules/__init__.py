"""What can't be together in a configuration whose values are right one by one. Pure."""
