"""Paced workers, several to a process: an actor that hosts them, and who starts them there."""
