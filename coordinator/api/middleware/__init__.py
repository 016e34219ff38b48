"""One middleware for each concern. ``coordinator.main`` puts them in their order."""
