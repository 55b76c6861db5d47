"""What a running program does with memory: read, logged and recorded."""
