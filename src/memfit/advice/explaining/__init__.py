"""What `memfit explain` is made of: where it failed, how the numbers add up, why, and what can be done."""
