"""Methods that work and are tested, and whose interface may change."""
