"""What to change when a job does not fit: every saving predicted on that very job."""
