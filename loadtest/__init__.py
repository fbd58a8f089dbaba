"""`tandem bench`: an open-loop load generator for any server that speaks OpenAI's API. Knows neither torch nor Ray."""
