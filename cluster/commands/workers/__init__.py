"""Commands that change how many workers there are, or what they do."""
