"""What keeps a large body or a large answer from holding up everybody else's stream."""
