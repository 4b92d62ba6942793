"""From a configuration to objects: names looked up, arguments checked against signatures, then built."""
