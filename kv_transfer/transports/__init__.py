"""The ways of moving KV, one file each, behind the interface in `kv_transfer.transport`."""
