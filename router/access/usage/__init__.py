"""What requests use: noted for the usage log, and held against monthly budgets. Imported only where there is a usage log."""
