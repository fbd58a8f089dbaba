"""The draft model of a decode worker: a second model with a pool of its own, which guesses what the first one will say."""
