"""One device's communication with a coordinator, and its stored state."""
