"""Profiles of paced workers, and those that come with Tandem."""
