"""`trace(fn)`: what any callable would allocate on a GPU, found without one. Knows no model and no job."""
