"""One step over several processes, micro-batches or shards, and the device it runs on."""
