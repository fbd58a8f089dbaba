"""What a decode worker decides by rule alone: who has a seat, and who gives its blocks back. Pure."""
