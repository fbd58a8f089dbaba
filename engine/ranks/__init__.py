"""The ranks that compute one worker's model together: the first one plans, the others replay."""
