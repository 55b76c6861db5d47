"""Events, the allocator they are replayed in, and the reports made of that. No torch here."""
