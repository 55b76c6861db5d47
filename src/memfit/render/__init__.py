"""Reports as text. They are made from the JSON documents that memfit prints, so a saved one can be shown without torch."""
