"""Reports as text, made from the JSON documents that memfit prints: a saved one can be shown without torch."""
