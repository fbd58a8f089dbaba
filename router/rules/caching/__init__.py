"""What routers know of the KV that workers hold, and what it is worth. Pure."""
