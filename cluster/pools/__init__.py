"""How many workers there are and should be, by role: pure state machines."""
