"""A job's own steps, traced, replayed and reported."""
