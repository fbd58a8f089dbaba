"""What the parts of Tandem say to each other: messages, their codec, the authenticated wire, ticket states, errors.

Imports nothing of Tandem and no torch, so that every part can import it.
"""
