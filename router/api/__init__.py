"""The HTTP surface in OpenAI's shapes: request bodies, response bodies, errors, SSE."""
