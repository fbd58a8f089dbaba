"""How many workers each role should have, from what is observed: pure, for the controller and the simulator alike."""
