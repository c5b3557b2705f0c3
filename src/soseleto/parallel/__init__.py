"""One step divided over processes, micro-batches or shards, and the device that it runs on."""
