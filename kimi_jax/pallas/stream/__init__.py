"""Weight streams: the packed order, the ring through shared memory, and the machine they run on."""
