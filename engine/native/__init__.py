"""The engine's own operators for CPUs, in C++: optional, built on first use."""
