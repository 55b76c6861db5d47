"""Text to calibrate on and to learn from: files, and what comes with Python."""
