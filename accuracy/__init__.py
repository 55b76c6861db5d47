"""How right memfit is: jobs measured on a GPU beside what was predicted for them."""
