"""HTTP to tokens and back: the API, the text side, admission, routing, and the pipeline of one request (`pipeline.py`)."""
